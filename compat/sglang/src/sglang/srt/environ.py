"""``envs``: environment variables as attributes, which programs read, set and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class EnvField:
    """One variable. Its values are texts, as the process that is started next reads them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_set(self) -> bool:
        return self.name in os.environ

    def get(self) -> str | None:
        return os.environ.get(self.name)

    def set(self, value: object) -> None:
        os.environ[self.name] = str(value)

    def clear(self) -> None:
        os.environ.pop(self.name, None)

    @contextmanager
    def override(self, value: object) -> Iterator[None]:
        """Set it within a ``with``."""
        before = self.get()
        self.set(value)
        try:
            yield
        finally:
            self.clear()
            if before is not None:
                self.set(before)


class Envs:
    """Every name in capitals is a variable."""

    def __getattr__(self, name: str) -> EnvField:
        if not name.isupper():
            raise AttributeError(name)
        return EnvField(name)


envs = Envs()
