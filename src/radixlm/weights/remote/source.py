"""RemoteSource: the tensors of safetensors files that lie elsewhere. Each is read once, ahead of
the loader, and freed when the loader has packed it; nothing is written to a disk."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.weights.options import NUM_THREADS, WINDOW_BYTES, LoadOptions
from radixlm.weights.origin import Origin
from radixlm.weights.remote.local import LocalReader
from radixlm.weights.remote.place import open_reader, read_place
from radixlm.weights.remote.read_ahead import Digest, ReadAhead, Run, as_bytes
from radixlm.weights.remote.reader import RangeReader, RemoteFile
from radixlm.weights.safetensors_file import Entry, header_bytes, parse_header
from radixlm.weights.source import TensorSource

RUN_BYTES = 8 << 20  # small tensors that lie side by side come together
_HEAD_BYTES = 256 << 10  # read at first, enough for the header of most files


def open_remote(folder: Path, options: LoadOptions) -> "RemoteSource":
    """The weights of the place that ``folder`` stands for."""
    place = read_place(folder)
    threads = options.num_threads or NUM_THREADS
    return RemoteSource(open_reader(place.url), place.files, folder, threads, options.window_bytes)


def open_threaded(folder: Path, files: Sequence[Path], options: LoadOptions) -> "RemoteSource":
    """Safetensors files of this machine, read ahead by threads."""
    reader = LocalReader(folder, files)
    return RemoteSource(reader, reader.files(), folder, options.num_threads, options.window_bytes)


class RemoteSource(TensorSource):
    """All tensors of ``files``; ``folder`` stands for their place in messages.

    ``window_bytes``: buffers that are read ahead. A tensor larger than that is read alone.
    """

    def __init__(
        self,
        reader: RangeReader,
        files: Sequence[RemoteFile],
        folder: Path,
        num_threads: int = NUM_THREADS,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._reader, self._remote = reader, tuple(files)
        self._files = tuple(folder / file.name for file in files)
        self.ahead = ReadAhead(reader, files, num_threads, window_bytes)
        with ThreadPoolExecutor(num_threads, "headers ") as pool:
            self._heads = list(pool.map(self._head, range(len(files))))
        self._entries: dict[str, Entry] = {}
        for number, head in enumerate(self._heads):
            self._add(number, head)
        self._runs: dict[str, Run] = {}  # by tensor

    def _head(self, number: int) -> bytes:
        """The header of a file, with its length before it."""
        file, path = self._remote[number], self._files[number]
        data = self._reader.read(file, 0, min(file.size, 512 if file.tensor else _HEAD_BYTES))
        end = 8 + header_bytes(path, data[:8], file.size)
        return data[:end] + (self._reader.read(file, len(data), end) if end > len(data) else b"")

    def _add(self, number: int, head: bytes) -> None:
        file, remote = self._files[number], self._remote[number]
        entries = parse_header(file, number, head[8:], remote.size)
        if remote.tensor:
            if len(entries) != 1:
                raise CheckpointError(f"{file}: {len(entries)} tensors, expected one")
            entries = {remote.tensor: next(iter(entries.values()))}
        for name, entry in entries.items():
            if name in self._entries:
                other = self._files[self._entries[name].file].name
                raise CheckpointError(f"{file}: {name} is also in another file, {other}")
            self._entries[name] = entry

    def sizes(self) -> Mapping[str, int]:
        return {name: entry.end - entry.start for name, entry in self._entries.items()}

    def place(self, origin: Origin) -> tuple[int, int] | None:
        entry = self._entries.get(origin.name)
        if entry is None or self._files[entry.file] != origin.file:
            return None
        return entry.file, entry.start

    def expect(self, origins: Sequence[Origin]) -> None:
        needed: dict[str, int] = {}
        for number, origin in enumerate(origins):
            if self.place(origin) is not None:
                needed.setdefault(origin.name, number)
        runs, digests = [], {}
        for number, file in enumerate(self._remote):
            own = self._runs_of(number, needed, bool(file.sha256))
            runs += own
            if file.sha256:
                digests[number] = Digest(self._heads[number], [run for _, run in own])
        # in the order of need; what only a digest needs follows its neighbour in the file
        self.ahead.start([run for _, run in sorted(runs, key=lambda pair: pair[0])], digests)

    def _runs_of(
        self, number: int, needed: Mapping[str, int], whole: bool
    ) -> list[tuple[tuple[int, int, int], Run]]:
        """Runs of a file with their rank: when they are needed first, and where they lie."""
        entries = [(e, name) for name, e in self._entries.items() if e.file == number]
        entries = [(e, name) for e, name in entries if e.end > e.start]
        entries.sort(key=lambda pair: pair[0].start)
        runs: list[tuple[tuple[int, int, int], Run]] = []
        at = len(self._heads[number])
        for entry, name in entries:
            if name in needed or whole:
                start = at if whole else entry.start
                run = runs[-1][1] if runs else None
                is_near = (
                    run is not None and run.end == start and entry.end - run.start <= RUN_BYTES
                )
                if run is None or not is_near:
                    run = Run(number, start, entry.end)
                    runs.append(
                        ((needed.get(name, runs[-1][0][0] if runs else 0), number, start), run)
                    )
                run.end = at = entry.end
                if name in needed:
                    run.left.add(name)
                    self._runs[name] = run
        if whole and at < self._remote[number].size:  # bytes after the last tensor
            rank = runs[-1][0][0] if runs else 0
            runs.append(((rank, number, at), Run(number, at, self._remote[number].size)))
        return runs

    def read(self, name: str) -> Tensor:
        entry, run = self._entries[name], self._runs.get(name)
        if not math.prod(entry.shape):
            return torch.empty(entry.shape, dtype=entry.dtype)
        if run is None or name not in run.left:  # not announced, or wanted again for a message
            data = torch.empty(entry.end - entry.start, dtype=torch.uint8)
            self._reader.read_into(self._remote[entry.file], entry.start, as_bytes(data))
        else:
            self.ahead.fetch(run)
            data = run.wait()[entry.start - run.offset : entry.end - run.offset]
            data = data.clone() if entry.start % entry.dtype.itemsize else data
        return data.view(entry.dtype).view(entry.shape)

    def release(self, name: str) -> None:
        run = self._runs.get(name)
        if run is not None and name in run.left:
            run.left.discard(name)
            self.ahead.settle(run)

    def finish(self) -> None:
        self.ahead.finish()
        self._reader.check(self._remote)

    def close(self) -> None:
        self.ahead.close()

    def origins(self, name: str) -> Sequence[Origin]:
        return [Origin(self._files[self._entries[name].file], name, lambda: self.read(name))]

    def files(self) -> Sequence[Path]:
        return self._files
