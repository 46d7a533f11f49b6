"""The loop of one response: the model answers, the server runs its tool calls, the model reads the
results and answers again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from radixlm.base.errors import InvalidRequest, PromptTooLong
from radixlm.entrypoints.disaggregation import pair_fields
from radixlm.entrypoints.http.off_loop import off_loop_by_body
from radixlm.entrypoints.http.openai import conversation
from radixlm.entrypoints.http.openai.conversation import ChatSession, make_chat_session
from radixlm.entrypoints.http.responses.client_tools import additional_tools
from radixlm.entrypoints.http.responses.events import Event, Writer
from radixlm.entrypoints.http.responses.schemas import (
    ResponsesRequest,
    chat_of,
    check_request,
    is_unfinished,
    listed_items,
    messages_of,
)
from radixlm.entrypoints.http.responses.store import Stored
from radixlm.entrypoints.http.responses.tool_servers import Outcome
from radixlm.entrypoints.http.responses.toolbox import Toolbox, ToolServers, check_choice
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.request_model import Objects
from radixlm.intake.identity import identity

MAX_ROUNDS = 32
_CALLS = frozenset(("function_call", "custom_tool_call", "mcp_call"))


@dataclass(slots=True)
class ResponseRun:
    """One response. ``items``: the input as /input_items shows it. ``messages``: the conversation
    without the instructions, which a later response does not inherit."""

    state: ServerState
    body: ResponsesRequest
    session: ChatSession
    writer: Writer
    toolbox: Toolbox
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    owner: str = field(default_factory=lambda: identity().owner)
    events: list[Event] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.writer.response["id"])

    @property
    def is_stored(self) -> bool:
        is_half = self.session.request.hint is not None  # of a pair; the decode server keeps it
        mode = self.state.config.disagg.disaggregation_mode
        return self.body.store is not False and not (is_half and mode == "prefill")

    def output_messages(self) -> list[dict[str, Any]]:
        """The answer so far as messages, without empty items."""
        output = self.writer.output
        return messages_of([i for i in output if i["type"] in _CALLS or i.get("content")])

    def stored(self) -> Stored:
        messages = self.messages + self.output_messages()
        return Stored(self.writer.response, self.items, messages, self.owner)


async def make_run(
    state: ServerState, body: ResponsesRequest, servers: ToolServers, before: Stored | None
) -> ResponseRun:
    """Check a request and render its prompt, after the messages of ``before``."""
    check_request(body)
    check_choice(body.tool_choice, servers)
    if isinstance(body.input, list) and (added := additional_tools(body.input)):
        body = body.model_copy(update={"tools": [*(body.tools or ()), *added]})
    assert body.input is not None
    messages = list(before.messages) if before else []
    messages += await off_loop_by_body(messages_of, body.input)
    if is_unfinished(body.input):
        messages[-1]["prefix"] = True  # as in a chat: the answer goes on with it
    toolbox = await Toolbox.open(servers, body.tools or ())
    try:
        session = await _session(state, body, messages, toolbox.functions)
    except BaseException:
        await toolbox.close()
        raise
    writer = Writer(session, body, body.instructions, toolbox)
    return ResponseRun(state, body, session, writer, toolbox, listed_items(body.input), messages)


async def _session(
    state: ServerState,
    body: ResponsesRequest,
    messages: list[dict[str, Any]],
    remote: Objects,
    may_call: bool = True,
) -> ChatSession:
    """The chat session on ``messages``; ``truncation: auto`` drops the oldest until they fit."""

    async def made(start: int) -> ChatSession:
        kept = _with_instructions(body, messages[start:])
        chat = await off_loop_by_body(chat_of, body, kept, remote, may_call)
        return await make_chat_session(state, chat)

    starts = _starts(messages) if body.truncation == "auto" else [0]
    fitting: dict[int, ChatSession] = {}
    context, at, last = state.intake.facts.context_len, 0, len(starts) - 1
    first = 0  # what fits begins in starts[first : last + 1]; all messages are tried first
    while first < last:
        with suppress(PromptTooLong):
            session = await made(starts[at])
            length = len(session.request.input_ids or ()) + (body.max_output_tokens or 1)
            if length <= context:
                fitting[at], last = session, at
        first = first if at in fitting else at + 1
        at = (first + last) // 2
    return fitting.get(first) or await made(starts[first])


def _starts(messages: list[dict[str, Any]]) -> list[int]:
    """Where a conversation may begin: not with a result without its call."""
    last = len(messages) - 1
    return [i for i, one in enumerate(messages) if i in (0, last) or one["role"] != "tool"]


def _with_instructions(
    body: ResponsesRequest, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    if not body.instructions:
        return messages
    return [{"role": "system", "content": body.instructions}, *messages]


async def run_events(run: ResponseRun) -> AsyncGenerator[Event, None]:
    """All events of a response. An error before the first token is raised without any event."""
    try:
        async with aclosing(_rounds(run)) as events:
            async for event in events:
                yield event
    finally:
        await run.toolbox.close()


async def _rounds(run: ResponseRun) -> AsyncGenerator[Event, None]:
    """Generate, run the tool calls, and repeat with their results."""
    writer = run.writer
    has_begun = False
    for _ in range(MAX_ROUNDS):
        reason = "stop"
        async with aclosing(conversation.stream(run.session)) as deltas:
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
        async with aclosing(_calls(run)) as called:
            async for event in called:
                yield event
        if writer.num_client_calls:  # the client runs them
            break
        session = await _next_session(run)
        if session is None:
            reason = "length"
            break
        run.session = session
        writer.next_round(session)
    for event in writer.end(reason):
        yield event


async def _calls(run: ResponseRun) -> AsyncGenerator[Event, None]:
    """Run the waiting calls in order, up to ``max_tool_calls``."""
    writer, limit = run.writer, run.body.max_tool_calls
    while writer.waiting:
        item = writer.waiting[0]
        outcome: Outcome | None = None
        if limit is None or run.toolbox.num_calls < limit:
            outcome = await run.toolbox.call(item.value["name"], item.text)
        writer.waiting.pop(0)
        for event in writer.called(item, outcome):
            yield event


async def _next_session(run: ResponseRun) -> ChatSession | None:
    """The session with the results in it; None when no token is left to answer with."""
    # only the first round is computed by two servers
    body = run.body.model_copy(update={"tool_choice": None, **dict.fromkeys(pair_fields(run.body))})
    if body.max_output_tokens is not None:
        left = body.max_output_tokens - run.writer.num_tokens
        if left <= 0:
            return None
        body.max_output_tokens = left
    limit = body.max_tool_calls
    may_call = limit is None or run.toolbox.num_calls < limit
    messages = run.messages + run.output_messages()
    return await _session(run.state, body, messages, run.toolbox.functions, may_call)


def previous_of(body: ResponsesRequest, stored: Stored | None) -> Stored | None:
    """The response that a request continues; InvalidRequest if it is not stored."""
    if body.previous_response_id is None or stored is not None:
        return stored
    error = InvalidRequest(
        f"Previous response with id '{body.previous_response_id:.200}' not found.",
        "previous_response_id",
    )
    error.code = "previous_response_not_found"
    raise error
