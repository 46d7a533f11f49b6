"""The base of all request bodies, and how they are read.

Bodies are parsed from their bytes in pydantic's strict JSON mode: no number is read from a string,
NaN, lone surrogates, invalid UTF-8 and nesting beyond the parser's limit are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from radixlm.base.errors import InvalidRequest

M = TypeVar("M", bound="Body")
MAX_SHOWN = 5
# parts of a location that name a branch of a union, not a field
_BRANCH = re.compile(
    r"(str|int|float|bool|none|nullable|dict|list|any)$|"
    r"(list|dict|literal|function-|tagged-union|union|constrained|lax-or-strict)[\[\(\-].*|[A-Z]\w*$"
)


def _whole(value: Any) -> Any:
    """2.0 -> 2: JSON writers of some languages have floats only."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int)]
Priority = Annotated[Int, Field(ge=-(1 << 31), lt=1 << 31)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Ints = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Rid = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x20-\x7e]+$")]


class Body(BaseModel):
    """Strict, finite, and closed: an unknown field is an error that names it."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


def read(model: type[M], data: bytes) -> M:
    """``data`` as a record; InvalidRequest that names the first wrong fields."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _invalid(error) from None


def make(model: type[M], values: dict[str, Any]) -> M:
    """A record of values from another API's request; InvalidRequest as in ``read``."""
    try:
        return model(**values)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidRequest:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    parts: dict[str, str] = {}
    for entry in found:
        where = place(entry["loc"])
        parts.setdefault(where, _sentence(where, entry["type"], entry["msg"]))
        if len(parts) == MAX_SHOWN:
            break
    first = next(iter(parts), "")
    refused = InvalidRequest("; ".join(parts.values()), param=first or None)
    if found and found[0]["type"] == "extra_forbidden":
        refused.code = "unknown_parameter"
    return refused


def place(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content"."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _BRANCH.match(part):
            text += f".{part}" if text else part
    return text


def _sentence(where: str, kind: str, message: str) -> str:
    shown = f"{where:.200}"
    if kind == "extra_forbidden":
        return f"unknown field {shown!r}"
    if kind == "missing":
        return f"{shown} is required"
    if kind == "json_invalid" and "recursion limit" in message:
        return "the body is nested too deeply: some 200 levels are read"
    if kind == "json_invalid":
        return f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
    if not where:
        return f"the body must be a JSON object: {message}"
    return f"{shown}: {message[:1].lower()}{message[1:]}"
