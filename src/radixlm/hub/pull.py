"""One repository into a local folder: which files, in which order. Each hub is a ``Source``."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from radixlm.base.errors import CheckpointError
from radixlm.hub.choose import choose, index_names
from radixlm.hub.folder import shards_of
from radixlm.hub.locate import Wanted


class Source(Protocol):
    """A repository at a revision: the sizes of its files in bytes, and where they come to lie."""

    folder: Path

    @property
    def files(self) -> Mapping[str, int]: ...

    def fetch(self, names: Collection[str]) -> None:
        """Have these files in the folder."""


def fetch_wanted(source: Source, name: str, wanted: Wanted, selector: str) -> None:
    """Have the files that ``wanted`` needs. CheckpointError for a repository without them."""
    if wanted.include:
        source.fetch(filtered((), source.files, wanted))
        return
    try:
        indexes = index_names(source.files, wanted.load_format) if wanted.kind == "model" else []
        if indexes and wanted.load_format != "dummy" and not selector:
            source.fetch(indexes)
            shards = shards_of(source.folder, indexes)
        else:
            shards = []
        names = choose(source.files, wanted, selector, shards)
    except CheckpointError as error:
        raise CheckpointError(f"{wanted.flag} {name}: {error}") from error
    if lost := [shard for shard in shards if shard not in source.files]:
        raise CheckpointError(f"{wanted.flag} {name}: the repository lacks {', '.join(lost)}")
    source.fetch(filtered(names, source.files, wanted))


def filtered(names: Collection[str], files: Collection[str], wanted: Wanted) -> list[str]:
    """``names`` by --include (of all ``files``, in place of what is needed) and --exclude."""
    kept = [one for one in files if _matches(one, wanted.include)] if wanted.include else names
    return [name for name in kept if not _matches(name, wanted.exclude)]


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
