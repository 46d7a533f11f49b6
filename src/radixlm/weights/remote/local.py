"""LocalReader: byte ranges of files of this machine, read by calls instead of mapped."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from radixlm.base.errors import CheckpointError
from radixlm.weights.remote.reader import Body, RangeReader, RemoteFile


class LocalReader(RangeReader):
    """``paths``, all below ``folder``."""

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        super().__init__(str(folder))
        self._paths = {str(path.relative_to(folder)): path for path in paths}
        self._descriptors = {n: os.open(path, os.O_RDONLY) for n, path in self._paths.items()}

    def files(self) -> Sequence[RemoteFile]:
        opened = self._descriptors.items()  # a tag: an open file stays the same one
        return [RemoteFile(name, os.fstat(number).st_size, "open") for name, number in opened]

    @contextmanager
    def _open(self, file: RemoteFile, start: int, end: int) -> Iterator[Body]:
        yield _Part(str(self._paths[file.name]), self._descriptors[file.name], start)

    def close(self) -> None:
        super().close()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class _Part:
    def __init__(self, path: str, descriptor: int, at: int) -> None:
        self._path, self._descriptor, self._at = path, descriptor, at

    def readinto(self, view: memoryview, /) -> int:
        try:
            count = os.preadv(self._descriptor, [view], self._at)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error}") from error
        if not count:
            raise CheckpointError(f"{self._path}: truncated: it ends at byte {self._at}")
        self._at += count
        return count
