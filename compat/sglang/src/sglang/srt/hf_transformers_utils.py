"""``get_tokenizer``, by transformers."""

from __future__ import annotations

from typing import Any

from radixlm.base.lazy import load


def get_tokenizer(tokenizer_name: str, *args: Any, **kwargs: Any) -> Any:
    """The tokenizer of a model's folder."""
    return load("transformers:AutoTokenizer").from_pretrained(tokenizer_name, *args, **kwargs)
