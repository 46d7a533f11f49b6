"""Parts of a tokenizer.json, for tokenizers that are stored in other formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST = 512  # characters of a token that is merged of others


def byte_level(patterns: Sequence[str], then_gpt2: bool = False) -> dict[str, Any]:
    """Texts are split by each of ``patterns``, then as GPT-2 does if ``then_gpt2``, and tokens are
    of bytes."""
    part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    splitter: dict[str, Any] = {**part, "use_regex": then_gpt2}
    if patterns:
        kept = {"type": "Split", "behavior": "Isolated", "invert": False}
        splits = [{**kept, "pattern": {"Regex": pattern}} for pattern in patterns]
        splitter = {"type": "Sequence", "pretokenizers": [*splits, splitter]}
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


def with_ends(
    first: str | None, last: str | None, ids: Mapping[str, int], after: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The post-processor that puts ``first`` before each text and ``last`` behind it, by their
    ``ids``, behind ``after``; None for neither."""
    if first is None and last is None:
        return after

    def ended(sequence: str) -> list[dict[str, Any]]:
        parts = [{"Sequence": {"id": sequence, "type_id": 0}}]
        before, behind = (
            [{"SpecialToken": {"id": t, "type_id": 0}}] if t else [] for t in (first, last)
        )
        return [*before, *parts, *behind]

    tokens = [token for token in (first, last) if token is not None]
    template = {
        "type": "TemplateProcessing",
        "single": ended("A"),
        "pair": ended("A") + ended("B"),
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in tokens},
    }
    return template if after is None else {"type": "Sequence", "processors": [after, template]}
