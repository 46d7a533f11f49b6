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
WORDS |= {
    "qwen35": WORDS["qwen2"],
    "glm4": WORDS["llama-bpe"],
    "deepseek-v3": ["It", "'s", " ", "123", "4", " fooBAR", "'S", " ", " x", "/\n"],
    "deepseek-coder": [
        "It", "'", "s", " ", "1", "2", "3", "4", " fooBAR", "'", "S", " ", " x", "/", "\n",
    ],
    "falcon": ["It", "'", "s", " ", "123", "4", " fooBAR", "'", "S", " ", " x", "/", "\n"],
    "bloom": ["It's", " 1234", " fooBAR'S", " ", " x/", "\n"],
    "kimi-k2": ["It's", " ", "123", "4", " foo", "BAR'S", " ", " x", "/\n"],
    "tiny_aya": ["It's", " ", "1", "234", " foo", "BAR'S", " ", " x", "/\n"],
    "afmoe": ["It", "'s", " ", "1", "234", " fooBAR", "'S", " ", " x", "/\n"],
    "superbpe": ["It's ", "1", "234", " fooBAR'S  x/\n"],
    "bailingmoe2": WORDS["qwen2"],
    "seed-coder": ["It", "'s", " ", "1", "2", "3", "4", " fooBAR", "'S", " ", " x", "/", "\n"],
}  # fmt: skip
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


def test_bert_tokens_go_on_after_two_hashes() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581the", "\u2581cat", "s", "\u2581!"]
    metadata = {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.cls_token_id": 2, "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
    }  # fmt: skip
    found = tokenizer_files(metadata, "m.gguf")
    assert found is not None
    tokenizer = Tokenizer.from_str(json.dumps(found["tokenizer.json"]))
    assert tokenizer.encode("The cats dog!").ids == [2, 4, 5, 6, 1, 7, 3]
    assert tokenizer.decode([2, 4, 5, 6, 7, 3]) == "the cats!"


def test_unigrams_take_the_best_path_and_end_with_eos() -> None:
    tokens = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "b", "c", "bc", "\u2581ab"]
    metadata = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 2, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -5.0, -2.0, -3.0, -3.0, -2.5, -1.0],
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 2,
    }  # fmt: skip
    found = tokenizer_files(metadata, "m.gguf")
    assert found is not None
    tokenizer = Tokenizer.from_str(json.dumps(found["tokenizer.json"]))
    assert tokenizer.encode("abc  a").ids == [8, 6, 4, 1]  # -4.0; "a" + "bc" is -4.5
    assert tokenizer.decode([8, 6, 4, 1]) == "abc a"


def test_stored_merges_of_sentencepiece_and_an_end_that_is_added() -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<0x0A>", "a", "b", "\u2581", "ab", "\u2581ab"]
    metadata = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 6, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "\u2581 ab"], "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True,
    }  # fmt: skip
    found = tokenizer_files(metadata, "m.gguf")
    assert found is not None
    tokenizer = Tokenizer.from_str(json.dumps(found["tokenizer.json"]))
    assert tokenizer.encode("ab ab\n").ids == [2, 8, 9, 4, 1]
    assert tokenizer.decode([8, 9, 4]) == "ab ab\n"


def test_templates_by_name_stand_beside_the_default_one() -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "plain",
    }  # fmt: skip
    files = tokenizer_files(metadata, "m.gguf") or {}
    assert files["tokenizer_config.json"]["chat_template"] == "plain"
    metadata |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "t"}
    files = tokenizer_files(metadata, "m.gguf") or {}
    assert files["tokenizer_config.json"]["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "t"},
    ]
