"""SGLang's logit processors, which are RadixLM's own under other names.

``to_str()`` gives the name that a request sends. Code is never sent: a class of your own is
registered with ``radixlm serve --logit-processor NAME=module:Class``, and requests send NAME.
"""

from __future__ import annotations

from radixlm.entrypoints.sglang_processors import NAMES


class CustomLogitProcessor:
    """The base class."""

    @classmethod
    def to_str(cls) -> str:
        """The name that a request sends as ``custom_logit_processor``; TypeError for a class of
        your own."""
        if cls.__name__ not in NAMES or cls.__module__ != __name__:
            raise TypeError(
                f"{cls.__qualname__} cannot be sent: start the server with --logit-processor "
                f"NAME={cls.__module__}:{cls.__qualname__} and send NAME"
            )
        return NAMES[cls.__name__]


class DisallowedTokensLogitsProcessor(CustomLogitProcessor):
    """``custom_params``: ``token_ids``, which are never sampled."""


class DeepseekOCRNoRepeatNGramLogitProcessor(CustomLogitProcessor):
    """``custom_params``: ``ngram_size``, ``window_size``, ``whitelist_token_ids``."""


class ThinkingBudgetLogitProcessor(CustomLogitProcessor):
    """``custom_params``: ``thinking_budget``, the most tokens of reasoning."""


class Glm4MoeThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Of GLM-4.5 and later."""


class Qwen3ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Of Qwen3."""


class DeepSeekR1ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Of DeepSeek-R1."""
