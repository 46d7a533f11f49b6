"""One response on its way: what the model says, the calls that this server runs, and so on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai import conversation
from radixlm.entrypoints.http.openai.conversation import ChatSession, make_chat_session
from radixlm.entrypoints.http.responses.events import Event, Writer
from radixlm.entrypoints.http.responses.schemas import (
    ResponsesRequest,
    chat_of,
    check_request,
    messages_of,
)
from radixlm.entrypoints.http.responses.store import Stored
from radixlm.entrypoints.http.responses.tool_servers import Outcome
from radixlm.entrypoints.http.responses.toolbox import Toolbox, ToolServers
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.request_model import Objects

MAX_ROUNDS = 32
_SAID = frozenset(("function_call", "mcp_call"))


@dataclass(slots=True)
class Turn:
    """``items``: the input as it will be shown. ``messages``: the conversation without the
    instructions, which are not handed on."""

    state: ServerState
    body: ResponsesRequest
    session: ChatSession
    writer: Writer
    toolbox: Toolbox
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    events: list[Event] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.writer.response["id"])

    @property
    def is_stored(self) -> bool:
        return self.body.store is not False

    def said(self) -> list[dict[str, Any]]:
        """The answer so far as messages; an item without content said nothing."""
        output = self.writer.output
        return messages_of([i for i in output if i["type"] in _SAID or i.get("content")])

    def stored(self) -> Stored:
        """What is kept of it."""
        return Stored(self.writer.response, self.items, self.messages + self.said())


async def make_turn(
    state: ServerState, body: ResponsesRequest, servers: ToolServers, before: Stored | None
) -> Turn:
    """Check a request and write its prompt, what came before it included."""
    check_request(body)
    assert body.input is not None
    messages = list(before.messages) if before else []
    messages += messages_of(body.input)
    toolbox = await Toolbox.open(servers, body.tools or ())
    try:
        session = await _dialog(state, body, messages, toolbox.functions)
    except BaseException:
        await toolbox.close()
        raise
    writer = Writer(session, body, body.instructions, toolbox)
    items = body.input
    if isinstance(items, str):
        part = {"type": "input_text", "text": items}
        items = [{"type": "message", "role": "user", "content": [part]}]
    shown = [{"id": f"item_{i}", "type": "message"} | item for i, item in enumerate(items)]
    return Turn(state, body, session, writer, toolbox, shown, messages)


async def _dialog(
    state: ServerState,
    body: ResponsesRequest,
    messages: list[dict[str, Any]],
    served: Objects,
    may_call: bool = True,
) -> ChatSession:
    """The session on ``messages``; with ``truncation: auto`` the oldest go until the rest fits."""
    context = state.intake.facts.context_len
    start = 0
    while True:
        chat = chat_of(body, _told(body, messages[start:]), served, may_call)
        session = await make_chat_session(state, chat)
        length = len(session.request.input_ids or ()) + (body.max_output_tokens or 1)
        if body.truncation != "auto" or length <= context or start + 1 >= len(messages):
            return session
        start += 1
        while start + 1 < len(messages) and messages[start]["role"] == "tool":
            start += 1  # a result without its call says nothing


def _told(body: ResponsesRequest, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not body.instructions:
        return messages
    return [{"role": "system", "content": body.instructions}, *messages]


async def run(turn: Turn) -> AsyncGenerator[Event, None]:
    """All events of a response. An error before the first token is raised before any event."""
    try:
        async with aclosing(_rounds(turn)) as events:
            async for event in events:
                yield event
    finally:
        await turn.toolbox.close()


async def _rounds(turn: Turn) -> AsyncGenerator[Event, None]:
    """The model speaks, its calls are run, it reads the results and speaks again."""
    writer = turn.writer
    has_begun = False
    for _ in range(MAX_ROUNDS):
        reason = "stop"
        async with aclosing(conversation.stream(turn.session)) as deltas:
            async for delta in deltas:
                if not has_begun:
                    has_begun = True
                    for event in writer.begin():
                        yield event
                for event in writer.take(delta):
                    yield event
                reason = delta.finish_reason or reason
        if reason != "tool_calls" or not writer.waiting:
            break
        async with aclosing(_calls(turn)) as called:
            async for event in called:
                yield event
        if writer.num_own_calls:  # the client's move
            break
        more = await _next_dialog(turn)
        if more is None:
            reason = "length"
            break
        turn.session = more
        writer.next_round(more)
    for event in writer.end(reason):
        yield event


async def _calls(turn: Turn) -> AsyncGenerator[Event, None]:
    """Run what waits, one after the other; those over ``max_tool_calls`` are not made."""
    writer, most = turn.writer, turn.body.max_tool_calls
    while writer.waiting:
        item = writer.waiting[0]
        outcome: Outcome | None = None
        if most is None or turn.toolbox.num_calls < most:
            outcome = await turn.toolbox.call(item.value["name"], item.text)
        writer.waiting.pop(0)
        for event in writer.called(item, outcome):
            yield event


async def _next_dialog(turn: Turn) -> ChatSession | None:
    """The session with the results in it; None when no token is left to answer with."""
    body = turn.body.model_copy(update={"tool_choice": None})
    if body.max_output_tokens is not None:
        left = body.max_output_tokens - turn.writer.num_tokens
        if left <= 0:
            return None
        body.max_output_tokens = left
    most = body.max_tool_calls
    may_call = most is None or turn.toolbox.num_calls < most
    messages = turn.messages + turn.said()
    return await _dialog(turn.state, body, messages, turn.toolbox.functions, may_call)


def previous_of(body: ResponsesRequest, found: Stored | None) -> Stored | None:
    """The response that a request goes on from; InvalidRequest if it is not there."""
    if body.previous_response_id is None or found is not None:
        return found
    error = InvalidRequest(
        f"previous_response_id: no response {body.previous_response_id!r:.200}",
        "previous_response_id",
    )
    error.code = "previous_response_not_found"
    raise error
