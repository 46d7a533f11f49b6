"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json: byte-level BPE ("gpt2")
and sentencepiece BPE ("llama", "gemma"), whose merges are derived from the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record
from radixlm.text.tokenizer_json import added, bpe, byte_level, merges_of, with_bos

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (  # a word ends where a lower-case letter is followed by an upper-case one
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_DIGIT = r"\p{N}"  # each digit is a word, the rest as in GPT-2


class _PreTokenizer(Record):
    """How a text is split into words: by ``pattern``, then as GPT-2 does if ``then_gpt2``.
    ``is_whole_first``: a word that is a token is not merged (ignore_merges). ``adds_bos``: the
    default where the file does not say."""

    pattern: str = ""
    then_gpt2: bool = True
    is_whole_first: bool = False
    adds_bos: bool = False


_GPT2, _QWEN2 = _PreTokenizer(), _PreTokenizer(_WORDS % "", False)
_LLAMA3 = _PreTokenizer(_WORDS % "{1,3}", False, is_whole_first=True, adds_bos=True)
_GPT4O = _PreTokenizer(_CASED % (_ENDINGS, _ENDINGS, "{1,3}"), False)
# tokenizer.ggml.pre
_SPLITS: Mapping[str, _PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "default", "olmo", "mpt", "exaone4", "phi-2", "dbrx"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    "smaug-bpe": _PreTokenizer(_WORDS % "{1,3}", False),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "exaone"), _PreTokenizer(_DIGIT)
    ),
    "tekken": _PreTokenizer(_CASED % ("", "", ""), False, is_whole_first=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_CONTROL, _USER, _BYTE = 3, 4, 6  # token types
_SPACE = "\u2581"


def tokenizer_files(metadata: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]] | None:
    """File name -> contents; None if the file has no tokenizer. CheckpointError for an unsupported
    type suggests --tokenizer-path."""
    get = _Values(metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    tokens, types = get.texts("tokens"), get.numbers("token_type")
    types = types or [1] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{source}: tokenizer.ggml: tokens and token types do not match")
    if kind == "gpt2":
        model = _byte_level(get, tokens)
    elif kind == "llama":
        model = _sentencepiece(get, tokens, types)
    else:
        raise _unsupported(source, f"tokenizer.ggml.model {kind!r:.40}")
    further = [
        added(i, tokens[i], t == _CONTROL) for i, t in enumerate(types) if t in (_CONTROL, _USER)
    ]
    bos = get.token("bos", tokens)
    pre = _SPLITS.get(str(metadata.get("tokenizer.ggml.pre")), _GPT2)
    usual = kind == "llama" or pre.adds_bos
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", usual)
    if bos is not None and adds_bos:
        model["post_processor"] = with_bos(bos, tokens.index(bos), model["post_processor"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": get.token("eos", tokens),
        "unk_token": get.token("unknown", tokens),
        "pad_token": get.token("padding", tokens),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": further}
    named = {key: value for key, value in config.items() if value is not None}
    return {"tokenizer.json": base | model, "tokenizer_config.json": named}


def _byte_level(get: _Values, tokens: Sequence[str]) -> dict[str, Any]:
    pre = get.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise _unsupported(get.source, f"tokenizer.ggml.pre {pre!r:.40}")
    how = _SPLITS[pre]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        **byte_level(how.pattern, how.then_gpt2),
        "model": bpe(tokens, get.texts("merges"), ignore_merges=how.is_whole_first),
    }


def _sentencepiece(get: _Values, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    scores = get.numbers("scores")
    if len(scores) != len(tokens):
        raise CheckpointError(f"{get.source}: tokenizer.ggml.scores: expected one score per token")
    adds_space = bool(get.metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    model = bpe(tokens, merges_of(tokens, scores), unk=get.token("unknown", tokens))
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model | {"byte_fallback": _BYTE in types, "fuse_unk": True},
    }


def _unsupported(source: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: {what} is not supported: set a tokenizer with --tokenizer-path FOLDER"
    )


class _Values:
    """Typed access to tokenizer.ggml.*"""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata, self.source = metadata, source

    def texts(self, name: str) -> list[str]:
        return self._list(name, str)

    def numbers(self, name: str) -> list[Any]:
        return self._list(name, (int, float)) if self._key(name) in self.metadata else []

    def token(self, name: str, tokens: Sequence[str]) -> str | None:
        """The token of ``..._token_id``."""
        index = self.metadata.get(self._key(f"{name}_token_id"))
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            return None
        return tokens[index]

    def _list(self, name: str, kinds: type | tuple[type, ...]) -> list[Any]:
        value = self.metadata.get(self._key(name))
        if not isinstance(value, list) or not all(isinstance(one, kinds) for one in value):
            raise CheckpointError(
                f"{self.source}: {self._key(name)} is missing or has the wrong type"
            )
        return value

    @staticmethod
    def _key(name: str) -> str:
        return f"tokenizer.ggml.{name}"
