"""NaN and infinities in bodies: Python writes them, pydantic reads them, JSON has none."""

import math
from typing import Any

from pydantic_core import from_json

from radixlm.base.errors import InvalidRequest


def check_finite(data: bytes) -> None:
    """InvalidRequest that names the first NaN or infinity of a JSON text, as "metadata.a[0]". Of a
    text that is wrong otherwise its reader tells."""
    if b"NaN" not in data and b"Infinity" not in data:
        return
    try:
        from_json(data, allow_inf_nan=False)  # these words in strings are common
    except ValueError:
        value = _lenient(data)
        place = _find(value, "") if isinstance(value, float | dict | list) else None
        if place is not None:
            text = f"{place or 'the body':.200}: NaN and infinities are not JSON"
            raise InvalidRequest(text, place[:200] or None) from None


def _lenient(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return None


def _find(value: float | dict[str, Any] | list[Any], where: str) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else where
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(one, float | dict | list):
            name = f"[{key}]" if isinstance(key, int) else f".{key}" if where else key
            place = _find(one, where + name)
            if place is not None:
                return place
    return None
