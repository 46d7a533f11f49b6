"""The base of all request bodies, how they are read, and their fields of ``wire/fields.py``.

Bodies are parsed from their bytes in pydantic's lax JSON mode, as SGLang's: "0.5" is a number where
one is wanted, "true" and 1 are booleans. NaN, lone surrogates, invalid UTF-8 and nesting beyond the
parser's limit are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.finite import check_finite
from radixlm.wire import fields as wire
from radixlm.wire.foreign import sampling_of_foreign
from radixlm.wire.sampling_params import MAX_STOPS, SAMPLING_FIELDS, parameter_names
from radixlm.wire.unknown import note_unknown

M = TypeVar("M", bound="Body")
T = TypeVar("T")
MAX_SHOWN = 5
# parts of a location that name a branch of a union, not a field
_BRANCH = re.compile(
    r"(str|int|float|bool|none|nullable|dict|list|any)$|"
    r"(list|dict|literal|function-\w+|tagged-union|union|constrained|lax-or-strict)[\[\(\-].*|[A-Z]\w*$"
)


Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Ints = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_LONG_INTEGER = re.compile(rb"\d{19}")
Rid = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x20-\x7e]+$")]


# OpenAI's bounds
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
Stops = str | Annotated[Strings, Field(max_length=MAX_STOPS)]
PerPrompt: TypeAlias = T | list[T | None] | None  # one value for all prompts, or a value a prompt


class Body(BaseModel):
    """Finite numbers. ``api``: the API whose fields of the wire tables it has. ``is_kept``: its
    values are stored or sent back as JSON, whose integers have at most 64 bits."""

    # unknown fields are kept by pydantic, so that ``_settle`` can name them
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    api: ClassVar[str] = ""
    is_kept: ClassVar[bool] = False


class ResumeBody(Body):
    """What a gateway knows of a stream whose server is gone, or a client of /generate.
    ``journal``: the records of the stream; ``num_events``: blocks that its client has; ``kills``:
    servers that the request has ended (ignored but from the operator); ``num_emitted``: ids at the
    end of ``input_ids`` that are output."""

    journal: Strings | None = None
    num_events: Annotated[int, Field(ge=0)] = 0
    kills: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    num_emitted: Annotated[int, Field(ge=0)] = 0


def of_prompt(name: str, value: Any, index: int, count: int) -> Any:
    """The value of a field for prompt ``index`` of ``count``: a list has one for each of them,
    anything else is for all. InvalidRequest for a list of another length."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", name)
    return value[index]


@cache
def table_fields(api: str) -> dict[str, wire.Field]:
    """The fields of both wire tables that an API has, by their names there."""
    return wire.fields_of(api, SAMPLING_FIELDS, wire.FIELDS)


def with_fields(api: str, *, per_prompt: bool = False) -> Callable[[type[M]], type[M]]:
    """Class decorator: adds the API's fields of the wire tables that the class does not declare.
    ``per_prompt``: each may also be a list with a value for every prompt."""

    def add(model: type[M]) -> type[M]:
        fields = table_fields(api).items()
        made = {
            name: _definition(field, per_prompt)
            for name, field in fields
            if name not in model.model_fields
        }
        full = create_model(
            model.__name__,
            __base__=model,
            __doc__=model.__doc__,
            __module__=model.__module__,
            **made,
        )
        full.api = api
        return full

    return add


def _definition(field: wire.Field, per_prompt: bool) -> Any:
    """(type, default) for pydantic. The bounds of sampling parameters are only documented here:
    SamplingParams checks its own."""
    kind = str | dict[str, Any] if field.is_json else _KINDS.get(field.kind, field.kind)
    bounds = field.bounds
    extra: dict[str, Any] = {}
    if bounds is not None and "sampling_params" in field.names:
        words = {"minimum": bounds.ge, "exclusiveMinimum": bounds.gt, "maximum": bounds.le}
        extra = {name: value for name, value in words.items() if value is not None}
    elif bounds is not None:
        kind = Annotated[kind, Field(gt=bounds.gt, ge=bounds.ge, le=bounds.le)]
    if kind is not Any:
        kind = cast(Any, PerPrompt)[kind] if per_prompt else kind | None
    return kind, Field(default=None, json_schema_extra=extra)


_KINDS: dict[Any, Any] = {
    tuple[str, ...]: Stops,
    tuple[int, ...]: Ints,
    dict[int, float]: dict[str, float],
}


def reject_unsupported(body: Body) -> None:
    """InvalidRequest for a field that asks for what is not supported."""
    values = {name: getattr(body, name) for name in body.model_fields_set}
    wire.check_unsupported(table_fields(body.api), values)


def read(model: type[M], data: bytes) -> M:
    """``data`` as a record; InvalidRequest that names the first wrong fields."""
    check_finite(data)
    try:
        body = model.model_validate_json(data)
    except ValidationError as error:
        raise _invalid(error) from None
    _settle(body)
    if model.is_kept and _LONG_INTEGER.search(data):
        _check_integers(body.model_dump(), ())
    return body


def _check_integers(value: Any, where: tuple[int | str, ...]) -> None:
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            _check_integers(one, (*where, key))
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        text = "an integer has at most 64 bits; with a point it is read as a float, as 1.0"
        raise InvalidRequest(f"{place(where)}: {text}", place(where))


def make(model: type[M], values: dict[str, Any]) -> M:
    """A record of values from another API's request; InvalidRequest as in ``read``."""
    try:
        body = model.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from None
    _settle(body)
    return body


def _settle(body: Body, where: str = "") -> None:
    """Read the fields of other servers that have a counterpart, and note the unknown ones."""
    extra = body.__pydantic_extra__
    if extra:
        unknown = dict(extra)
        extra.clear()
        body.__pydantic_fields_set__.difference_update(unknown)
        for name, value in unknown.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(f"{where}{name:.80}: NaN and infinities are not JSON", name)
            if not _takes_foreign(body, name, value):
                note_unknown(name, where=where)
    for name in _nested(type(body)):
        value = getattr(body, name)
        for place, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, Body):
                index = f"[{place}]" if isinstance(value, list) else ""
                _settle(one, f"{where}{name}{index}.")


def _takes_foreign(body: Body, name: str, value: Any) -> bool:
    """Set what a field of another server stands for. False if it stands for nothing here."""
    names = parameter_names("sampling_params", body.api)
    if not body.api or not names:
        return False
    meant = sampling_of_foreign(name, value)
    if meant is None or not all(target in names for target in meant):
        return False
    sent = body.model_fields_set
    for target, one in meant.items():
        ours = names[target]
        if ours in sent or (target == "max_new_tokens" and "max_tokens" in sent):
            continue
        try:
            body.__pydantic_validator__.validate_assignment(body, ours, one)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise InvalidRequest(f"{name}: {message[:1].lower()}{message[1:]}", name) from None
    return True


@cache
def _nested(model: type[Body]) -> tuple[str, ...]:
    """The fields that may hold records."""

    def holds(kind: Any) -> bool:
        if isinstance(kind, type) and issubclass(kind, Body):
            return True
        return any(holds(arg) for arg in get_args(kind))

    return tuple(name for name, info in model.model_fields.items() if holds(info.annotation))


def _invalid(error: ValidationError) -> InvalidRequest:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    parts: dict[str, str] = {}
    mistyped: set[str] = set()
    for entry in found:
        where, kind = place(entry["loc"]), entry["type"]
        is_type = kind.endswith("_type")
        if where in parts and (is_type or where not in mistyped):
            continue
        if is_type:
            mistyped.add(where)
        else:  # of a field with several types, the fault of the type that was sent
            mistyped.discard(where)
        parts[where] = _sentence(where, kind, entry["msg"])
        if len(parts) == MAX_SHOWN:
            break
    first = next(iter(parts), "")
    return InvalidRequest("; ".join(parts.values()), param=first or None)


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
    if kind == "missing":
        return f"{shown} is required"
    if kind == "json_invalid" and "recursion limit" in message:
        return "the body is nested too deeply: some 200 levels are read"
    if kind == "json_invalid":
        return f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
    if not where:
        return f"the body must be a JSON object: {message}"
    return f"{shown}: {message[:1].lower()}{message[1:]}"
