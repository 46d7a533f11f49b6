"""/v1/files: uploads of clients and output files of batches, in --file-storage-path."""

import contextlib
import re
import secrets
import time
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest, NotFound, Overloaded
from radixlm.base.private_files import make_private_folder, write_private
from radixlm.base.thread_pool import FairThreadPool
from radixlm.entrypoints.client import run_in
from radixlm.entrypoints.http.errors import disk_fault, json_response
from radixlm.entrypoints.http.state import state_of
from radixlm.intake.identity import identity

router = APIRouter(tags=["batches"])

PURPOSES = ("batch", "batch_output", "assistants", "fine-tune", "vision", "user_data", "evals")
MAX_NAME_CHARS = 255
MAX_LISTED = 10_000
_THREADS, _THREADS_OF_ONE = 8, (4,)  # of all clients, and of one
_ID = re.compile(r"file-[0-9a-f]{24}")


class Files:
    """Files by id: a JSON record and the content. File names of clients never become paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # for files and batches: a slow disk takes no thread of other work
        self.threads = FairThreadPool("file operations", _THREADS, _THREADS_OF_ONE)

    def _path(self, file_id: str, ending: str) -> Path:
        if not _ID.fullmatch(file_id):
            raise NotFound(f"no file {file_id!r:.100}", "file_id")
        return self._folder / f"{file_id}.{ending}"

    def create(
        self, content: bytes, name: str, purpose: str, expires_s: int | None = None
    ) -> dict[str, Any]:
        """Store a file; returns its record."""
        made = int(time.time())
        record = {
            "id": f"file-{secrets.token_hex(12)}",
            "object": "file",
            "bytes": len(content),
            "created_at": made,
            "expires_at": made + expires_s if expires_s else None,
            "filename": name[:MAX_NAME_CHARS],
            "purpose": purpose,
            "status": "processed",
            "owner": identity().owner,
        }
        try:
            make_private_folder(self._folder)
            write_private(self._path(str(record["id"]), "bin"), content)
            write_json(self._path(str(record["id"]), "json"), record)
        except OSError as error:
            self._forget(str(record["id"]))
            message = f"the file cannot be stored (--file-storage-path): {error.strerror}"
            raise Overloaded(message) from error
        return record

    def _forget(self, file_id: str) -> None:
        """Remove what a failed upload has left."""
        for ending in ("bin", "json", "new"):
            with contextlib.suppress(OSError):
                self._path(file_id, ending).unlink(missing_ok=True)

    def record(self, file_id: str) -> dict[str, Any]:
        """The record of a file, if the client may see it; NotFound. OSError if the disk fails."""
        record = read_record(self._path(file_id, "json"))
        if record is None:
            raise NotFound(f"no file {file_id!r:.100}", "file_id")
        if not identity().may_see(record.get("owner", "")):
            raise NotFound(f"no file {file_id!r:.100}", "file_id")
        if record["expires_at"] and record["expires_at"] < time.time():
            self.delete(file_id)
            raise NotFound(f"file {file_id!r} has expired", "file_id")
        return record

    def content(self, file_id: str) -> bytes:
        """The bytes of a file; NotFound, and OSError if the disk fails."""
        self.record(file_id)
        found = read_unless_gone(self._path(file_id, "bin"))
        if found is None:
            raise NotFound(f"no file {file_id!r:.100}", "file_id")
        return found

    def delete(self, file_id: str) -> None:
        """Delete a file."""
        for ending in ("json", "bin"):
            self._path(file_id, ending).unlink(missing_ok=True)

    def all(self) -> list[dict[str, Any]]:
        """The records that the client may see, newest first."""
        records = []
        for path in self._folder.glob("file-*.json"):
            try:
                records.append(self.record(path.stem))
            except NotFound:
                continue
        return sorted(records, key=lambda r: (-r["created_at"], r["id"]))


def read_unless_gone(path: Path) -> bytes | None:
    """The bytes of a file, None if it is not there or may not be read. OSError if the disk
    fails: that the file is gone would be wrong."""
    try:
        return path.read_bytes()
    except OSError as error:
        if disk_fault(error):
            raise
        return None


def read_record(path: Path) -> dict[str, Any] | None:
    """The record in a JSON file, None if there is none. OSError if the disk fails."""
    try:
        record: dict[str, Any] = orjson.loads(read_unless_gone(path) or b"")
    except orjson.JSONDecodeError:
        return None
    return record


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically: a crash leaves the old one."""
    fresh = path.with_suffix(".new")
    try:
        write_private(fresh, orjson.dumps(value))
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def public(record: dict[str, Any]) -> dict[str, Any]:
    """A record as clients see it."""
    return {name: value for name, value in record.items() if name != "owner"}


def page(
    records: list[dict[str, Any]], after: str | None, limit: int, max_limit: int
) -> dict[str, Any]:
    """One page of a list, in OpenAI's form."""
    if not 1 <= limit <= max_limit:
        raise InvalidRequest(f"limit must be from 1 to {max_limit}", "limit")
    if after is not None:
        places = [i for i, record in enumerate(records) if record["id"] == after]
        if not places:
            raise InvalidRequest(f"after: no {after!r:.100} in this list", "after")
        records = records[places[0] + 1 :]
    shown = [public(record) for record in records[:limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(records) > limit,
    }


_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", openapi_extra=_UPLOAD)
async def create(request: Request) -> Response:
    """Store a file."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise InvalidRequest("send the file as multipart/form-data", "file")
    async with request.form(max_files=1, max_fields=8) as form:
        upload, purpose = form.get("file"), form.get("purpose")
        if upload is None or isinstance(upload, str):
            raise InvalidRequest("file: send the content in the form field 'file'", "file")
        if purpose not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", "purpose")
        content = await upload.read()
        name = upload.filename or "file"
        expires_s = _seconds(form.get("expires_after[seconds]"))
    files = state_of(request).extra(Files)
    record = await run_in(files.threads, files.create, content, name, str(purpose), expires_s)
    return json_response(public(record))


def _seconds(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 9:
        raise InvalidRequest("expires_after.seconds must be a number", "expires_after")
    return int(value)


@router.get("/v1/files")
async def list_files(
    request: Request,
    after: str | None = None,
    limit: int = MAX_LISTED,
    order: str = "desc",
    purpose: str | None = None,
) -> Response:
    """The stored files."""
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    files = state_of(request).extra(Files)
    records = await run_in(files.threads, files.all)
    records = [r for r in records if purpose in (None, r["purpose"])]
    records = records if order == "desc" else records[::-1]
    return json_response(page(records, after, limit, MAX_LISTED))


@router.get("/v1/files/{file_id}")
async def retrieve(request: Request, file_id: str) -> Response:
    """The record of a file."""
    return json_response(public(state_of(request).extra(Files).record(file_id)))


@router.get("/v1/files/{file_id}/content")
async def content(request: Request, file_id: str) -> Response:
    """The bytes of a file."""
    files = state_of(request).extra(Files)
    data = await run_in(files.threads, files.content, file_id)
    return Response(data, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete(request: Request, file_id: str) -> Response:
    """Delete a file."""
    files = state_of(request).extra(Files)
    files.record(file_id)
    files.delete(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})
