"""Types of results: ``gen("p", type=Person)`` constrains the text and makes the value of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from radixlm.lang.ir import REGEX_BOOL


def constraint(kind: Any) -> tuple[dict[str, str], Callable[[str], Any]]:
    """Fields of a call (regex or json_schema) that allow nothing but values of a type, and what
    makes the value of a text: a Literal of strings, bool, or anything that pydantic describes.
    ValueError from the second if a text ends before its value does."""
    values = get_args(kind) if get_origin(kind) is Literal else ()
    if values and all(isinstance(value, str) for value in values):
        return {"regex": "|".join(map(re.escape, values))}, str
    if kind is bool:
        return {"regex": REGEX_BOOL}, lambda text: text == "True"
    adapter = TypeAdapter(kind)

    def parse(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError as error:
            name = getattr(kind, "__name__", str(kind))
            raise ValueError(
                f"{text!r} is no whole {name}: more max_tokens may help ({error})"
            ) from error

    return {"json_schema": json.dumps(adapter.json_schema())}, parse
