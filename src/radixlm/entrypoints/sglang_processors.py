"""The logit processors of SGLang that requests name by a pickle, which is read and never run.

SGLang's clients send ``Processor.to_str()``: ``{"callable": HEX}``, the pickle of a class. Of a
class that a module defines, a pickle is the name of the module and that of the class. Those of
SGLang's own classes are RadixLM's processors, with the same ``custom_params``.
"""

import json
import pickletools

_MODULE = "sglang.srt.sampling.custom_logit_processor"
NAMES = {
    "DisallowedTokensLogitsProcessor": "disallowed_tokens",
    "DeepseekOCRNoRepeatNGramLogitProcessor": "no_repeat_ngram",
    "Glm4MoeThinkingBudgetLogitProcessor": "thinking_budget",
    "Qwen3ThinkingBudgetLogitProcessor": "thinking_budget",
    "DeepSeekR1ThinkingBudgetLogitProcessor": "thinking_budget",
}
_PLAIN = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "PUT", "STOP"})
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE"})


def known_processor(text: str) -> str | None:
    """The processor that a text of SGLang's stands for; None if it is none of those."""
    try:
        pickled = bytes.fromhex(json.loads(text)["callable"])
        names = _class_named(pickled)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return NAMES.get(names[1]) if len(names) == 2 and names[0] == _MODULE else None


def _class_named(pickled: bytes) -> list[str]:
    """[module, class] of a pickle that is a class by name; empty for any other. ValueError if it is
    no pickle."""
    texts: list[str] = []
    for op, argument, _ in pickletools.genops(pickled):
        if op.name in _TEXTS:
            texts.append(str(argument))
        elif op.name == "GLOBAL":
            texts += str(argument).split(" ", 1)
        elif op.name not in _PLAIN and op.name != "STACK_GLOBAL":
            return []
    return texts
