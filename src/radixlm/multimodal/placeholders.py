"""Splits a text at its placeholders and tokenizes it with the media's tokens in between."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_parts(parts: Sequence[str], num_media: int, what: str) -> None:
    """ValueError unless there is a placeholder for each piece of media; ``what`` names these."""
    if len(parts) != num_media + 1:
        raise ValueError(f"{len(parts) - 1} placeholders for {num_media} {what}")


def ids_of(
    tokenizer: Any, parts: Sequence[str], texts: Sequence[str], add_special_tokens: bool
) -> dict[str, NDArray[Any]]:
    """``input_ids``, int64 [1, tokens], of ``parts`` with one of ``texts`` between each two."""
    text = "".join(part + one for part, one in zip(parts, [*texts, ""], strict=True))
    ids = tokenizer([text], add_special_tokens=add_special_tokens)["input_ids"]
    return {"input_ids": np.asarray(ids, np.int64)}
