"""The routes of the Responses API, and the responses that run in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.entrypoints.http.errors import body_of, error_body, json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.responses.background import FINAL, Responses
from radixlm.entrypoints.http.responses.schemas import ResponsesRequest
from radixlm.entrypoints.http.responses.tool_loop import Turn, run
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import (
    cancel_on_disconnect,
    named_event,
    read_body,
    stream_response,
)

router = APIRouter(tags=["responses"])

_ENDS = frozenset(("response.completed", "response.incomplete"))


@router.post("/v1/responses", openapi_extra=documented(ResponsesRequest))
async def create(request: Request) -> Response:
    """Answer, with a memory of earlier answers."""
    body = await read_body(request, ResponsesRequest)
    state = state_of(request)
    kept = state.extra(Responses)
    turn = await kept.make(state, body)
    if body.background:
        await kept.start(turn)
        if body.stream:
            return await stream_response(request, _watched(turn, kept, 0))
        return json_response(turn.writer.response)
    if body.stream:
        return await stream_response(request, _lines(turn, kept), _stream_error)
    return json_response(await cancel_on_disconnect(request, complete(turn, kept)))


async def complete(turn: Turn, kept: Responses) -> dict[str, Any]:
    """The whole response."""
    async with aclosing(run(turn)) as events:
        async for _ in events:
            pass
    await kept.keep(turn)
    return turn.writer.response


async def _lines(turn: Turn, kept: Responses) -> AsyncGenerator[bytes, None]:
    """Events as they come; the last when the response is stored, so that the client may go on
    from it at once. What a client that left has seen is stored too."""
    has_begun = False
    try:
        async with aclosing(run(turn)) as events:
            async for event in events:
                has_begun = True
                if event["type"] in _ENDS:
                    await kept.keep(turn)
                yield named_event(event["type"], event)
    except RadixError as error:
        if not has_begun:
            raise
        failed = turn.writer.fail(error)
        await kept.keep(turn)
        yield named_event(failed["type"], failed)
    except (asyncio.CancelledError, GeneratorExit):
        if turn.writer.response["status"] not in FINAL:
            turn.writer.cancel()
            kept.keep_later(turn)
        raise


async def _watched(turn: Turn, kept: Responses, first: int) -> AsyncGenerator[bytes, None]:
    """Events of a background response from number ``first`` on; leaving does not end it."""
    place = first
    while True:
        turn.news.clear()
        while place < len(turn.events):
            event = turn.events[place]
            place += 1
            yield named_event(event["type"], event)
        if turn.id not in kept.running:
            return
        await turn.news.wait()


def _stream_error(error: RadixError | None) -> bytes:
    found = (body_of(error) if error else error_body("internal error", 500))["error"]
    shown = {"code": found["code"], "message": found["message"], "param": found["param"]}
    return named_event("error", {"type": "error", "sequence_number": 0} | shown)


@router.post("/v1/responses/input_tokens", openapi_extra=documented(ResponsesRequest))
async def input_tokens(request: Request) -> Response:
    """Tokens of the prompt that a request makes."""
    body = await read_body(request, ResponsesRequest)
    state = state_of(request)
    turn = await state.extra(Responses).make(state, body)
    await turn.toolbox.close()
    count = len(turn.session.request.input_ids or ())
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}")
async def retrieve(
    request: Request, response_id: str, stream: bool = False, starting_after: int = -1
) -> Response:
    """A response; with ``stream``, the events of one that runs or ran in the background."""
    kept = state_of(request).extra(Responses)
    found = await kept.find(response_id)
    if not stream:
        return json_response(found)
    turn = kept.watched(response_id)
    if turn is None:
        raise InvalidRequest("stream: the events of this response are not kept", "stream")
    return await stream_response(request, _watched(turn, kept, max(starting_after + 1, 0)))


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    request: Request, response_id: str, limit: int = 20, order: str = "desc"
) -> Response:
    """What a response was asked."""
    kept = state_of(request).extra(Responses)
    if not 1 <= limit <= 100:
        raise InvalidRequest("limit must be from 1 to 100", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    turn = kept.running.get(response_id)
    items = list(turn.items if turn else (await kept.stored(response_id)).input_items)
    shown = (items if order == "asc" else items[::-1])[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    more = {"object": "list", "has_more": len(items) > limit}
    return json_response(more | {"data": shown} | ends)


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forget a response; one that runs is cancelled."""
    await state_of(request).extra(Responses).delete(response_id)
    shown = {"id": response_id, "object": "response", "deleted": True}
    return json_response(shown)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """End a response that runs in the background."""
    kept = state_of(request).extra(Responses)
    found = await kept.find(response_id)
    if not found["background"]:
        raise InvalidRequest("only a response in the background can be cancelled", "response_id")
    if found["status"] not in FINAL:
        await kept.cancel(response_id)
    return json_response(await kept.find(response_id))
