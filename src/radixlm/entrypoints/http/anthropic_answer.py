"""Answers in Anthropic's form: messages of content blocks, whole or as events."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from radixlm.base.errors import RadixError
from radixlm.continuation.stream_journal import draw_hex
from radixlm.entrypoints.http.errors import anthropic_body
from radixlm.entrypoints.http.openai import conversation
from radixlm.entrypoints.http.openai.conversation import (
    Answer,
    ChatSession,
    Delta,
    make_chat_session,
)
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.transport import named_event
from radixlm.intake.records import Output
from radixlm.text.tools.base import ToolCallDelta

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


@dataclass(slots=True)
class Message:
    """One answer: the session and the fields of its envelope."""

    session: ChatSession
    id: str = field(default_factory=lambda: f"msg_{draw_hex(12)}")

    def envelope(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.session.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _usage(output: Output) -> dict[str, Any]:
    """Anthropic counts cached prompt tokens apart from the others."""
    return {
        "input_tokens": output.prompt_tokens - output.cached_tokens,
        "cache_read_input_tokens": output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output.completion_tokens,
    }


def _stopped(reason: str, output: Output) -> dict[str, Any]:
    matched = output.finish.matched if output.finish else None
    if reason == "stop" and isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP[reason], "stop_sequence": None}


async def make_message(state: ServerState, chat: ChatRequest) -> Message:
    """The answer to be made of ``chat``."""
    session = await make_chat_session(state, chat)
    session.request.clamp_max_tokens = True  # clients send their model's limit
    return Message(session)


async def complete(message: Message) -> dict[str, Any]:
    """The whole answer."""
    (answer,) = await conversation.collect(message.session)
    content = _blocks(message.session, answer)
    whole = message.envelope(content, _usage(answer.output))
    return whole | _stopped(answer.finish_reason, answer.output)


def _blocks(session: ChatSession, answer: Answer) -> list[dict[str, Any]]:
    parsed = answer.parsed
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.text.strip():
        text = parsed.text.rstrip() if parsed.calls else parsed.text
        blocks.append({"type": "text", "text": text})
    for call in parsed.whole_calls():
        call_id = call.call_id or session.call_id(call.name, call.index)
        arguments = json.loads(call.arguments or "{}")
        blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": arguments})
    return blocks


class _Blocks:
    """Turns deltas into the events of content blocks, of which one is open at a time."""

    def __init__(self, session: ChatSession) -> None:
        self._dialog = session
        self._index = -1
        self._open: tuple[str, int] | None = None
        self._space = ""  # white space that is no block, and no end of text before calls
        self._has_text = self._has_calls = False

    def events(self, delta: Delta) -> Iterator[bytes]:
        parsed = delta.parsed
        if parsed.reasoning:
            yield from self._put(
                ("thinking", 0),
                {"type": "thinking", "thinking": "", "signature": ""},
                {"type": "thinking_delta", "thinking": parsed.reasoning},
            )
        # what ends the open call stands before the text that came with it
        goes_on = [call for call in parsed.calls if self._open == ("tool_use", call.index)]
        for call in goes_on:
            yield from self._put_call(call)
        text = self._space + parsed.text
        told = text.rstrip()
        self._space = text[len(told) :]
        if told:
            yield from self._put_text(told)
        for call in parsed.calls[len(goes_on) :]:
            yield from self._put_call(call)
        if delta.finish_reason is not None and self._has_text and not self._has_calls:
            yield from self._put_text(self._space)

    def _put_call(self, call: ToolCallDelta) -> Iterator[bytes]:
        self._has_calls = True
        name = call.name or ""
        start = {
            "type": "tool_use",
            "id": call.call_id or self._dialog.call_id(name, call.index),
            "name": name,
            "input": {},
        }
        change = {"type": "input_json_delta", "partial_json": call.arguments}
        yield from self._put(("tool_use", call.index), start, change)

    def _put_text(self, text: str) -> Iterator[bytes]:
        self._has_text = True
        change = {"type": "text_delta", "text": text}
        yield from self._put(("text", 0), {"type": "text", "text": ""}, change)

    def _put(
        self, key: tuple[str, int], start: dict[str, Any], change: dict[str, Any]
    ) -> Iterator[bytes]:
        if key != self._open:
            yield from self.close()
            self._index += 1
            self._open = key
            yield _event("content_block_start", index=self._index, content_block=start)
        if any(value for name, value in change.items() if name != "type"):
            yield _event("content_block_delta", index=self._index, delta=change)

    def close(self) -> Iterator[bytes]:
        """End the open block. Clients send thinking back only if it got a signature."""
        if self._open == ("thinking", 0):
            change = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=self._index, delta=change)
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
            self._open = None


def _event(kind: str, **values: Any) -> bytes:
    return named_event(kind, {"type": kind} | values)


async def events(message: Message) -> AsyncGenerator[bytes, None]:
    """The answer as a stream of events."""
    blocks = _Blocks(message.session)
    async with aclosing(conversation.stream(message.session)) as deltas:
        async for delta in deltas:
            if delta.is_first:
                usage = _usage(delta.output) | {"output_tokens": 0}
                yield _event("message_start", message=message.envelope([], usage))
                yield _event("ping")
            for part in blocks.events(delta):
                yield part
            if delta.finish_reason is not None:
                for part in blocks.close():
                    yield part
                change = _stopped(delta.finish_reason, delta.output)
                yield _event("message_delta", delta=change, usage=_usage(delta.output))
    yield _event("message_stop")


def stream_error(error: RadixError | None) -> bytes:
    """The event that ends a stream with an error."""
    return named_event("error", anthropic_body(error))
