"""Folders whose only tokenizer is Mistral's tekken.json."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import CheckpointError
from radixlm.text.tokenizer import load_tokenizer

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["th", "the", " t", " th", " the", "in", "ing", "er", "ther", "é", "ab", "abab", " in"]
# behind the 256 bytes; the last one is beyond the vocabulary's size
PIECES = [bytes([i]) for i in range(256)] + [word.encode() for word in (*WORDS, "zz")]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
NUM_SPECIAL = 8


def write(folder: Path, **changes: Any) -> None:
    raw = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(PIECES),
            "default_vocab_size": len(PIECES) - 1 + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v7",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for i, piece in enumerate(PIECES)
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)
        ],
    }
    raw |= changes
    kept = {key: value for key, value in raw.items() if value is not None}
    (folder / "tekken.json").write_text(json.dumps(kept))


def merged(word: bytes) -> list[int]:
    """Byte pairs merged by the rank of what they make, the first of the best pair at a time."""
    ranks = {piece: i for i, piece in enumerate(PIECES[:-1])}
    if word in ranks:
        return [ranks[word] + NUM_SPECIAL]
    parts = [bytes([byte]) for byte in word]
    while True:
        found = [
            (ranks[left + right], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in ranks
        ]
        if not found:
            return [ranks[part] + NUM_SPECIAL for part in parts]
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_words_are_merged_by_rank(tmp_path: Path) -> None:
    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == len(PIECES) - 1 + NUM_SPECIAL
    rng = random.Random(0)
    for _ in range(200):
        word = "".join(rng.choices(["the", "in", "g", "er", "ab", "é", "zz", "th"], k=4))
        assert tokenizer.encode(word, add_special_tokens=False) == merged(word.encode())
        assert tokenizer.decode(tokenizer.encode(word)) == word
    text = "The other  thing: 12 is\nin é"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_the_first_ids(tmp_path: Path) -> None:
    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.added_bos) == (1, 2, "<s>")
    ids = tokenizer.encode("[INST]the[/INST]")
    assert ids == [1, 3, 256 + NUM_SPECIAL + WORDS.index("the"), 4]
    assert tokenizer.decode([7]) == "" and tokenizer.backend.id_to_token(7) == "<SPECIAL_7>"
    write(tmp_path, special_tokens=None)
    assert load_tokenizer(tmp_path).encode("[/INST]") == [1, 4]


def test_another_file_of_this_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, vocab=[{"rank": 0}])
    with pytest.raises(CheckpointError, match=r"tekken.json: is no tokenizer of Mistral"):
        load_tokenizer(tmp_path)
