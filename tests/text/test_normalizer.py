"""Tokenizers whose patterns make texts long, or take long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.toy_tokenizer import byte_level
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from radixlm.base.errors import CheckpointError, InvalidRequest
from radixlm.text.normalizer import growth, has_repeated_groups
from radixlm.text.tokenizer import load_tokenizer

DOUBLE = normalizers.Replace("a", "aa")


def saved(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_growth_is_what_the_library_does() -> None:
    steps: list[Any] = [
        DOUBLE, normalizers.Replace(Regex("a+"), "bcd"), normalizers.Replace("bcdb", "x"),
        normalizers.Prepend("_"), normalizers.NFC(),
    ]  # fmt: skip
    for count in range(1, len(steps) + 1):
        chain = normalizers.Sequence([normalizers.Sequence(steps[:count])])
        bound = growth(json.loads(chain.__getstate__()))
        assert bound == (2, 8, 8, 8, 8)[count - 1]
        for text in ("aaaa", "bababa", "xyz" * 5):
            assert len(chain.normalize_str(text)) <= bound * len(text) + bound
    assert growth({}) == growth(None) == 1


def test_a_normalizer_that_doubles_often_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([DOUBLE] * 12)
    assert len(load_tokenizer(saved(tmp_path, tokenizer)).encode("a")) > 100
    tokenizer.normalizer = normalizers.Sequence([DOUBLE] * 13)
    with pytest.raises(CheckpointError, match="8192 times longer; the limit is 4096"):
        load_tokenizer(saved(tmp_path, tokenizer))


def test_a_pattern_that_gives_up_is_the_error_of_its_text(tmp_path: Path) -> None:
    tokenizer = byte_level()
    assert not load_tokenizer(saved(tmp_path, tokenizer)).may_be_slow
    tokenizer.normalizer = normalizers.Replace(Regex("(a+)+$"), "x")
    slow = load_tokenizer(saved(tmp_path, tokenizer))
    assert slow.may_be_slow
    for encode in (slow.encode, lambda text: slow.encode_pair("b", text)):
        with pytest.raises(InvalidRequest, match="cannot read it") as caught:
            encode("a" * 40 + "b")
        assert caught.value.param == "text"
    assert slow.decode(slow.encode("Hello")) == "Hello"


def test_repeated_groups_are_found_in_nested_steps() -> None:
    def split(pattern: str) -> Any:
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    usual = [split(r"(?i:'s|'t)?\p{L}+|\s+(?!\S)|\p{N}{1,3}"), pre_tokenizers.ByteLevel()]
    assert not has_repeated_groups(json.loads(pre_tokenizers.Sequence(usual).__getstate__()))
    odd = pre_tokenizers.Sequence([*usual, split(r"(?:x\w*)*y")])
    assert has_repeated_groups({}, json.loads(odd.__getstate__()))
