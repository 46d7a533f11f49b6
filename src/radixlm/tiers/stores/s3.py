"""S3Store: pages in objects of a bucket, several pages each, read by ranges.

    object = length of the table, uint32 LE | table, msgpack [[name, offset, length], ...] | pages

An object is written once. What a server has not written itself it learns by listing the bucket,
every ``refresh_s`` at most, and reading the tables of objects that are new.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final
from uuid import uuid4

import msgspec

from radixlm.base.lazy import require
from radixlm.tiers.stores.base import NAME, Positive, StoreOptions

_LENGTH: Final = struct.Struct("<I")
_HEAD_BYTES: Final = 16 << 10  # read at first, enough for the table of 150 pages
_MAX_TABLE: Final = 4 << 20
_MAX_OBJECT: Final = 64 << 20
_DELETE: Final = 1000  # objects in one request
_Table = list[tuple[str, Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(gt=0)]]]


class S3Options(StoreOptions, frozen=True):
    """``bucket`` (must exist) and ``prefix`` of the objects; ``endpoint_url`` of a server that is
    not Amazon's. Credentials as boto3 finds them. Old objects: by a lifecycle rule of the bucket.
    """

    bucket: Annotated[str, msgspec.Meta(min_length=3)]
    prefix: str = "radixlm"
    endpoint_url: str | None = None
    region: str | None = None
    refresh_s: Positive = 10.0


class S3Store:
    """Deleting a page deletes its object, and so its neighbours: they are computed again."""

    Options: ClassVar[type[StoreOptions]] = S3Options
    medium: ClassVar[str] = "EXTERNAL"

    def __init__(self, options: S3Options, namespace: str) -> None:
        boto3 = require("boto3", "s3", "--hicache-storage-backend s3")
        config = require("botocore.config", "s3", "--hicache-storage-backend s3").Config(
            connect_timeout=options.deadline_s,
            read_timeout=options.deadline_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=4,
        )
        self._client = boto3.session.Session().client(
            "s3", endpoint_url=options.endpoint_url, region_name=options.region, config=config
        )
        self._bucket, self._refresh_s = options.bucket, options.refresh_s
        self._prefix = f"{options.prefix}/{namespace}/"
        self._places: dict[str, tuple[str, int, int]] = {}  # name -> object, offset, length
        self._objects: dict[str, list[str]] = {}  # object -> names
        self._lock, self._listed_s = threading.Lock(), -options.refresh_s

    def open(self) -> None:
        self._client.head_bucket(Bucket=self._bucket)

    def exists(self, names: Sequence[str]) -> list[bool]:
        if any(name not in self._places for name in names):
            self._refresh()
        return [name in self._places for name in names]

    def _refresh(self) -> None:
        """Learn which objects there are, unless that was done just now."""
        with self._lock:
            if time.monotonic() - self._listed_s < self._refresh_s:
                return
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            listed = {item["Key"] for page in pages for item in page.get("Contents", ())}
            for key in self._objects.keys() - listed:
                self._forget(key)
            for key in listed - self._objects.keys():
                self._learn(key, self._table(key))
            self._listed_s = time.monotonic()

    def _table(self, key: str) -> _Table:
        """What an object has; [] if it is none of ours."""
        try:
            head = self._range(key, 0, _HEAD_BYTES)
        except self._client.exceptions.ClientError as error:
            if not _is_absent(error):
                raise
            head = b""  # an empty object, such as consoles make for a folder
        length = _LENGTH.unpack_from(head)[0] if len(head) >= _LENGTH.size else 0
        if not 0 < length <= _MAX_TABLE:
            return []
        end = _LENGTH.size + length
        if end > len(head):
            head += self._range(key, len(head), end - len(head))
        try:
            table = msgspec.msgpack.decode(head[_LENGTH.size : end], type=_Table)
        except msgspec.DecodeError:
            return []
        return [row for row in table if NAME.fullmatch(row[0]) and sum(row[1:]) <= _MAX_OBJECT]

    def _learn(self, key: str, table: _Table) -> None:
        self._objects[key] = [name for name, _, _ in table]
        for name, offset, length in table:
            self._places.setdefault(name, (key, offset, length))

    def _forget(self, key: str) -> None:
        for name in self._objects.pop(key, ()):
            if self._places.get(name, ("",))[0] == key:
                del self._places[name]

    def _range(self, key: str, start: int, length: int) -> bytes:
        reply = self._client.get_object(
            Bucket=self._bucket, Key=key, Range=f"bytes={start}-{start + length - 1}"
        )
        with reply["Body"] as body:
            data: bytes = body.read(length)
        return data

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        lengths = [-1] * len(names)
        wanted: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self.exists(names)
        for number, name in enumerate(names):
            key, offset, length = self._places.get(name, ("", 0, 0))
            if key and length <= len(buffers[number]):
                wanted[key].append((offset, length, number))
        for key, parts in wanted.items():
            for run in _runs(sorted(parts)):
                start = run[0][0]
                data = self._read(key, start, run[-1][0] + run[-1][1] - start)
                for offset, length, number in run:
                    piece = data[offset - start : offset - start + length]
                    buffers[number][: len(piece)] = piece
                    lengths[number] = len(piece) or -1
        return lengths

    def _read(self, key: str, start: int, length: int) -> bytes:
        """Bytes of an object; b"" if it is gone."""
        try:
            return self._range(key, start, length)
        except self._client.exceptions.ClientError as error:
            if not _is_absent(error):
                raise
            with self._lock:
                self._forget(key)
            return b""

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        new = {n: v for n, v in zip(names, values, strict=True) if n not in self._places}
        if not new:
            return
        key = f"{self._prefix}{uuid4().hex}.pages"
        # offsets depend on the table's length, which depends on them: five bytes for each number
        at = _LENGTH.size + 8 + sum(len(name) + 16 for name in new)
        table: _Table = []
        for name, value in new.items():
            table.append((name, at, len(value)))
            at += len(value)
        packed = msgspec.msgpack.encode(table)
        gap = bytes(table[0][1] - _LENGTH.size - len(packed))
        body = b"".join((_LENGTH.pack(len(packed)), packed, gap, *new.values()))
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body)
        with self._lock:
            self._learn(key, table)

    def delete(self, names: Sequence[str]) -> None:
        self._remove({self._places[name][0] for name in names if name in self._places})

    def clear(self) -> None:
        with self._lock:
            self._listed_s = -self._refresh_s
        self._refresh()
        self._remove(set(self._objects))

    def _remove(self, keys: set[str]) -> None:
        ordered = sorted(keys)
        for start in range(0, len(ordered), _DELETE):
            part = [{"Key": key} for key in ordered[start : start + _DELETE]]
            self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": part})
        with self._lock:
            for key in ordered:
                self._forget(key)

    def stats(self) -> dict[str, float]:
        return {"objects": float(len(self._objects)), "pages": float(len(self._places))}

    def close(self) -> None:
        self._client.close()


def _is_absent(error: Any) -> bool:
    code = error.response["Error"]["Code"]
    return code in ("NoSuchKey", "404", "InvalidRange", "416")


def _runs(parts: Sequence[tuple[int, int, int]]) -> list[list[Any]]:
    """Parts (offset, length, number) that lie behind each other, together."""
    runs: list[list[Any]] = []
    for part in parts:
        if runs and sum(runs[-1][-1][:2]) == part[0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
