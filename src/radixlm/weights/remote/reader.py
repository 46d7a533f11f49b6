"""RangeReader: byte ranges of files that lie elsewhere, with retries, resumed where they broke off.

No torch: the starting process reads config.json and the tokenizer by the same readers.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol, Self, TypeVar

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record

T = TypeVar("T")

MAX_FAILURES = 5  # attempts without progress before a read gives up
PROGRESS_BYTES = 64 << 10  # a connection that brings less counts as failed
MAX_WAIT_S = 10.0
TIMEOUT_S = 30.0  # without a byte
END_BYTES, SAMPLE_BYTES, NUM_SAMPLES = 64 << 10, 4 << 10, 32
COPY_BYTES = 1 << 20
SAMPLED = "sample:"  # such a tag is ours


class RemoteFile(Record):
    """A file of a source. ``tag``: the store's mark of this version (ETag); ``sha256``: hex; both
    are "" where the store has none. ``tensor``: the name of the one tensor that the file is."""

    name: str
    size: int
    tag: str = ""
    sha256: str = ""
    tensor: str = ""


class PassingFault(Exception):
    """A fault that may pass. ``after_s``: how long the server asks to wait."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Body(Protocol):
    """Bytes of one answer. PassingFault where the connection breaks."""

    def readinto(self, view: memoryview, /) -> int:
        """At least one byte, or 0 at the end."""


class RangeReader(ABC):
    """The files of one place, read by many threads at once.

    ``url`` names the place in messages, without credentials. ``pause`` waits between attempts.
    """

    download_bytes: ClassVar[int] = 8 << 20  # of one request of a download

    def __init__(self, url: str, pause: Callable[[float], None] = time.sleep) -> None:
        self.url, self._pause = url, pause
        self.is_closed = False

    @abstractmethod
    def files(self) -> Sequence[RemoteFile]:
        """Every file, by name; CheckpointError if there is no such place."""

    @abstractmethod
    def _open(self, file: RemoteFile, start: int, end: int) -> AbstractContextManager[Body]:
        """The bytes [start, end) of a file of the version ``tag``. PassingFault for what may pass,
        CheckpointError for the rest, a changed file among it."""

    def with_digest(self, file: RemoteFile) -> RemoteFile:
        """The file with its SHA-256, where that takes a request of its own."""
        return file

    def digest(self, file: RemoteFile) -> str:
        """SHA-256 of a file that has one, hex; asked after the whole file has been read."""
        return file.sha256

    def check(self, files: Sequence[RemoteFile]) -> None:
        """After a load: CheckpointError for files that changed during it. Stores with tags have
        noticed that already."""
        for file in files:
            if file.tag.startswith(SAMPLED) and SAMPLED + self.sample(file) != file.tag:
                raise CheckpointError(
                    f"{self.describe(file)} changed while it was read; start again"
                )

    def close(self) -> None:
        """Let reads under way end."""
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_into(self, file: RemoteFile, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start``. CheckpointError, with the file and the byte,
        when the last attempt has failed."""
        self._pull(file, start, start + len(view), lambda body, at: body.readinto(view[at:]))

    def copy(
        self, file: RemoteFile, start: int, end: int, write: Callable[[memoryview], object]
    ) -> None:
        """``write`` the bytes [start, end) in pieces; errors as in ``read_into``."""
        buffer = memoryview(bytearray(COPY_BYTES))

        def take(body: Body, done: int) -> int:
            count = body.readinto(buffer[: end - start - done])
            write(buffer[:count])
            return count

        self._pull(file, start, end, take)

    def _pull(
        self, file: RemoteFile, start: int, end: int, take: Callable[[Body, int], int]
    ) -> None:
        """Have ``take`` read the bytes [start, end) of answers, behind those that it has read."""
        done = failures = 0
        while start + done < end:
            if self.is_closed:
                raise CheckpointError(f"{self.describe(file)}: the load was ended")
            before = done
            try:
                with self._open(file, start + done, end) as body:
                    while start + done < end and not self.is_closed:
                        count = take(body, done)
                        if not count:
                            left = end - start - done
                            raise PassingFault(f"the connection ended {left} bytes early")
                        done += count
            except PassingFault as fault:
                failures = 1 if done - before >= PROGRESS_BYTES else failures + 1
                self._wait(f"{self.describe(file)}: byte {start + done}", failures, fault)

    def attempt(self, what: str, call: Callable[[], T]) -> T:
        """The result of ``call``, tried again while it meets faults that may pass."""
        failures = 0
        while True:
            try:
                return call()
            except PassingFault as fault:
                failures += 1
                self._wait(what, failures, fault)

    def _wait(self, what: str, failures: int, fault: PassingFault) -> None:
        if failures >= MAX_FAILURES or self.is_closed:
            message = f"{what}: given up after {failures} attempts: {fault}"
            raise CheckpointError(message) from fault
        self._pause(min(fault.after_s or 0.2 * 2**failures, MAX_WAIT_S))

    def read(self, file: RemoteFile, start: int = 0, end: int | None = None) -> bytes:
        """The bytes [start, end) of a file; to its end when None."""
        data = bytearray((file.size if end is None else end) - start)
        self.read_into(file, start, memoryview(data))
        return bytes(data)

    def describe(self, file: RemoteFile) -> str:
        """The file's address, for messages."""
        return f"{self.url.rstrip('/')}/{file.name}"

    def sample(self, file: RemoteFile) -> str:
        """A digest of the size and of some bytes of a file, hex, for stores without tags: the first
        and last 64 KB, and 4 KB at even distances between."""
        last = max(0, file.size - END_BYTES)
        starts = dict.fromkeys(
            (0, *range(END_BYTES, last, max(last // NUM_SAMPLES, 1 << 20)), last)
        )
        hasher = hashlib.sha256(f"{file.size} ".encode())
        for start in starts:
            length = END_BYTES if start in (0, last) else SAMPLE_BYTES
            hasher.update(self.read(file, start, min(start + length, file.size)))
        return hasher.hexdigest()
