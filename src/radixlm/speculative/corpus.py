"""Texts of an operator, from which drafts are taken."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from radixlm.speculative.text_index import SEPARATOR
from radixlm.step.plan import Int32Array
from radixlm.text.tokenizer import Tokenizer


def read_corpus(path: str) -> list[str]:
    """The texts of a JSONL file, a JSON string a line; ValueError that names the line."""
    texts: list[str] = []
    for number, line in enumerate(Path(path).expanduser().read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
        if not isinstance(text, str):
            raise ValueError(f'line {number} is no JSON string; "a text" works')
        texts.append(text)
    return texts


def tokens_of(texts: list[str], tokenizer: Tokenizer) -> Int32Array:
    """The texts as token ids, int32, with SEPARATOR between them."""
    ids: list[int] = []
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if tokens:
            ids += [SEPARATOR, *tokens] if ids else tokens
    return np.array(ids, np.int32)
