"""Store: bytes by name, outside this server. ``tier.py`` makes a tier of one.

Names are made of hex digits and of the letters and signs in ``NAME``. A store may raise whatever it
likes: the tier counts it and treats it as a miss. Three threads call it at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Protocol, TypeVar

import msgspec

from radixlm.base.errors import ConfigError

NAME: Final = re.compile(r"[0-9a-zA-Z_-]{1,120}")
FLAG: Final = "--hicache-storage-backend-extra-config"
Positive = Annotated[float, msgspec.Meta(gt=0)]


class StoreOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options that every store has. ``deadline_s``: of a transfer, besides a second for each 50 MB;
    ``lookup_deadline_s``: of asking which pages are there. ``put_queue_mb``: pages that wait to be
    written; more are dropped. ``head_group``, ``layer_group``: heads and layers in one object, so
    that servers with other --tp-size or --pp-size share pages; 0: a rank's own part."""

    deadline_s: Positive = 2.0
    lookup_deadline_s: Positive = 0.5
    put_queue_mb: Positive = 256
    head_group: Annotated[int, msgspec.Meta(ge=0)] = 0
    layer_group: Annotated[int, msgspec.Meta(ge=0)] = 0


class Store(Protocol):
    """``Options`` are read from the extra config, ``namespace`` comes before every name. The
    constructor checks options and imports packages; ``open`` connects, and is called again, from
    any thread, until it has not raised."""

    Options: ClassVar[type[StoreOptions]]
    medium: ClassVar[str]

    def open(self) -> None: ...

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """The bytes of each object in its buffer, and how many they are: -1 of one that is absent,
        or that the buffer cannot hold."""

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        """Keep the objects that are absent; never change one that is there."""

    def delete(self, names: Sequence[str]) -> None: ...

    def clear(self) -> None:
        """Delete all objects of the namespace."""

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


_S = TypeVar("_S", bound=StoreOptions)


def read_options(name: str, extra: Mapping[str, Any], kind: type[_S]) -> _S:
    """``extra`` as options of the store ``name``; ConfigError that names a wrong or unknown one."""
    try:
        return msgspec.convert(dict(extra), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(
            f"{FLAG}: {error}; the options of the storage {name!r} are: {known}"
        ) from error
