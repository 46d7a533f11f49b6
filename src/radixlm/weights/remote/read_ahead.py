"""ReadAhead: brings ranges of remote files in the order in which they will be needed, by several
connections, into buffers that together stay within a window."""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.weights.options import NUM_THREADS, WINDOW_BYTES
from radixlm.weights.remote.reader import RangeReader, RemoteFile

PIECE_BYTES = 8 << 20  # of one request
_ALIGN = 64  # a buffer begins at such an offset of its file, so that tensors stay aligned


def as_bytes(data: Tensor) -> memoryview:
    """The memory of a uint8 tensor."""
    array: Any = data.numpy()
    return memoryview(array)


class Run:
    """Bytes [start, end) of file ``number``, which are fetched and freed together.

    ``left``: names of tensors in it that have not been released. ``is_owed``: the file's digest has
    yet to take these bytes.
    """

    def __init__(self, number: int, start: int, end: int) -> None:
        self.number, self.start, self.end = number, start, end
        self.left: set[str] = set()
        self.is_owed = False
        self.data: Tensor | None = None  # [end - offset] uint8
        self.pieces: list[Future[None]] = []

    @property
    def offset(self) -> int:
        """The byte of the file that ``data`` begins with."""
        return self.start // _ALIGN * _ALIGN

    @property
    def is_here(self) -> bool:
        """Whether all bytes have come."""
        return bool(self.pieces) and all(p.done() and p.exception() is None for p in self.pieces)

    def wait(self) -> Tensor:
        """The bytes when all have come; CheckpointError if they cannot be had."""
        for piece in self.pieces:
            piece.result()
        assert self.data is not None
        return self.data


class Digest:
    """SHA-256 of a file whose runs arrive in any order."""

    def __init__(self, head: bytes, runs: Sequence[Run]) -> None:
        self._hash, self._runs, self._next = hashlib.sha256(head), runs, 0
        self._lock = threading.Lock()
        for run in runs:
            run.is_owed = True

    def advance(self) -> list[Run]:
        """Take the runs that have come next, and return them."""
        taken = []
        with self._lock:
            while self._next < len(self._runs):
                run = self._runs[self._next]
                if not run.is_here:
                    break
                self._hash.update(as_bytes(run.wait()[run.start - run.offset :]))
                taken.append(run)
                self._next += 1
        return taken

    def hex(self) -> str:
        """Of the whole file, once all runs have been taken."""
        assert self._next == len(self._runs)
        return self._hash.hexdigest()


class ReadAhead:
    """Fetches ``runs`` in their order. ``peak_bytes``: the most that buffers have taken."""

    def __init__(
        self,
        reader: RangeReader,
        files: Sequence[RemoteFile],
        num_threads: int = NUM_THREADS,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._reader, self._files, self._window = reader, files, window_bytes
        self._pool = ThreadPoolExecutor(num_threads, "weights ")
        self._lock = threading.RLock()
        self._runs: Sequence[Run] = ()
        self._digests: dict[int, Digest] = {}
        self._next = self._held = self.peak_bytes = 0
        self._is_closed = False

    def start(self, runs: Sequence[Run], digests: dict[int, Digest]) -> None:
        """Begin to fetch ``runs``; ``digests`` by the number of the file."""
        with self._lock:
            self._runs, self._digests, self._next = runs, digests, 0
            self._fill()

    def _fill(self) -> None:
        while self._next < len(self._runs):
            run = self._runs[self._next]
            if self._held and self._held + run.end - run.offset > self._window:
                return
            self._next += 1
            self.fetch(run)

    def fetch(self, run: Run) -> None:
        """Ask for a run at once, window or not, unless that was done."""
        with self._lock:
            if run.pieces or run.data is not None:
                return
            run.data = torch.empty(run.end - run.offset, dtype=torch.uint8)
            self._held += run.data.nbytes
            self.peak_bytes = max(self.peak_bytes, self._held)
            view = as_bytes(run.data)
            for start in range(run.start, run.end, PIECE_BYTES):
                part = view[start - run.offset : min(start + PIECE_BYTES, run.end) - run.offset]
                file = self._files[run.number]
                run.pieces.append(self._pool.submit(self._reader.read_into, file, start, part))
        for piece in run.pieces if run.is_owed else ():
            piece.add_done_callback(lambda _: self.settle(run))  # hashed by the thread that read it

    def settle(self, run: Run) -> None:
        """Free what is neither needed nor owed to a digest any more, and fetch on."""
        digest = self._digests.get(run.number)
        taken = digest.advance() if digest else []
        with self._lock:
            for one in taken:
                one.is_owed = False
            for one in (run, *taken):
                self._free(one)
            if not self._is_closed:
                self._fill()

    def _free(self, run: Run) -> None:
        if run.data is not None and not run.left and not run.is_owed:
            self._held -= run.data.nbytes
            run.data = None

    def finish(self) -> None:
        """Read what the digests lack; CheckpointError for a file whose SHA-256 is another."""
        for number, digest in self._digests.items():
            for run in [run for run in self._runs if run.number == number]:
                if run.is_owed:
                    self.fetch(run)
                    for piece in run.pieces:  # its buffer may be gone: a thread has hashed it
                        piece.result()
                run.left.clear()
                self.settle(run)
            file, found = self._files[number], digest.hex()
            told = self._reader.digest(file)
            if found != told:
                raise CheckpointError(
                    f"{self._reader.describe(file)}: SHA-256 is {found}, the store says "
                    f"{told}: the bytes were damaged"
                )

    def close(self) -> None:
        """Stop fetching; buffers in use stay with their tensors."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
