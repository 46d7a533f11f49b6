"""Parts of a tokenizer.json, for tokenizers that are stored in other formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST = 512  # characters of a token that is merged of others


def byte_level(pattern: str, then_gpt2: bool = False) -> dict[str, Any]:
    """Texts are split by ``pattern`` ("": not), then as GPT-2 does if ``then_gpt2``, and tokens are
    of bytes."""
    part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    splitter: dict[str, Any] = {**part, "use_regex": then_gpt2}
    if pattern:
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        splitter = {"type": "Sequence", "pretokenizers": [split, splitter]}
    return {
        "pre_tokenizer": splitter,
        "post_processor": {**part, "use_regex": False},
        "decoder": {**part, "use_regex": True},
    }


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[str]:
    """Every way to merge two tokens into a third, the best score first."""
    place = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token) if len(token) <= _LONGEST else 0):
            left, right = place.get(token[:cut]), place.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-score, left, right, f"{token[:cut]} {token[cut:]}"))
    return [merge for *_, merge in sorted(merges)]


def bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    unk: str | None = None,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """A model of pairs that are merged, "left right" in their order. ``ignore_merges``: a word
    that is a token is not merged."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in merges],
    }


def added(index: int, token: str, is_special: bool) -> dict[str, Any]:
    """A token that is found in texts before they are split."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": is_special}


def with_bos(bos: str, index: int, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """The post-processor that puts BOS before each text, behind ``after``."""

    def ahead(sequence: str) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": sequence, "type_id": 0}},
        ]

    template = {
        "type": "TemplateProcessing",
        "single": ahead("A"),
        "pair": ahead("A") + ahead("B"),
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
    return template if after is None else {"type": "Sequence", "processors": [after, template]}
