"""TensorSpool: tensors that came in requests, as safetensors files of one folder.

Nothing is unpickled: a pickle is recognised and refused with what to send instead.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import mmap
import os
import re
import shutil
import stat
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from radixlm.base.errors import InvalidRequest, NotSupported
from radixlm.base.private_files import FILE_MODE, make_locked_folder
from radixlm.base.record import Record
from radixlm.wire.tensors import (
    FLAT_TENSOR,
    TensorInfo,
    make_header,
    read_header,
    split_bucket,
    tensor_info,
)

FIELD, HANDLES = "serialized_named_tensors", "tensor_handles"
FORMATS = (None, "direct", "flattened_bucket")
SHARED_PREFIX = "radixlm-weights-"  # of segments that a request may name
SHARED_FOLDER = Path("/dev/shm")
_SHARED_NAME = re.compile(re.escape(SHARED_PREFIX) + r"[A-Za-z0-9_.-]{1,200}")
_CHUNK_BYTES = 1 << 24
_CUDA_KEYS = frozenset({"device_uuid", "handle", "storage_bytes", "storage_offset"})
USE_INSTEAD = (
    "send safetensors: base64.b64encode(safetensors.torch.save(dict(named_tensors))).decode(), or "
    "call radixlm.weights_client.update_weights_from_tensor(url, named_tensors)"
)


class SharedTensor(Record):
    """A tensor in a shared memory segment of a process of the same user. ``offset``: bytes from the
    beginning of the segment; ``digest``: SHA-256 of its bytes in hex, None for no check."""

    info: TensorInfo
    shm: str
    offset: int = 0
    digest: str | None = None


class TensorSpool:
    """A folder of its own, deleted with the object or the process unless it is handed over. Its
    methods raise InvalidRequest for what is no tensor, and OSError if the disk is full; a failed
    call leaves no file. They block: call them in a thread."""

    def __init__(self) -> None:
        self.path, lock = make_locked_folder(SHARED_PREFIX)
        weakref.finalize(self, os.close, lock)
        self.delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._parts: list[Path] = []

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def new_file(self) -> Path:
        """Where the next part is to be written."""
        return self.path / f"part-{len(self._parts):05d}.new"

    def add_base64(self, texts: str | Sequence[str], load_format: str | None = None) -> None:
        """A safetensors file in base64; a list holds the same one for each rank."""
        one, *others = {texts} if isinstance(texts, str) else dict.fromkeys(texts) or [""]
        if others:
            raise InvalidRequest(f"{FIELD}: send the whole tensors, the same for each rank", FIELD)
        try:
            data = base64.b64decode(one, validate=True)
        except ValueError as error:
            raise InvalidRequest(f"{FIELD}: not base64 ({error}); {USE_INSTEAD}", FIELD) from error
        self.add_bytes(data, load_format)

    def add_pieces(self, pieces: Iterable[Any]) -> None:
        """The bytes of a safetensors file, piece by piece."""
        self._write(lambda file: file.writelines(pieces), None)

    def add_bytes(self, data: bytes, load_format: str | None = None) -> None:
        """The bytes of a safetensors file."""
        refuse_pickle(data)
        self._write(lambda file: file.write(data), load_format)

    async def add_stream(
        self, chunks: AsyncIterator[bytes], load_format: str | None = None
    ) -> None:
        """The same in pieces, as they arrive: none is kept in memory. The file is checked in a
        thread."""
        path, head = self.new_file(), b""
        with _or_removed(path), _private(path) as file:
            async for chunk in chunks:
                if len(head) < 9:
                    head += chunk[:9]
                    refuse_pickle(head)
                file.write(chunk)
        await asyncio.to_thread(self.take, path, load_format)

    def add_shared(self, tensors: Sequence[SharedTensor], load_format: str | None = None) -> None:
        """Copies of tensors in shared memory, which may be freed when this returns."""

        def write(file: BinaryIO) -> None:
            file.write(make_header(one.info for one in tensors))
            for one in tensors:
                _copy_shared(one, file)

        self._write(write, load_format)

    def _write(self, write: Callable[[BinaryIO], Any], load_format: str | None) -> None:
        path = self.new_file()
        with _or_removed(path), _faults_of(HANDLES), _private(path) as file:
            write(file)
        self.take(path, load_format)

    def take(self, path: Path, load_format: str | None = None) -> None:
        """Check a file that was written at ``new_file``, and keep it as the next part."""
        with _or_removed(path), _faults_of(FIELD):
            with path.open("rb") as file:
                refuse_pickle(file.read(9))
            tensors, metadata = read_header(path)
            if load_format == "flattened_bucket" and FLAT_TENSOR in tensors:
                _split_file(path, tensors, metadata)
            elif not tensors:
                raise ValueError("no tensors")
        self._parts.append(path.rename(path.with_suffix(".safetensors")))

    def adopt(self, other: TensorSpool) -> None:
        """Take the parts of another one, after those that are here."""
        while other._parts:
            part = other._parts.pop(0)
            self._parts.append(part.rename(self.new_file().with_suffix(part.suffix)))

    def hand_over(self) -> Path:
        """The folder after ``settle``, which the caller owns from then on."""
        self.settle()
        self.delete.detach()
        return self.path

    def settle(self) -> Path:
        """The folder, after which each name is in one part only: a later tensor replaces an
        earlier one of its name."""
        places = {part: read_header(part)[0] for part in self._parts}
        last = {name: part for part, found in places.items() for name in found}
        for part, found in places.items():
            kept = [one for name, one in found.items() if last[name] is part]
            if not kept:
                part.unlink()
            elif len(kept) < len(found):
                _rewrite(part, kept)
        self._parts = [part for part in self._parts if part.exists()]
        return self.path


def check_format(load_format: str | None, loaders: Sequence[str] = ()) -> None:
    """InvalidRequest for a ``load_format`` that is none of FORMATS, nor a custom loader."""
    if load_format not in (*FORMATS, *loaders):
        shown = ", ".join(repr(one) for one in (*FORMATS, *loaders) if one)
        raise InvalidRequest(
            f"load_format: {load_format!r:.80} is none of null, {shown}", "load_format"
        )


def refuse_pickle(head: bytes) -> None:
    """InvalidRequest for bytes that begin no safetensors file. Of fewer than 9 bytes nothing is
    known."""
    if len(head) < 9 or head[8:9] == b"{":
        return
    if head[0] == 0x80 and 2 <= head[1] <= 5:
        what = "a pickle (MultiprocessingSerializer) is not read, since it may run code"
    elif head.startswith(b"PK"):
        what = "a file of torch.save is not read, since it may run code"
    else:
        what = "these bytes begin no safetensors file"
    raise InvalidRequest(f"{FIELD}: {what}; {USE_INSTEAD}", FIELD)


def read_handles(handles: Iterable[Mapping[str, Any]]) -> list[SharedTensor]:
    """Handles of a request: {name, dtype, shape, shm, offset, digest}. InvalidRequest for malformed
    ones, NotSupported for those of CUDA memory, {name, dtype, shape, cuda_ipc: {...}}."""
    found = []
    for handle in handles:
        try:
            info = tensor_info(handle.get("name"), handle.get("dtype"), handle.get("shape"))
        except ValueError as error:
            raise InvalidRequest(f"{HANDLES}: {error}", HANDLES) from error
        if (cuda := handle.get("cuda_ipc")) is not None:
            _refuse_cuda(info.name, cuda)
        shm, offset, digest = handle.get("shm"), handle.get("offset", 0), handle.get("digest")
        if not isinstance(shm, str) or not _SHARED_NAME.fullmatch(shm.removeprefix("/dev/shm/")):
            raise InvalidRequest(
                f"{HANDLES}: {info.name}: shm {shm!r:.80} is no segment that may be read; what "
                f"works: a name such as {SHARED_PREFIX}1a2b, below /dev/shm",
                HANDLES,
            )
        is_digest = digest is None or (isinstance(digest, str) and len(digest) == 64)
        if type(offset) is not int or offset < 0 or not is_digest:
            raise InvalidRequest(
                f"{HANDLES}: {info.name}: offset is a number of bytes, such as 0, and digest the "
                "SHA-256 of the tensor's bytes in hex",
                HANDLES,
            )
        found.append(SharedTensor(info, shm.removeprefix("/dev/shm/"), offset, digest))
    return found


def _refuse_cuda(name: str, handle: Any) -> None:
    if not isinstance(handle, dict) or not _CUDA_KEYS <= handle.keys():
        raise InvalidRequest(
            f"{HANDLES}: {name}: cuda_ipc needs {', '.join(sorted(_CUDA_KEYS))}", HANDLES
        )
    raise NotSupported(
        f"{HANDLES}: {name}: CUDA IPC handles are not opened yet; what works: tensors in shared "
        "memory (shm), safetensors bytes, or update_weights_from_distributed with nccl"
    )


def _copy_shared(one: SharedTensor, out: BinaryIO) -> None:
    """Append the bytes of a tensor to ``out``; InvalidRequest if they are not to be had."""
    where = f"{HANDLES}: {one.info.name}: {one.shm}"
    try:
        # O_NONBLOCK: to open a pipe would wait for its writer
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        number = os.open(SHARED_FOLDER / one.shm, flags)
    except OSError as error:
        raise InvalidRequest(f"{where} cannot be opened: {error.strerror}", HANDLES) from error
    with open(number, "rb", buffering=0):
        facts, end = os.fstat(number), one.offset + one.info.num_bytes
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
            raise InvalidRequest(f"{where} is not of the server's user", HANDLES)
        if end > facts.st_size:
            raise InvalidRequest(f"{where} has {facts.st_size} bytes, not {end}", HANDLES)
        digest, at = hashlib.sha256(), one.offset
        while at < end:
            chunk = os.pread(number, min(_CHUNK_BYTES, end - at), at)
            if not chunk:
                raise InvalidRequest(f"{where} was cut while it was read", HANDLES)
            if one.digest is not None:
                digest.update(chunk)
            out.write(chunk)
            at += len(chunk)
        if one.digest not in (None, digest.hexdigest()):
            raise InvalidRequest(f"{where}: the bytes have another digest than was sent", HANDLES)


def _split_file(path: Path, tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> None:
    """Name the tensors of a flattened bucket, whose list is JSON in the file's metadata."""
    try:
        places = json.loads(metadata["metadata"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(
            f'load_format "flattened_bucket": the file needs {FLAT_TENSOR}, and in its metadata '
            '"metadata": a JSON list of {name, shape, dtype, start_idx, end_idx}'
        ) from None
    _rewrite(path, split_bucket(tensors[FLAT_TENSOR], places))


def _rewrite(path: Path, tensors: Sequence[TensorInfo]) -> None:
    """Replace a file by one with only ``tensors`` of it."""
    fresh = path.with_suffix(".tmp")
    with _private(fresh) as out, path.open("rb") as file:
        out.write(make_header(tensors))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for one in tensors:
                for at in range(one.start, one.start + one.num_bytes, _CHUNK_BYTES):
                    out.write(data[at : min(at + _CHUNK_BYTES, one.start + one.num_bytes)])
    fresh.replace(path)


@contextmanager
def _or_removed(path: Path) -> Iterator[None]:
    """Leave no file where the block fails."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def _faults_of(field: str) -> Iterator[None]:
    """Tell a ValueError as a fault of this field."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", field) from error


def _private(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb")
