"""Deltas join to the decoded text, never split a character, and are cheap."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes import toy_tokenizer
from tokenizers import decoders

from radixlm.text.detokenize import Detokenizer
from radixlm.text.token_bytes import Decoder
from radixlm.text.tokenizer import Tokenizer


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    backend = toy_tokenizer.build(kind)
    state = backend.decoder.__getstate__() if backend.decoder is not None else None
    return Tokenizer(backend, Decoder.from_json(state), {}, {})


def stream(detokenizer: Detokenizer, ids: list[int], step: int) -> list[str]:
    deltas = [detokenizer.feed(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("kind", toy_tokenizer.KINDS)
@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_deltas_join_to_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    known = st.integers(0, tokenizer.vocab_size + 2)
    ids = data.draw(st.lists(known, max_size=30))
    skip = data.draw(st.booleans())
    deltas = stream(Detokenizer(tokenizer, skip), ids, data.draw(st.integers(1, 4)))
    assert "".join(deltas) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(text=st.text(max_size=20))
def test_valid_text_never_shows_a_replacement(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    if tokenizer.token_id("<unk>") in ids or "\ufffd" in text:
        return
    deltas = stream(Detokenizer(tokenizer, False), ids, 1)
    assert "".join(deltas) == tokenizer.decode(ids, False)
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_invalid_bytes_become_replacement_characters(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    names = ["<0xE4>", "a", "<0xFF>", "<0xE4>"] if kind == "byte_fallback" else "äaÿä"
    ids = [tokenizer.token_id(name) or 0 for name in names]
    assert stream(Detokenizer(tokenizer), ids, 1) == ["", "\ufffda", *_tail(kind)]


def _tail(kind: str) -> list[str]:
    # An open run of fallback bytes waits for its end; the byte-level decoder rejects 0xFF at once.
    return ["", "", "\ufffd\ufffd"] if kind == "byte_fallback" else ["\ufffd", "", "\ufffd"]


def test_finish_leaves_a_fresh_detokenizer() -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizer_of(kind)
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello wor")
        first = "".join(stream(detokenizer, ids, 1))
        assert "".join(stream(detokenizer, ids, 2)) == first == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", toy_tokenizer.KINDS)
def test_the_prompt_is_context_but_not_output(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts = {"bpe_suffix": "ab", "words": "one two three", "wordpiece": "hello worlds do a"}
    ids = tokenizer.encode(texts.get(kind, "Hello world the"), add_special_tokens=False)
    for split in range(1, len(ids)):
        prompt, output = ids[:split], ids[split:]
        deltas = stream(Detokenizer(tokenizer, prompt_ids=prompt), output, 1)
        assert tokenizer.decode(prompt) + "".join(deltas) == tokenizer.decode(ids)


def test_a_character_that_begins_in_the_prompt_is_completed() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = [tokenizer.token_id(piece) or 0 for piece in "ðŁĺĢ"]  # the four bytes of one character
    deltas = stream(Detokenizer(tokenizer, prompt_ids=ids[:2]), ids[2:], 1)
    assert "".join(deltas) == "😀"


def test_an_unknown_decoder_holds_back_partial_characters() -> None:
    tokenizer = tokenizer_of("byte_level")
    generic = Tokenizer(tokenizer.backend, Decoder(is_generic=True), {}, {})
    ids = [*tokenizer.encode("a😀b"), tokenizer.token_id("ä") or 0]
    deltas = stream(Detokenizer(generic), ids, 1)
    assert "".join(deltas) == "a😀b\ufffd"
    assert not any("\ufffd" in delta for delta in deltas[:-1])


def test_a_decoder_that_panics_gives_the_text_of_the_single_tokens() -> None:
    backend = toy_tokenizer.build("words")
    backend.add_tokens([" "])
    backend.decoder = decoders.Strip(" ", 1, 1)  # of which one space has too few
    tokenizer = Tokenizer(backend, Decoder.from_json(backend.decoder.__getstate__()), {}, {})
    ids = [tokenizer.token_id(piece) or 0 for piece in ("one", " ", "two")]
    assert tokenizer.decode(ids) == "one two"
    assert "".join(stream(Detokenizer(tokenizer), ids, 1)) == "one two"
