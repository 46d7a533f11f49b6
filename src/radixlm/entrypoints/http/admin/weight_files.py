"""Routes by which another server takes its weights from this one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import cache, lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from radixlm.base.errors import CheckpointError, InvalidRequest, NotFound, NotSupported
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.hub.choose import choose, index_names
from radixlm.hub.folder import names_in
from radixlm.hub.locate import Wanted
from radixlm.weights.remote.locate import shards_of
from radixlm.weights.remote.place import PLACE_FILE, read_place

router = APIRouter(tags=["admin"])

CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")
_unhashed: SimpleQueue[tuple[Future[str], Path]] = SimpleQueue()


@router.get("/weights_files")
async def weights_files(request: Request) -> Response:
    """The files of the model that is served, as JSON; with ``name`` the bytes of one (``Range``,
    ``If-Match``); with ``digest_of`` the SHA-256 of one, hex."""
    state, query = state_of(request), request.query_params
    files = await asyncio.to_thread(served_files, state)
    if name := query.get("digest_of"):
        path = _required(files, name)
        digest = asyncio.wrap_future(_digest(path, tag_of(path)))
        return PlainTextResponse(await asyncio.shield(digest))  # others may wait for it, too
    if name := query.get("name"):
        return _ranged(_required(files, name), request)
    for path in files.values():
        if path.suffix == ".safetensors":  # ready when they have been read
            _digest(path, tag_of(path))
    return json_response([_described(name, path) for name, path in files.items()])


@router.get("/remote_instance_transfer_engine_info")
@router.get("/get_remote_instance_transfer_engine_info")
async def transfer_engine_info(request: Request) -> Response:
    """How another server takes this one's weights: not by a transfer engine of SGLang's, but by
    byte ranges of ``route``."""
    state = state_of(request)
    body = {
        "rank": 0,
        "remote_instance_transfer_engine_info": None,
        "protocol": "http-ranges",
        "route": "/weights_files",
        "weight_version": state.weight_version,
    }
    return json_response(body)


def served_files(state: ServerState) -> dict[str, Path]:
    """The files that hold the weights being served, config and tokenizer, by their names for a
    reader. NotSupported where the weights are in no files here, NotFound where those are gone."""
    load_format, source = state.config.model.load_format, state.intake.weights.source
    folder = Path(source.folder) if source else state.info.folder
    load_format = source.load_format if source else load_format
    if (folder / PLACE_FILE).is_file():
        url = read_place(folder).url
        raise NotSupported(f"this server's weights lie at {url}: read them from there")
    if load_format in ("dummy", "sharded_state"):
        raise NotSupported(f"--load-format {load_format}: this server has no checkpoint to give")
    names = names_in(folder)
    indexes = index_names(names, load_format)
    try:
        shards = shards_of((folder / indexes[0]).read_bytes()) if indexes else []
        chosen = choose(names, Wanted(load_format=load_format), "", shards)
    except (CheckpointError, OSError) as error:  # --delete-ckpt-after-loading, or a user
        raise NotFound(f"the files of this server's model are gone: {error}") from error
    files = {name: folder / name for name in chosen}
    for number, delta in enumerate(source.deltas if source else ()):
        for path in sorted(Path(delta).glob("*.safetensors")):
            files[f"deltas/{number:06d}/{path.name}"] = path
    if source is None and (new := _newer(files, state.started_s)):
        raise NotSupported(f"{new} was written after this server read it: restart it")
    return files


def _newer(files: dict[str, Path], started_s: float) -> str | None:
    times = {name: path.stat().st_mtime for name, path in files.items()}
    return next((name for name, time_s in times.items() if time_s > started_s), None)


def _required(files: dict[str, Path], name: str) -> Path:
    if name not in files:
        raise NotFound(f"name: {name!r:.200} is no file of the model that is served", "name")
    return files[name]


def tag_of(path: Path) -> str:
    """An ETag: each write of the file changes it."""
    stat = path.stat()
    return f'"{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}"'


def _described(name: str, path: Path) -> dict[str, str | int]:
    sha256 = "asked" if path.suffix == ".safetensors" else ""  # told by digest_of
    return {"name": name, "size": path.stat().st_size, "etag": tag_of(path), "sha256": sha256}


@lru_cache(maxsize=4096)
def _digest(path: Path, tag: str) -> Future[str]:
    """SHA-256 of a file in the version ``tag``, to come."""
    _start_hashing()
    future: Future[str] = Future()
    _unhashed.put((future, path))
    return future


@cache
def _start_hashing() -> None:
    """One thread of its own, so that the server goes on serving; it does not hold up the end."""
    Thread(target=_hash_all, name="hashes of weights", daemon=True).start()


def _hash_all() -> None:
    while True:
        future, path = _unhashed.get()
        try:
            with path.open("rb") as file:
                future.set_result(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            _digest.cache_clear()
            future.set_exception(error)


def _ranged(path: Path, request: Request) -> Response:
    """The bytes of a file that ``Range`` asks for."""
    size, tag = path.stat().st_size, tag_of(path)
    headers = {"ETag": tag, "Accept-Ranges": "bytes"}
    if request.headers.get("if-match", tag) != tag:
        return Response(status_code=412, headers=headers)
    start, end, status = 0, size, 200
    if text := request.headers.get("range"):
        if (found := _RANGE.fullmatch(text)) is None:
            raise InvalidRequest(f"Range: {text!r:.80} is not bytes=FIRST-LAST", "Range")
        start, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
        if start >= end:
            return Response(
                status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"}
            )
        status = 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    headers["Content-Length"] = str(end - start)
    body = _chunks(path, start, end)
    return StreamingResponse(body, status, headers, media_type="application/octet-stream")


async def _chunks(path: Path, start: int, end: int) -> AsyncIterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for at in range(start, end, CHUNK_BYTES):
            count = min(CHUNK_BYTES, end - at)
            yield await asyncio.to_thread(os.pread, descriptor, count, at)
    finally:
        os.close(descriptor)
