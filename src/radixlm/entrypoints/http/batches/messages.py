"""/v1/messages/batches: Anthropic's form of batches. Each is a batch of /v1/batches whose endpoint
is /v1/messages; its id has "msg" before it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest, NotFound
from radixlm.entrypoints.client import run_in
from radixlm.entrypoints.http.batches.files import Files, page
from radixlm.entrypoints.http.batches.lines import MESSAGES
from radixlm.entrypoints.http.batches.runner import (
    MAX_LINES,
    RUNNING,
    Batches,
    Record,
    check_lines,
)
from radixlm.entrypoints.http.errors import ANTHROPIC_PATH, error_body, json_response, shaped
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body

router = APIRouter(tags=["anthropic"])

MAX_LISTED = 1000
_PATH = "/v1/messages/batches"
_MARK = "msg"  # before the id


class BatchedMessage(Body):
    """``params``: the body of /v1/messages."""

    custom_id: Annotated[str, Field(min_length=1, max_length=64)]
    params: dict[str, Any]


class MessageBatchRequest(Body):
    """POST /v1/messages/batches."""

    is_kept = True

    requests: Annotated[list[BatchedMessage], Field(min_length=1, max_length=MAX_LINES)]


def _shown(record: Record, request: Request) -> dict[str, Any]:
    """A batch in Anthropic's form."""
    counts, has_ended = record["request_counts"], record["status"] not in RUNNING
    left = counts["total"] - counts["completed"] - counts["failed"]
    is_canceled = record["status"] == "cancelled"
    ended = next((t for s in _ENDS if (t := record[f"{s}_at"]) is not None), None)
    batch_id = _MARK + record["id"]
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "in_progress",
        "request_counts": {
            "processing": 0 if has_ended else left,
            "succeeded": counts["completed"],
            "errored": counts["failed"] + (left if has_ended and not is_canceled else 0),
            "canceled": left if is_canceled else 0,
            "expired": 0,
        },
        "created_at": _time(record["created_at"]),
        "expires_at": _time(record["expires_at"]),
        "ended_at": _time(ended),
        "cancel_initiated_at": _time(record["cancelled_at"]),
        "archived_at": None,
        "results_url": f"{request.base_url}{_PATH[1:]}/{batch_id}/results" if has_ended else None,
    }


_ENDS = ("completed", "cancelled", "failed")


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _record(request: Request, batch_id: str) -> Record:
    """The record of a batch of messages; NotFound."""
    record = state_of(request).extra(Batches).record(batch_id.removeprefix(_MARK))
    if record["endpoint"] != MESSAGES or not batch_id.startswith(_MARK):
        raise NotFound(f"no batch {batch_id!r:.100}", "batch_id")
    return record


@router.post(_PATH, openapi_extra=documented(MessageBatchRequest))
async def create(request: Request) -> Response:
    """Answer many requests of /v1/messages in the background."""
    body = await read_body(request, MessageBatchRequest)
    state = state_of(request)
    files, batches = state.extra(Files), state.extra(Batches)
    data = b"\n".join(
        orjson.dumps({"custom_id": one.custom_id, "url": MESSAGES, "body": one.params})
        for one in body.requests
    )
    _, errors = await run_in(batches.threads, check_lines, data, MESSAGES)
    if errors:
        place = errors[0]["line"] - 1
        raise InvalidRequest(f"requests[{place}]: {errors[0]['message']}", f"requests[{place}]")
    made = await run_in(files.threads, files.create, data, "requests.jsonl", "batch")
    record = batches.create(state, made["id"], MESSAGES, num_lines=len(body.requests))
    return json_response(_shown(record, request))


@router.get(_PATH)
async def list_batches(
    request: Request, limit: int = 20, after_id: str | None = None, before_id: str | None = None
) -> Response:
    """The batches of messages, newest first."""
    batches = state_of(request).extra(Batches)
    records = [r for r in await run_in(batches.threads, batches.all) if r["endpoint"] == MESSAGES]
    after = None if after_id is None else after_id.removeprefix(_MARK)
    if before_id is not None:  # the same list from its other end
        after, records = before_id.removeprefix(_MARK), records[::-1]
    listed = page(records, after, limit, MAX_LISTED)
    data = [_shown(record, request) for record in listed["data"]]
    data = data[::-1] if before_id is not None else data
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    shown = {"data": data, "has_more": listed["has_more"], "first_id": None, "last_id": None}
    return json_response(shown | ends)


@router.get(f"{_PATH}/{{batch_id}}")
async def retrieve(request: Request, batch_id: str) -> Response:
    """A batch of messages, with its progress."""
    return json_response(_shown(_record(request, batch_id), request))


@router.post(f"{_PATH}/{{batch_id}}/cancel")
async def cancel(request: Request, batch_id: str) -> Response:
    """Cancel a batch of messages; its answers so far are stored."""
    record = _record(request, batch_id)
    record = await state_of(request).extra(Batches).cancel(record["id"])
    return json_response(_shown(record, request))


@router.delete(f"{_PATH}/{{batch_id}}")
async def delete(request: Request, batch_id: str) -> Response:
    """Delete a batch that has ended, with its results."""
    state_of(request).extra(Batches).delete(_record(request, batch_id)["id"])
    return json_response({"id": batch_id, "type": "message_batch_deleted"})


@router.get(f"{_PATH}/{{batch_id}}/results")
async def results(request: Request, batch_id: str) -> Response:
    """A line of JSON for each request of a batch that has ended."""
    record, files = _record(request, batch_id), state_of(request).extra(Files)
    if record["status"] in RUNNING:
        raise InvalidRequest("the batch runs: its results come when it has ended", "batch_id")
    lines = await run_in(files.threads, lambda: b"".join(_results(record, files)))
    return Response(lines, media_type="application/x-jsonl")


def _results(record: Record, files: Files) -> Iterator[bytes]:
    """The lines of the results, in the order of the requests."""
    answers = {}
    for file_id in (record["output_file_id"], record["error_file_id"]):
        for data in files.content(file_id).splitlines() if file_id else ():
            row = orjson.loads(data)
            answers[row["custom_id"]] = row["response"]
    unanswered: dict[str, Any] = {"type": "canceled"}
    if record["status"] != "cancelled":
        error = shaped(error_body("the batch has failed", 500), 500, ANTHROPIC_PATH)
        unanswered = {"type": "errored", "error": error}
    for line in files.content(record["input_file_id"]).splitlines():
        custom_id = orjson.loads(line)["custom_id"]
        answer, result = answers.get(custom_id), unanswered
        if answer is not None and answer["status_code"] < 400:
            result = {"type": "succeeded", "message": answer["body"]}
        elif answer is not None:
            error = shaped(answer["body"], answer["status_code"], ANTHROPIC_PATH)
            result = {"type": "errored", "error": error}
        yield orjson.dumps({"custom_id": custom_id, "result": result}) + b"\n"
