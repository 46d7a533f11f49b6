"""How the byte-level tokenizer of a GGUF file splits text, by the pre-tokenizer name in the
file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from radixlm.text.gguf_tokenizer import tokenizer_files

TEXT = "It's 1234 fooBAR'S  x/\n"
# from llama.cpp with a file of this name, in which no merge joins letters
WORDS = {
    "gpt-2": ["It", "'s", " 1234", " fooBAR", "'", "S", " ", " x", "/", "\n"],
    "llama-bpe": ["It", "'s", " ", "123", "4", " fooBAR", "'S", " ", " x", "/\n"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " fooBAR", "'S", " ", " x", "/\n"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", " fooBAR", "'", "S", " ", " x", "/", "\n"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", " foo", "BAR", "'S", " ", " x", "/\n"],
    "gpt-4o": ["It's", " ", "123", "4", " foo", "BAR'S", " ", " x", "/\n"],
}
SAME = {"deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama4": "gpt-4o", "olmo": "gpt-2"}


def files(pre: str, **more: Any) -> dict[str, dict[str, Any]]:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": ["<s>", "a", "b"], "tokenizer.ggml.token_type": [3, 1, 1],
        "tokenizer.ggml.bos_token_id": 0, **more,
    }  # fmt: skip
    found = tokenizer_files(metadata, "m.gguf")
    assert found is not None
    return found


@pytest.mark.parametrize("pre", [*WORDS, *SAME])
def test_texts_are_split_by_the_named_pre_tokenizer(pre: str) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(files(pre)["tokenizer.json"]))
    splitter = tokenizer.pre_tokenizer
    assert splitter is not None
    words = [
        word.replace("\u0120", " ").replace("\u010a", "\n")
        for word, _ in splitter.pre_tokenize_str(TEXT)
    ]
    assert words == WORDS[SAME.get(pre, pre)]


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("llama-bpe", False, False),
        ("qwen2", True, True),
    ],
)
def test_which_models_start_with_bos(pre: str, said: bool | None, adds: bool) -> None:
    more = {} if said is None else {"tokenizer.ggml.add_bos_token": said}
    tokenizer = Tokenizer.from_str(json.dumps(files(pre, **more)["tokenizer.json"]))
    assert tokenizer.encode("ab").ids == [*([0] if adds else []), 1, 2]
