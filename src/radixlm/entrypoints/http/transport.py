"""Reading request bodies, writing server-sent events, and noticing clients that leave."""

from __future__ import annotations

import asyncio
import codecs
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from radixlm.base.errors import Aborted, InvalidRequest, RadixError
from radixlm.entrypoints.finite import check_finite
from radixlm.entrypoints.http.errors import body_of, error_body
from radixlm.entrypoints.http.middleware import StreamCut
from radixlm.entrypoints.http.off_loop import check_body, off_loop
from radixlm.entrypoints.http.progress import PROGRESS, comments
from radixlm.entrypoints.http.resume import begin_stream, first_block, should_cut, take_resume
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.request_model import M, read
from radixlm.intake.call import current_call

log = logging.getLogger(__name__)
T = TypeVar("T")

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


async def read_json(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object; InvalidRequest for anything else."""
    data = await body_bytes(request)
    if not data and may_be_empty:
        return {}
    body = await off_loop(len(data), _parsed, data)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _parsed(data: bytes) -> Any:
    check_body(data)
    check_finite(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _read(model: type[M], data: bytes) -> M:
    check_body(data)
    return read(model, data)


async def read_body(request: Request, model: type[M], *, any_type: bool = False) -> M:
    """The body as a model. Without ``any_type`` the Content-Type must be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not any_type and kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest(
            f"Content-Type must be application/json, not {kind[:80]!r}", param="Content-Type"
        )
    data = await body_bytes(request)
    body: M = await off_loop(len(data), _read, model, data)
    await take_resume(getattr(body, "resume", None))
    if request.url.path.startswith("/v1/"):  # other apps have no state
        on_body = state_of(request).on_body
        if on_body is not None:
            on_body(body)
    return body


async def body_bytes(request: Request) -> bytes:
    """The body, without a byte order mark; InvalidRequest if it is compressed or not UTF-8."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise InvalidRequest(
            f"Content-Encoding {coding[:40]!r}: compressed bodies are not supported",
            param="Content-Encoding",
        )
    data = await request.body()
    if (call := current_call()) is not None:
        call.num_bytes = len(data)
    if b"\0" in data[:4]:
        raise InvalidRequest("the body is UTF-16 or UTF-32, and JSON is UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)  # which some editors and shells write


def event(value: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One server-sent event with a name and JSON data."""
    return b"event: " + name.encode() + b"\n" + event(value)


def sse_error(error: RadixError | None) -> bytes:
    """An error in a stream that has begun; None: an internal error, whose message stays here."""
    return event(body_of(error) if error else error_body("internal error", 500)) + DONE


async def stream_response(
    request: Request,
    events: AsyncGenerator[bytes, None],
    on_error: Any = sse_error,
    media_type: str = "text/event-stream",
) -> Response:
    """Stream ``events``. The first is awaited before the status is sent, so that a request that
    fails at once gets the status of its error; ``on_error`` writes a later error into the stream.
    When the client leaves, ``events`` is closed. A client that asks for progress gets the status at
    once, and comments until the first event."""
    journal = await begin_stream(state_of(request))
    waited, first = None, b""
    if PROGRESS in request.headers and journal is None and media_type == "text/event-stream":
        waited = asyncio.ensure_future(anext(events, b""))
    try:
        if waited is None:
            first = await cancel_on_disconnect(request, first_block(journal, events))
    except BaseException:
        await events.aclose()
        raise

    async def body() -> AsyncIterator[bytes]:
        try:
            if waited is not None:
                async for comment in comments(waited, state_of(request)):
                    yield comment
            yield first if waited is None else waited.result()
            async for part in events:
                yield part if journal is None else journal.block(part)
        except RadixError as error:
            if should_cut(error):
                raise StreamCut(str(error)) from error
            yield on_error(error)
        except Exception:
            log.exception("a stream failed")
            yield on_error(None)
        finally:
            if waited is not None and not waited.done():
                waited.cancel()
                await asyncio.wait({waited})
            await events.aclose()

    return StreamingResponse(body(), media_type=media_type, headers=SSE_HEADERS)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    # it may fail while it is cancelled, when nobody reads its error
    task.add_done_callback(lambda one: one.cancelled() or one.exception())
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise Aborted("the client left")
        return task.result()
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error of a task group, a RadixError if there is one."""
    flat: list[BaseException] = []

    def walk(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                walk(inner)
        else:
            flat.append(error)

    walk(group)
    return next((e for e in flat if isinstance(e, RadixError)), flat[0])
