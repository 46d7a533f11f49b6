"""Folders of node 0 for the ranks of other nodes: tensors that came in requests to its server.

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
from radixlm.intake.tensor_spool import TensorSpool

PART_BYTES = 1 << 22
WAIT_S = 60.0  # for one answer


class FileKey(Record):
    """The key of the bytes from ``start`` of a safetensors file; without a ``name``, of the JSON
    list of the names and sizes in the folder."""

    folder: str
    name: str = ""
    start: int = 0

    @property
    def text(self) -> str:
        return "files " + msgspec.json.encode((self.folder, self.name, self.start)).decode()


class OfferedFolders:
    """What node 0 hands out."""

    def __init__(self) -> None:
        self.folders: Sequence[str] = ()

    def read(self, text: str) -> bytes | None:
        """The value of a key; None for what is not offered."""
        if not text.startswith("files "):
            return None
        try:
            folder, name, start = msgspec.json.decode(text[6:], type=tuple[str, str, int])
            if folder not in self.folders:
                return None
            sizes = {file.name: file.stat().st_size for file in Path(folder).glob("*.safetensors")}
            if not name:
                return msgspec.json.encode(sizes)
            if name not in sizes or start < 0:
                return None
            with open(Path(folder) / name, "rb") as file:
                return os.pread(file.fileno(), PART_BYTES, start)
        except (msgspec.DecodeError, OSError):
            return None


def fetch(values: RemoteValues, folder: str, wait_s: float = WAIT_S) -> TensorSpool:
    """A copy of one of node 0's folders. RankLost if node 0 does not hand it out."""

    def take(key: FileKey) -> bytes:
        data = values.take(key.text, wait_s)
        if data is None:
            raise RankLost(f"node 0 has not sent {key.folder}/{key.name} within {wait_s:g} s")
        return data

    def parts(name: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, PART_BYTES):
            yield take(FileKey(folder, name, start))

    spool = TensorSpool()
    sizes = msgspec.json.decode(take(FileKey(folder)), type=dict[str, int])
    for name, size in sorted(sizes.items()):
        spool.add_pieces(parts(name, size))
    return spool
