"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json: byte-level BPE
("gpt2"), BPE of sentencepiece with merges derived from scores ("llama") or stored ("gemma4"),
WordPiece ("bert") and sentencepiece's unigrams ("t5")."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from radixlm.base.errors import CheckpointError
from radixlm.text.gguf_splits import SPLITS, Splits
from radixlm.text.tokenizer_json import added, bpe, byte_level, merges_of, with_ends

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
    if kind not in _MODELS:
        raise _unsupported(source, f"tokenizer.ggml.model {kind!r:.40}")
    model = _MODELS[kind](get, tokens, types)
    further = [
        added(i, tokens[i], t == _CONTROL) for i, t in enumerate(types) if t in (_CONTROL, _USER)
    ]
    model["post_processor"] = _ends(get, kind, tokens, model.get("post_processor"))
    bos = get.token("bos", tokens)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": get.token("eos", tokens),
        "unk_token": get.token("unknown", tokens),
        "pad_token": get.token("padding", tokens),
        "chat_template": _templates(metadata),
    }
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": further}
    named = {key: value for key, value in config.items() if value is not None}
    return {"tokenizer.json": base | model, "tokenizer_config.json": named}


def _templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The one template, or several by name as tokenizer_config.json lists them."""
    default, names = (metadata.get(f"tokenizer.chat_template{end}") for end in ("", "s"))
    sources = {"default": default}
    for name in names if isinstance(names, list) else ():
        sources[name] = metadata.get(f"tokenizer.chat_template.{name}")
    found = [
        {"name": name, "template": source}
        for name, source in sources.items()
        if isinstance(source, str)
    ]
    return found if names else default


def _ends(
    get: _Values, kind: str, tokens: Sequence[str], after: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The post-processor that adds BOS, and EOS or SEP, where the file or else its kind says so."""
    pre = SPLITS.get(str(get.metadata.get("tokenizer.ggml.pre")), Splits())
    is_byte_level = kind == "gpt2"

    def adds(name: str, usual: bool) -> bool:
        return bool(get.metadata.get(f"tokenizer.ggml.add_{name}_token", usual))

    bos, eos, sep = (get.token(name, tokens) for name in ("bos", "eos", "seperator"))
    first = last = None
    if adds("bos", pre.adds_bos if is_byte_level else kind in ("llama", "bert")):
        first = bos or get.token("cls", tokens)
    if adds("sep", kind == "bert" or (is_byte_level and pre.adds_sep)):
        last = sep or eos
    elif adds("eos", kind == "t5"):
        last = eos
    return with_ends(first, last, {token: i for i, token in enumerate(tokens)}, after)


def _byte_level(get: _Values, tokens: Sequence[str], _types: Sequence[int]) -> dict[str, Any]:
    pre = get.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise _unsupported(get.source, f"tokenizer.ggml.pre {pre!r:.40}")
    how = SPLITS[pre]
    return {
        "normalizer": {"type": "NFC"} if pre in ("qwen2", "qwen35") else None,
        **byte_level(how.patterns, how.then_gpt2),
        "model": bpe(tokens, get.texts("merges"), ignore_merges=how.is_whole_first),
    }


def _sentencepiece(get: _Values, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    is_stored = get.metadata.get("tokenizer.ggml.model") == "gemma4"
    scores = [] if is_stored else get.numbers("scores")
    if not is_stored and len(scores) != len(tokens):
        raise CheckpointError(f"{get.source}: tokenizer.ggml.scores: expected one score per token")
    adds_space = bool(get.metadata.get("tokenizer.ggml.add_space_prefix", not is_stored))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    merges = get.texts("merges") if is_stored else merges_of(tokens, scores)
    model = bpe(tokens, merges, unk=get.token("unknown", tokens))
    has_bytes = _BYTE in types or "<0x00>" in tokens
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model | {"byte_fallback": has_bytes, "fuse_unk": True},
    }


def _wordpiece(get: _Values, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """A token that starts a word has a mark in the file; one that goes on has none, BERT's way is
    the reverse."""

    def own(token: str, kind: int) -> str:
        if kind == _CONTROL:
            return token
        return token[1:] if token.startswith(_SPACE) else "##" + token

    lowers = bool(get.metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    accents = {"strip_accents": None, "lowercase": lowers}
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            **accents,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": get.token("unknown", tokens) or "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {
                own(t, kind): i for i, (t, kind) in enumerate(zip(tokens, types, strict=True))
            },
        },
    }


def _unigram(get: _Values, tokens: Sequence[str], _types: Sequence[int]) -> dict[str, Any]:
    scores, chars = get.numbers("scores"), get.numbers("precompiled_charsmap")
    if len(scores) != len(tokens):
        raise CheckpointError(f"{get.source}: tokenizer.ggml.scores: expected one score per token")
    table = base64.b64encode(bytes(one & 255 for one in chars)).decode()
    adds_space = bool(get.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if adds_space else "never",
        "split": True,
    }
    removes = bool(get.metadata.get("tokenizer.ggml.remove_extra_whitespaces", True))
    words = [{"type": "WhitespaceSplit"}] if removes else []
    unk = get.metadata.get("tokenizer.ggml.unknown_token_id", 2)
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": table} if chars else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, spaces]},
        "post_processor": None,
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unk,
            "vocab": [[token, score] for token, score in zip(tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


_MODELS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece,
    "bert": _wordpiece,
    "t5": _unigram,
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
