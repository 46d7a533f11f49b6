"""Folders of node 0 for the ranks of other nodes: tensors and adapters that came in requests to its
server.

They travel through the store in which ranks find each other, whose peers know the cluster's secret:
a key names a folder or a part of a file in it. Only folders that rank 0 offers are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from radixlm.base.errors import RankLost
from radixlm.base.record import Record
from radixlm.distributed.remote import RemoteValues
from radixlm.lora.registry import ADAPTER_CONFIG, ADAPTER_TENSORS, Spool
from radixlm.weight_updates.tensor_spool import TensorSpool

PART_BYTES = 1 << 22
WAIT_S = 60.0  # for one answer


class FileKey(Record):
    """The key of the bytes from ``start`` of a file; without a ``name``, of the JSON list of the
    names and sizes in the folder."""

    folder: str
    name: str = ""
    start: int = 0

    @property
    def text(self) -> str:
        return "files " + msgspec.json.encode((self.folder, self.name, self.start)).decode()


class OfferedFolders:
    """What node 0 hands out: ``folders`` by what they are of, and in them weights and adapters."""

    def __init__(self) -> None:
        self.folders: dict[str, Sequence[str]] = {}

    def offer(self, folders: Sequence[str], of: str) -> None:
        """Hand out the folders of ``of``, and no longer those that are gone."""
        known = {**self.folders, of: folders}
        self.folders = {n: found for n, found in known.items() if all(map(os.path.isdir, found))}

    def read(self, text: str) -> bytes | None:
        """The value of a key; None for what is not offered."""
        if not text.startswith("files "):
            return None
        try:
            folder, name, start = msgspec.json.decode(text[6:], type=tuple[str, str, int])
            if not any(folder in offered for offered in self.folders.values()):
                return None
            files = [*Path(folder).glob("*.safetensors"), *Path(folder).glob(ADAPTER_CONFIG)]
            sizes = {file.name: file.stat().st_size for file in files}
            if not name:
                return msgspec.json.encode(sizes)
            if name not in sizes or start < 0:
                return None
            with open(Path(folder) / name, "rb") as file:
                return os.pread(file.fileno(), PART_BYTES, start)
        except (msgspec.DecodeError, OSError):
            return None


def fetch(values: RemoteValues, folder: str, wait_s: float = WAIT_S) -> TensorSpool:
    """A copy of one of node 0's folders of tensors. RankLost if node 0 does not hand it out."""
    spool = TensorSpool()
    for _, parts in _files(values, folder, wait_s):
        spool.add_pieces(parts)
    return spool


def fetch_adapter(values: RemoteValues, folder: str, wait_s: float = WAIT_S) -> Spool:
    """A copy of one of node 0's adapters. RankLost if node 0 does not hand it out."""
    found = {name: b"".join(parts) for name, parts in _files(values, folder, wait_s)}
    try:
        return Spool(msgspec.json.decode(found[ADAPTER_CONFIG]), found[ADAPTER_TENSORS])
    except KeyError:
        raise RankLost(f"node 0 has no adapter in {folder}") from None


def _files(
    values: RemoteValues, folder: str, wait_s: float
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Name and parts of each file of one of node 0's folders."""

    def take(key: FileKey) -> bytes:
        data = values.take(key.text, wait_s)
        if data is None:
            raise RankLost(f"node 0 has not sent {key.folder}/{key.name} within {wait_s:g} s")
        return data

    def parts(name: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, PART_BYTES):
            yield take(FileKey(folder, name, start))

    sizes = msgspec.json.decode(take(FileKey(folder)), type=dict[str, int])
    for name, size in sorted(sizes.items()):
        yield name, parts(name, size)
