"""Structural tags: each node of the format, and special tokens as triggers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fakes import toy_tokenizer

from radixlm.base.errors import InvalidRequest
from radixlm.grammar.compile import create_backend
from radixlm.grammar.spec import GrammarSpec
from radixlm.text.token_bytes import Decoder
from radixlm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = toy_tokenizer.byte_level()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, Decoder.from_json(backend.decoder.__getstate__()), special, {})


def accepts(tokenizer: Tokenizer, format_: dict[str, Any], text: str) -> bool:
    """Whether `text` is a complete output of the format."""
    assert tokenizer.eos_id is not None
    backend = create_backend("llguidance", tokenizer, [tokenizer.eos_id], tokenizer.vocab_size)
    assert backend is not None
    spec = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": format_}))
    matcher = backend.compile(spec).matcher()
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id]
    return all(matcher.accept(token) for token in tokens)


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
A, B = tag("<f=a>", INTEGER, "</f>"), tag("<f=b>", const("b"), "</f>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (const("hi"), ["hi"], ["h", "hi!", ""]),
    (INTEGER, ["5", "-12"], ["a", "1.5", ""]),
    ({"type": "json_schema", "json_schema": True}, ["5", '{"a": [1]}'], ["a"]),
    ({"type": "regex", "pattern": "a+/b"}, ["aa/b"], ["ab"]),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]*'}, ["x12"], ["y"]),
    ({"type": "any_text"}, ["", "any\nthing"], []),
    ({"type": "any_text", "excludes": ["<f", "no"]}, ["a < f n o"], ["a<f", "no"]),
    ({"type": "sequence", "elements": [const("a"), INTEGER]}, ["a5"], ["a", "5"]),
    ({"type": "or", "elements": [const("a"), INTEGER]}, ["a", "5"], ["a5"]),
    ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
    ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
    ({"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
    ({"type": "repeat", "min": 1, "max": -1, "content": const("a")}, ["a" * 9], [""]),
    (A, ["<f=a>5</f>"], ["<f=a>b</f>", "<f=a>5"]),
    (tag("<b>", {"type": "any_text"}, "</b>"), ["<b>x < y</b>"], ["<b>x", "<b>x</b>y"]),
    (tag("<b>", INTEGER, ["</b>", "!"]), ["<b>5!", "<b>5</b>"], ["<b>5?"]),
    (
        TRIGGERED,
        ["", "text", "x<f=a>5</f>y<f=b>b</f>", "<f=b>b</f>"],
        ["<f=a>b</f>", "<f=c>", "a<f=a>5"],
    ),
    ({**TRIGGERED, "at_least_one": True}, ["<f=a>5</f>", "<f=b>b</f> and"], ["", "text"]),
    (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        ["<f=a>5</f>"],
        ["<f=a>5</f>x", ""],
    ),
    (
        {"type": "tags_with_separator", "tags": [A, B], "separator": ";"},
        ["", "<f=a>5</f>", "<f=a>5</f>;<f=b>b</f>"],
        ["<f=a>5</f><f=b>b</f>", "x"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<|im_start|>"],
            "tags": [tag("<|im_start|>", INTEGER, "<|im_end|>")],
        },
        ["hello <|im_start|>5<|im_end|> bye", ""],
        ["hello <|im_start|>x", "<|im_end|>"],
    ),
]


@pytest.mark.parametrize(("format_", "good", "bad"), CASES)
def test_formats(
    tokenizer: Tokenizer, format_: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(tokenizer, format_, text), text
    for text in bad:
        assert not accepts(tokenizer, format_, text), text


@pytest.mark.parametrize(
    "format_",
    [
        5,
        {"type": "const_string"},
        {"type": "sequence", "elements": []},
        {"type": "or"},
        {"type": "repeat", "min": -1, "content": const("a")},
        {"type": "repeat", "min": 3, "max": 2, "content": const("a")},
        {"type": "json_schema", "json_schema": 5},
        {"type": "json_schema", "json_schema": {}, "style": "odd"},
        {"type": "triggered_tags", "triggers": [""], "tags": [A]},
        {"type": "triggered_tags", "triggers": [], "tags": [A]},
        {"type": "triggered_tags", "triggers": ["<"], "tags": []},
        {"type": "tag", "begin": "a", "content": const("a"), "end": []},
        {"type": "any_text", "excludes": [""]},
        {"type": "grammar", "grammar": "root := "},
    ],
)
def test_invalid_formats(tokenizer: Tokenizer, format_: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        accepts(tokenizer, format_, "")
    assert caught.value.param in ("structural_tag", "ebnf")
