"""Name -> "module:attr", imported only when the name is chosen."""

from collections.abc import Iterator, Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load


class Registry:
    """A table of named implementations. ``flag`` is the option whose value selects one."""

    def __init__(self, flag: str, entries: Mapping[str, str]) -> None:
        self.flag = flag
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, name: str, target: str) -> None:
        """Register ``target`` ("module:attr") under ``name``."""
        self._entries[name] = target

    def resolve(self, name: str) -> Any:
        """Import and return the object called ``name``; ConfigError if there is none."""
        if name not in self._entries:
            known = ", ".join(sorted(self._entries))
            raise ConfigError(f"{self.flag} {name!r} is unknown; choose one of: {known}")
        return load(self._entries[name])
