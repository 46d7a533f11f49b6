"""Every option as one record, read from the annotations of the groups."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

from radixlm.config.flag import Flag
from radixlm.config.groups import GROUPS

NONE_TYPE = type(None)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``kind``: bool, int, float or str, of the value or of each item of a tuple."""

    name: str
    group: str
    kind: type[bool] | type[int] | type[float] | type[str]
    is_many: bool
    default: Any
    help: str
    flag: Flag

    @property
    def dashed(self) -> str:
        """The flag of the command line: "--page-size"."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_nullable(self) -> bool:
        """Whether None (unset) is a value."""
        return self.default is None


def option(group: str, name: str, annotated: Any, default: Any) -> Option:
    """Read ``Annotated[type, help, Flag]``; TypeError for a type that no option can have."""
    kind, text, *notes = get_args(annotated)
    members = [member for member in get_args(kind) if member is not NONE_TYPE]
    if NONE_TYPE in get_args(kind):
        (kind,) = members
        members = list(get_args(kind))
    is_many = Ellipsis in members
    kind = members[0] if is_many else kind
    if kind not in (bool, int, float, str):
        raise TypeError(f"{group}.{name}: no option can have the type {kind}")
    return Option(name, group, kind, is_many, default, text, notes[0] if notes else Flag())


@cache
def options() -> Mapping[str, Option]:
    """Name -> option, in the order of the groups; TypeError if two groups share a name."""
    table: dict[str, Option] = {}
    for group, owner in GROUPS.items():
        for field in fields(owner):
            if field.name in table:
                raise TypeError(f"{field.name} stands in {table[field.name].group} and in {group}")
            table[field.name] = option(group, field.name, field.type, field.default)
    return MappingProxyType(table)


@cache
def names() -> Mapping[str, str]:
    """Name or alias, with underscores -> option name."""
    known = {name: name for name in options()}
    for name, one in options().items():
        for alias in one.flag.aliases:
            key = alias.removeprefix("--").replace("-", "_")
            if known.setdefault(key, name) != name:
                raise TypeError(f"{alias} names {known[key]} and {name}")
    return MappingProxyType(known)
