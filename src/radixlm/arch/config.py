"""A checkpoint's config.json with the defaults of its class; errors name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from radixlm.base.errors import CheckpointError


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number (bools count, as in Python)."""
    return isinstance(value, int | float) and math.isfinite(value)


class Config:
    """Read-only view of a config: ``config.hidden_size`` or ``config.get("hidden_size")``.

    ``source`` is the path for error messages. ``explicit`` are the keys that the checkpoint itself
    has (default: all). A missing key raises CheckpointError.
    """

    __slots__ = ("_explicit", "_values", "source")

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str = "config.json",
        explicit: Collection[str] | None = None,
    ) -> None:
        self._values = dict(values)
        self._explicit = frozenset(values if explicit is None else explicit)
        self.source = source

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        try:
            return self._values[key]
        except KeyError:
            raise self.error(key, "is missing") from None

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __repr__(self) -> str:
        return f"Config({self.source}, {self._values})"

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default`` where it is absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def replace(self, **values: Any) -> Config:
        """A copy with other values for some keys."""
        return Config({**self._values, **values}, self.source, self._explicit)

    def is_explicit(self, key: str) -> bool:
        """Whether ``key`` is in the checkpoint itself and not only in the defaults."""
        return key in self._explicit

    def error(self, key: str, problem: str) -> CheckpointError:
        """A CheckpointError that names the file and the key."""
        return CheckpointError(f"{self.source}: {key!r} {problem}")

    def refuse(self, key: str, *accepted: object) -> None:
        """CheckpointError unless ``key`` is absent or has one of the ``accepted`` values.

        For flags that change the computation in a way that no record describes.
        """
        value = self._values.get(key)
        if value is not None and value not in accepted:
            wanted = " or ".join(repr(one) for one in accepted) or "absent"
            raise self.error(key, f"= {value!r} is not supported (must be {wanted})")

    def divide(self, whole: str, parts: str) -> int:
        """config[whole] / config[parts]; CheckpointError where it leaves a remainder."""
        quotient, remainder = divmod(self.__getattr__(whole), self.__getattr__(parts))
        if remainder:
            raise self.error(
                whole, f"= {self.get(whole)} is not a multiple of {parts!r} = {self.get(parts)}"
            )
        return int(quotient)
