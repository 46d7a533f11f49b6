"""Request bodies and event streams: how bytes become objects, and objects server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.entrypoints.http.errors import body_of, error_body

log = logging.getLogger(__name__)

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


async def read_json(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object; InvalidRequest for anything else."""
    data = await request.body()
    if not data and may_be_empty:
        return {}
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def event(value: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"


async def stream_response(events: AsyncIterator[bytes]) -> Response:
    """Stream ``events``. The first is awaited before the status is sent, so that a request that
    fails at once has the status of its error; a later error becomes an event of its own."""
    try:
        first = await anext(events)
    except StopAsyncIteration:
        first = b""

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for part in events:
                yield part
        except RadixError as error:
            yield event(body_of(error))
            yield DONE
        except Exception:
            log.exception("a stream failed")
            yield event(error_body("internal error", 500))
            yield DONE
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    return StreamingResponse(body(), media_type="text/event-stream", headers=SSE_HEADERS)
