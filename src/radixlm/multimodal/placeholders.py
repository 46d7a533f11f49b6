"""A text and the media that stand in it: cut at its placeholders, and put together as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_parts(parts: Sequence[str], num_media: int, what: str) -> None:
    """ValueError unless there is a placeholder for each of the media, which are ``what``."""
    if len(parts) != num_media + 1:
        raise ValueError(f"{len(parts) - 1} placeholders for {num_media} {what}")


def ids_of(
    tokenizer: Any, parts: Sequence[str], marks: Sequence[str], add_special_tokens: bool
) -> dict[str, NDArray[Any]]:
    """``input_ids``, int64 [1, tokens], of the parts of a text with a mark between each two."""
    text = "".join(part + mark for part, mark in zip(parts, [*marks, ""], strict=True))
    ids = tokenizer([text], add_special_tokens=add_special_tokens)["input_ids"]
    return {"input_ids": np.asarray(ids, np.int64)}
