"""Last look at a description: every field of every record has a value of its type.

A config.json can hold anything; what a family passed on unread (a dict where a width should be, a
negative count) is found here once, for all families and fields.
"""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import is_number
from radixlm.arch.spec import Decoder, Moe
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record


def check(decoder: Decoder, source: str) -> Decoder:
    """``decoder`` itself; CheckpointError naming ``source``, record and field of a wrong value."""
    seen: set[int] = set()
    _record(decoder, source, seen)
    for block in decoder.blocks:
        _record(block, source, seen)
    return decoder


def _record(record: Record, source: str, seen: set[int]) -> None:
    if id(record) in seen:  # layers share records
        return
    seen.add(id(record))
    if isinstance(record, Moe) and record.top_k > record.experts + record.zero_experts:
        few = f"only {record.experts} experts ('num_experts')"
        raise CheckpointError(f"{source}: a token takes {record.top_k}, there are {few}")
    for name, wanted in type(record).__annotations__.items():
        value = getattr(record, name)
        if isinstance(value, Record):
            _record(value, source, seen)
        elif not _fits(value, wanted):
            where = f"{type(record).__name__}.{name}"
            raise CheckpointError(f"{source}: gives {where} the value {value!r}, not {wanted}")


def _fits(value: Any, wanted: str) -> bool:
    if value is None:
        return "None" in wanted
    if wanted == "bool":
        return isinstance(value, bool)
    if wanted == "int":
        return type(value) is int and 0 <= value < 2**31
    if wanted.startswith("float"):
        return is_number(value)
    if wanted.startswith("tuple[int"):
        return isinstance(value, tuple) and all(_fits(one, "int") for one in value)
    return True
