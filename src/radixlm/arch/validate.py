"""Last check of a description: every field of every record has a value of its type.

A config.json can hold anything. What a family passes on unread (an object where a width belongs, a
negative count) is found here, for all families and fields.
"""

from collections.abc import Callable
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from radixlm.arch.config import is_number
from radixlm.arch.spec import Decoder, Moe
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record

Check = Callable[[Any], bool]


def check(decoder: Decoder, source: str) -> Decoder:
    """``decoder`` itself; CheckpointError naming ``source``, record and field of a wrong value."""
    _check_record(decoder, source, set())
    return decoder


def _check_record(record: Record, source: str, seen: set[int]) -> None:
    if id(record) in seen:  # layers share records
        return
    seen.add(id(record))
    if isinstance(record, Moe) and record.top_k > record.experts + record.zero_experts:
        few = f"only {record.experts} experts ('num_experts')"
        raise CheckpointError(f"{source}: a token takes {record.top_k}, there are {few}")
    kind = type(record)
    for name, fits in _checks(kind):
        value = getattr(record, name)
        if not fits(value):
            wanted = kind.__annotations__[name]
            raise CheckpointError(
                f"{source}: gives {kind.__name__}.{name} the value {value!r}, not {wanted}"
            )
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Record):
                _check_record(one, source, seen)


@lru_cache(maxsize=128)
def _checks(kind: type[Record]) -> tuple[tuple[str, Check], ...]:
    """(field, whether a value is of its type) for every field of a kind of record."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((name, _check_of(hints[name])) for name in kind.__struct_fields__)


def _check_of(wanted: Any) -> Check:
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        checks = [_check_of(part) for part in parts]
        return lambda value: any(fits(value) for fits in checks)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in parts
    if origin is tuple and parts[-1] is Ellipsis:
        fits_one = _check_of(parts[0])
        return lambda value: isinstance(value, tuple) and all(map(fits_one, value))
    if origin is tuple:
        each = [_check_of(part) for part in parts]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(each)
            and all(fits(one) for fits, one in zip(each, value, strict=True))
        )
    if origin is Annotated:  # a number without the usual bounds
        return lambda value: isinstance(value, int | parts[0]) and not isinstance(value, bool)
    return _CHECKS.get(wanted) or (lambda value: isinstance(value, origin or wanted))


_CHECKS: dict[Any, Check] = {
    NoneType: lambda value: value is None,
    bool: lambda value: isinstance(value, bool),
    int: lambda value: type(value) is int and 0 <= value < 2**31,
    float: is_number,
}
