"""The routes of the Responses API, and the responses that run in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest, NotFound, RadixError
from radixlm.entrypoints.http.body import named_event, read_body, stream_response
from radixlm.entrypoints.http.disconnect import until_gone
from radixlm.entrypoints.http.errors import body_of, error_body, json_response
from radixlm.entrypoints.http.openai import dialog as dialogs
from radixlm.entrypoints.http.openai.dialog import Dialog, make_dialog
from radixlm.entrypoints.http.responses.events import Event, Writer
from radixlm.entrypoints.http.responses.records import (
    ResponsesRequest,
    chat_of,
    messages_of,
    refuse_unbuilt,
)
from radixlm.entrypoints.http.responses.store import ResponseStore, Stored
from radixlm.entrypoints.http.schema import documented
from radixlm.entrypoints.http.state import ServerState, state_of

log = logging.getLogger(__name__)
router = APIRouter(tags=["responses"])

_FINAL = frozenset(("completed", "failed", "cancelled", "incomplete"))


@dataclass(slots=True)
class Turn:
    """One response on its way. ``items``: its input as it will be shown."""

    dialog: Dialog
    writer: Writer
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    is_stored: bool
    events: list[Event] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.writer.response["id"])


class Responses:
    """What is stored, and what runs in the background."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.running: dict[str, Turn] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, turn: Turn) -> None:
        """Run a response that nobody waits for."""
        self.running[turn.id] = turn
        self.tasks[turn.id] = asyncio.create_task(self._run(turn))

    async def _run(self, turn: Turn) -> None:
        try:
            async with aclosing(run(turn)) as events:
                async for event in events:
                    turn.events.append(event)
                    turn.news.set()
        except RadixError as error:
            turn.events.append(turn.writer.fail(error))
        except asyncio.CancelledError:
            turn.writer.cancel()
        except Exception:
            log.exception("a response in the background failed")
            turn.events.append(turn.writer.fail(None))
        finally:
            self.keep(turn)
            turn.news.set()
            self.running.pop(turn.id, None)
            self.tasks.pop(turn.id, None)

    def keep(self, turn: Turn) -> None:
        """Store what there is of a response."""
        if turn.is_stored:
            response = turn.writer.response
            said = messages_of(_as_input(response["output"]))
            self.store.put(Stored(response, turn.items, turn.messages + said))

    def find(self, response_id: str) -> dict[str, Any]:
        """A response, finished or not; NotFound."""
        turn = self.running.get(response_id)
        if turn is not None:
            return turn.writer.response
        return self.stored(response_id).response

    def stored(self, response_id: str) -> Stored:
        """A finished response; NotFound."""
        found = self.store.get(response_id)
        if found is None:
            raise NotFound(f"no response {response_id!r:.200}", "response_id")
        return found


def _as_input(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items as a later request would send them; one without content said nothing."""
    return [item for item in output if item["type"] == "function_call" or item.get("content")]


async def make_turn(state: ServerState, body: ResponsesRequest) -> Turn:
    """Check a request and write its prompt, what came before it included."""
    refuse_unbuilt(body)
    assert body.input is not None
    messages: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        found = state.extra(Responses).store.get(body.previous_response_id)
        if found is None:
            error = InvalidRequest(
                f"previous_response_id: no response {body.previous_response_id!r:.200}",
                "previous_response_id",
            )
            error.code = "previous_response_not_found"
            raise error
        messages = list(found.messages)
    messages += messages_of(body.input)
    system = []
    if body.instructions:
        system = [{"role": "system", "content": body.instructions}]
    dialog = await make_dialog(state, chat_of(body, system + messages))
    writer = Writer(dialog, body, body.instructions)
    items = body.input
    if isinstance(items, str):
        part = {"type": "input_text", "text": items}
        items = [{"type": "message", "role": "user", "content": [part]}]
    shown = [{"id": f"item_{i}", "type": "message"} | item for i, item in enumerate(items)]
    return Turn(dialog, writer, shown, messages, body.store is not False)


async def run(turn: Turn) -> AsyncGenerator[Event, None]:
    """All events of a response. An error before the first token is raised before any event."""
    has_begun = False
    async with aclosing(dialogs.stream(turn.dialog)) as deltas:
        async for delta in deltas:
            if not has_begun:
                has_begun = True
                for event in turn.writer.begin():
                    yield event
            for event in turn.writer.take(delta):
                yield event


@router.post("/v1/responses", openapi_extra=documented(ResponsesRequest))
async def create(request: Request) -> Response:
    """Answer, with a memory of earlier answers."""
    body = await read_body(request, ResponsesRequest)
    state = state_of(request)
    kept = state.extra(Responses)
    turn = await make_turn(state, body)
    if body.background:
        kept.start(turn)
        if body.stream:
            return await stream_response(request, _watched(turn, kept, 0))
        return json_response(turn.writer.response)
    if body.stream:
        return await stream_response(request, _lines(turn, kept), _stream_error)
    return json_response(await until_gone(request, complete(turn, kept)))


async def complete(turn: Turn, kept: Responses) -> dict[str, Any]:
    """The whole response."""
    async with aclosing(run(turn)) as events:
        async for _ in events:
            pass
    kept.keep(turn)
    return turn.writer.response


async def _lines(turn: Turn, kept: Responses) -> AsyncGenerator[bytes, None]:
    """Events as they come. What a client that left has seen is stored too."""
    try:
        async with aclosing(run(turn)) as events:
            async for event in events:
                yield named_event(event["type"], event)
        kept.keep(turn)
    except (asyncio.CancelledError, GeneratorExit):
        turn.writer.cancel()
        kept.keep(turn)
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
    turn = await make_turn(state_of(request), body)
    count = len(turn.dialog.request.input_ids or ())
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}")
async def retrieve(
    request: Request, response_id: str, stream: bool = False, starting_after: int = -1
) -> Response:
    """A response; with ``stream``, the events of one that runs in the background."""
    kept = state_of(request).extra(Responses)
    turn = kept.running.get(response_id)
    if stream and turn is not None:
        return await stream_response(request, _watched(turn, kept, max(starting_after + 1, 0)))
    if stream:
        raise InvalidRequest("stream: this response does not run in the background", "stream")
    return json_response(kept.find(response_id))


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
    items = list(turn.items if turn else kept.stored(response_id).input_items)
    shown = (items if order == "asc" else items[::-1])[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    more = {"object": "list", "has_more": len(items) > limit}
    return json_response(more | {"data": shown} | ends)


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forget a response; one that runs is cancelled."""
    kept = state_of(request).extra(Responses)
    kept.find(response_id)
    await _cancel(kept, response_id)
    kept.store.delete(response_id)
    shown = {"id": response_id, "object": "response", "deleted": True}
    return json_response(shown)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """End a response that runs in the background."""
    kept = state_of(request).extra(Responses)
    found = kept.find(response_id)
    if not found["background"]:
        raise InvalidRequest("only a response in the background can be cancelled", "response_id")
    if found["status"] not in _FINAL:
        await _cancel(kept, response_id)
    return json_response(kept.find(response_id))


async def _cancel(kept: Responses, response_id: str) -> None:
    task = kept.tasks.get(response_id)
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
