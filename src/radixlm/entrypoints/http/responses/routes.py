"""The routes of the Responses API."""

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
from radixlm.entrypoints.http.responses.schemas import ResponsesRequest, page_of_items
from radixlm.entrypoints.http.responses.tool_loop import ResponseRun, run_events
from radixlm.entrypoints.http.resume import should_cut
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
    """Answer a conversation, which may continue a stored response."""
    body = await read_body(request, ResponsesRequest)
    state = state_of(request)
    responses = state.extra(Responses)
    run = await responses.make(state, body)
    if body.background:
        await responses.start(run)
        if body.stream:
            return await stream_response(request, _watched(run, responses, 0))
        return json_response(run.writer.response)
    if body.stream:
        return await stream_response(request, _lines(run, responses), _stream_error)
    return json_response(await cancel_on_disconnect(request, complete(run, responses)))


async def complete(run: ResponseRun, responses: Responses) -> dict[str, Any]:
    """The whole response."""
    async with aclosing(run_events(run)) as events:
        async for _ in events:
            pass
    await responses.save(run)
    return run.writer.response


async def _lines(run: ResponseRun, responses: Responses) -> AsyncGenerator[bytes, None]:
    """Events as they come; the last after the response is stored, so that the client can continue
    it at once. If the client leaves, the response is stored as cancelled."""
    has_begun = False
    try:
        async with aclosing(run_events(run)) as events:
            async for event in events:
                has_begun = True
                if event["type"] in _ENDS:
                    await responses.save(run)
                yield named_event(event["type"], event)
    except RadixError as error:
        if not has_begun or should_cut(error):
            raise
        failed = run.writer.fail(error)
        await responses.save(run)
        yield named_event(failed["type"], failed)
    except (asyncio.CancelledError, GeneratorExit):
        if run.writer.response["status"] not in FINAL:
            run.writer.cancel()
            responses.save_later(run)
        raise


async def _watched(
    run: ResponseRun, responses: Responses, first: int
) -> AsyncGenerator[bytes, None]:
    """Events of a background response from number ``first`` on. It runs on if the client leaves."""
    place = first
    while True:
        run.news.clear()
        while place < len(run.events):
            event = run.events[place]
            place += 1
            yield named_event(event["type"], event)
        if run.id not in responses.running:
            return
        await run.news.wait()


def _stream_error(error: RadixError | None) -> bytes:
    body = (body_of(error) if error else error_body("internal error", 500))["error"]
    shown = {"code": body["code"], "message": body["message"], "param": body["param"]}
    return named_event("error", {"type": "error", "sequence_number": 0} | shown)


@router.post("/v1/responses/input_tokens", openapi_extra=documented(ResponsesRequest))
async def input_tokens(request: Request) -> Response:
    """The number of prompt tokens of a request."""
    body = await read_body(request, ResponsesRequest)
    state = state_of(request)
    run = await state.extra(Responses).make(state, body)
    await run.toolbox.close()
    count = len(run.session.request.input_ids or ())
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}")
async def retrieve(
    request: Request, response_id: str, stream: bool = False, starting_after: int = -1
) -> Response:
    """A response; with ``stream``, the events of a background response."""
    responses = state_of(request).extra(Responses)
    response = await responses.find(response_id)
    if not stream:
        return json_response(response)
    run = responses.watched(response_id)
    if run is None:
        raise InvalidRequest("stream: the events of this response are not in memory", "stream")
    return await stream_response(request, _watched(run, responses, max(starting_after + 1, 0)))


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    request: Request,
    response_id: str,
    limit: int = 20,
    order: str = "desc",
    after: str | None = None,
) -> Response:
    """The input items of a response."""
    responses = state_of(request).extra(Responses)
    run = responses.run_of(response_id)
    items = run.items if run else (await responses.stored(response_id)).input_items
    return json_response(page_of_items(items, limit, order, after))


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Delete a response; one that runs is cancelled."""
    await state_of(request).extra(Responses).delete(response_id)
    shown = {"id": response_id, "object": "response", "deleted": True}
    return json_response(shown)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """Cancel a response that runs in the background."""
    responses = state_of(request).extra(Responses)
    response = await responses.find(response_id)
    if not response["background"]:
        raise InvalidRequest("Cannot cancel a synchronous response.", "response_id")
    if response["status"] not in FINAL:
        await responses.cancel(response_id)
    return json_response(await responses.find(response_id))
