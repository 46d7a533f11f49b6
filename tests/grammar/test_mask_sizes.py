"""Masks for any size of the tokenizer, any width of the logits and any EOS ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.grammar.compile import create_backend
from radixlm.grammar.spec import GrammarSpec, Matcher

BYTES = 256
MULTIPLES = st.integers(9, 24).map(lambda n: 32 * n)
SIZES = st.one_of(MULTIPLES, st.integers(BYTES + 3, 700))
LOGITS = st.one_of(MULTIPLES, st.integers(BYTES + 3, 1000), st.just(4096))
CHOICE = GrammarSpec("regex", "(yes|no)[ab]?")
ANYTHING = GrammarSpec("regex", "(.|\n)*")
OBJECT = GrammarSpec("json_schema", json.dumps({"type": "object", "required": ["a"]}))


class BytesTokenizer:
    """A token for each byte, then words that no grammar here allows. No special tokens."""

    special_ids = frozenset[int]()
    bos_id = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < BYTES else b"\xff" + str(token).encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def is_special(self, token: int) -> bool:
        return False

    def id_to_piece(self, token: int) -> str | None:
        return None


def allowed(matcher: Matcher, width: int) -> set[int]:
    out = np.full(-(-width // 32), 0x55555555, np.int32)
    matcher.fill_mask(out)
    return set(map(int, np.flatnonzero(np.unpackbits(out.view("u1"), bitorder="little"))))


def compiled(name: str, size: int, width: int, eos_ids: tuple[int, ...], spec: GrammarSpec) -> Any:
    pytest.importorskip({"outlines": "outlines_core"}.get(name, name))
    tokenizer: Any = BytesTokenizer(size)
    backend = create_backend(name, tokenizer, eos_ids, width)
    assert backend is not None
    return backend.compile(spec)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=SIZES, width=LOGITS, eos=st.sampled_from(["none", "last", "beyond", "both"]))
def test_masks_of_every_size(name: str, size: int, width: int, eos: str) -> None:
    beyond = size + 5
    eos_ids = {"none": (), "last": (size - 1,), "beyond": (beyond,), "both": (size - 1, beyond)}[
        eos
    ]
    rounded = -(-width // 32) * 32
    ends = {i for i in eos_ids if i < min(size, rounded)} or {i for i in eos_ids if i < rounded}
    matcher = compiled(name, size, width, eos_ids, CHOICE).matcher()
    assert allowed(matcher, width) == set(b"yn")
    for token in b"no":
        assert matcher.accept(token)
    assert allowed(matcher, width) - set(eos_ids) == set(b"ab")
    assert ends <= allowed(matcher, width)
    assert not matcher.accept(size + 1) and not matcher.accept(size)
    assert matcher.accept(ord("b"))
    assert allowed(matcher, width) <= set(eos_ids)
    assert matcher.forced_tokens() == []
    for token in sorted(ends)[:1]:
        assert matcher.accept(token) and matcher.is_terminated
        assert ends <= allowed(matcher, width) <= set(eos_ids)
        matcher.rollback(2)
        assert allowed(matcher, width) >= set(b"ab")
    free = compiled(name, size, width, eos_ids, ANYTHING).matcher()
    assert allowed(free, width) <= set(range(size)) | set(eos_ids)


@pytest.mark.parametrize(("size", "width"), [(512, 513), (480, 512), (512, 512), (512, 300)])
@pytest.mark.parametrize("eos_ids", [(), (511,), (600,)])
def test_masks_of_outlines(size: int, width: int, eos_ids: tuple[int, ...]) -> None:
    """Fewer cases: each grammar starts a process."""
    matcher = compiled("outlines", size, width, eos_ids, CHOICE).matcher()
    assert allowed(matcher, width) == set(b"yn")
    assert matcher.accept(ord("n")) and matcher.accept(ord("o"))
    inside = {i for i in eos_ids if i < -(-width // 32) * 32}
    assert allowed(matcher, width) == set(b"ab") | inside
    assert not matcher.accept(size)
    assert matcher.accept(ord("b"))
    assert allowed(matcher, width) == inside


@pytest.mark.parametrize("name", ["llguidance", "xgrammar", "outlines"])
def test_checkpoints_pad_their_logits(name: str) -> None:
    """2,048 ids, 2,049 logits: the engine died of this."""
    matcher = compiled(name, 2048, 2049, (2,), OBJECT if name != "outlines" else CHOICE).matcher()
    assert ord("{") in allowed(matcher, 2049) or ord("y") in allowed(matcher, 2049)
