"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.continuation.stream_journal import draw_hex, draw_time
from radixlm.entrypoints.http.errors import json_answer, json_response
from radixlm.entrypoints.http.middleware import request_id
from radixlm.entrypoints.http.off_loop import off_loop_of
from radixlm.entrypoints.http.openai import conversation
from radixlm.entrypoints.http.openai.conversation import (
    Answer,
    ChatSession,
    Delta,
    make_chat_session,
)
from radixlm.entrypoints.http.openai.custom_tools import CustomCalls, input_of
from radixlm.entrypoints.http.openai.functions import in_older_form, reason_of
from radixlm.entrypoints.http.openai.logprobs import chat_logprobs, prompt_rows
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.openai.usage import extension, usage, wanted_usage
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import (
    DONE,
    cancel_on_disconnect,
    event,
    read_body,
    stream_response,
)
from radixlm.entrypoints.native.response import finish_reason as native_reason
from radixlm.entrypoints.native.response import last_hidden, sampling_mask, spec_fields
from radixlm.entrypoints.sequences import num_logprobs, take_rows
from radixlm.intake.records import Output
from radixlm.text.tools.base import ToolCallDelta

router = APIRouter(tags=["openai"])

_NO_DELTA = dict.fromkeys(("role", "content", "reasoning_content", "tool_calls"))


@dataclass(slots=True)
class Chat:
    """One chat completion: the session and the fields of its envelope."""

    session: ChatSession
    id: str = ""
    created: int = field(default_factory=draw_time)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self.fingerprint = self.session.state.fingerprint
        rid = self.session.request.rid
        self.id = rid or f"chatcmpl-{request_id() or draw_hex(16)}"

    def envelope(self, kind: str) -> dict[str, Any]:
        shown = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.session.model,
            "system_fingerprint": self.fingerprint,
        }
        # there is one tier; a client that asks for one gets its name
        return shown | ({"service_tier": "default"} if self.session.body.service_tier else {})

    @property
    def shows_cached(self) -> bool:
        body, serve = self.session.body, self.session.state.config.serve
        return serve.enable_cache_report or bool(body.return_cached_tokens_details)


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    chat = Chat(await make_chat_session(state_of(request), body))
    if body.stream:
        return await stream_response(request, _events(chat))
    return await json_answer(await cancel_on_disconnect(request, complete(chat)))


@router.post("/chat/completions/input_tokens", openapi_extra=documented(ChatRequest))
@router.post("/v1/chat/completions/input_tokens", openapi_extra=documented(ChatRequest))
async def input_tokens(request: Request) -> Response:
    """The number of prompt tokens of a conversation (llama.cpp's route)."""
    body = await read_body(request, ChatRequest)
    count = len(prompt_ids(await make_chat_session(state_of(request), body)) or ())
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def answer_chat(state: ServerState, body: ChatRequest) -> dict[str, Any]:
    """The whole answer, for callers without a connection (batches)."""
    return await complete(Chat(await make_chat_session(state, body)))


async def chat_events(state: ServerState, body: ChatRequest) -> AsyncGenerator[bytes, None]:
    """The events of its stream, for the same callers."""
    async with aclosing(_events(Chat(await make_chat_session(state, body)))) as events:
        async for event in events:
            yield event


async def complete(chat: Chat) -> dict[str, Any]:
    """The whole answer."""
    session = chat.session
    answers = await conversation.collect(session)
    reasoning = None
    if session.reasoning is not None:
        reasoning = sum(session.count(answer.parsed.reasoning) for answer in answers)
    counted = usage(
        [a.output for a in answers], shows_cached=chat.shows_cached, reasoning_tokens=reasoning
    )
    return chat.envelope("chat.completion") | {
        "choices": [
            await off_loop_of(num_logprobs(answer.output), _choice, session, answer)
            for answer in answers
        ],
        "usage": counted,
        "metadata": {"weight_version": session.state.weight_version},
        **({"prompt_token_ids": prompt_ids(session)} if session.body.return_token_ids else {}),
        **_of_prompt(session, answers[0].output),
        **_extension(session, [a.output for a in answers], [a.output.token_ids for a in answers]),
    }


def _extension(
    session: ChatSession, outputs: list[Output], token_ids: list[list[int]]
) -> dict[str, Any]:
    """``sglext`` of all samples, with the token ids of the prompt and of each sample where they are
    asked for."""
    body, serve = session.body, session.state.config.serve
    found = extension(body, outputs)
    ids: dict[str, Any] = {}
    if body.return_input_ids_in_sglext or serve.return_input_ids:
        ids["input_ids"] = prompt_ids(session)
    if _wants_output_ids(session):
        ids["output_ids"] = token_ids
    return {"sglext": found.get("sglext", {}) | ids} if ids else found


def _wants_output_ids(session: ChatSession) -> bool:
    asked = session.body.return_output_ids_in_sglext
    return bool(asked or session.state.config.serve.return_output_ids)


def _of_prompt(session: ChatSession, output: Output) -> dict[str, Any]:
    """vLLM's ``prompt_logprobs``."""
    top = session.body.prompt_logprobs
    if top is None:
        return {}
    tokenizer = session.state.require_tokenizer()
    return {"prompt_logprobs": prompt_rows(tokenizer, output.prompt_logprobs, top)}


def _choice(session: ChatSession, answer: Answer) -> dict[str, Any]:
    output, parsed = answer.output, answer.parsed
    calls = [
        {
            "id": call.call_id or session.call_id(call.name, call.index),
            "index": call.index,
            **_call(session, call.name, call.arguments),
        }
        for call in parsed.whole_calls()
    ]
    content = parsed.text
    if calls:
        content = content.strip()
    content = conversation.beginning(session.body) + content
    message = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
        **_reasoning(session, parsed.reasoning if session.shows_reasoning else ""),
        "tool_calls": calls or None,
    }
    choice = {
        "index": answer.index,
        "message": in_older_form(session.body, message),
        "logprobs": _logprobs(session, output),
        "finish_reason": reason_of(session.body, answer.finish_reason),
        "matched_stop": output.finish.matched if output.finish else None,
    }
    if answer.schema_error:
        choice["schema_error"] = answer.schema_error
    return choice | _extras(session, output)


def _reasoning(session: ChatSession, text: str) -> dict[str, Any]:
    """``reasoning_content``, and vLLM's ``reasoning`` for who sends vLLM's ``include_reasoning``:
    some clients read both names, and would show the text twice."""
    body, fields = session.body, ["reasoning_content"]
    if body.include_reasoning and "include_reasoning" in body.model_fields_set:
        fields.append("reasoning")
    return dict.fromkeys(fields, text or None)


def _call(session: ChatSession, name: str, arguments: str) -> dict[str, Any]:
    if name in session.tools.custom:
        return {"type": "custom", "custom": {"name": name, "input": input_of(arguments)}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(session: ChatSession, output: Output) -> dict[str, Any] | None:
    body = session.body
    if not body.logprobs:
        return None
    tokenizer = session.state.require_tokenizer()
    top, as_ids = body.top_logprobs or 0, bool(body.return_tokens_as_token_ids)
    content = chat_logprobs(tokenizer, output.logprobs, top, as_ids)
    return {"content": content, "refusal": None}


def _extras(session: ChatSession, output: Output) -> dict[str, Any]:
    """Fields that only some requests ask for."""
    body = session.body
    extras: dict[str, Any] = {}
    if output.hidden_states is not None:
        extras["hidden_states"] = last_hidden(output, session.state.intake.facts.embed_dim)
    if body.return_token_ids:
        extras["token_ids"] = extras["response_token_ids"] = output.token_ids
    if body.return_prompt_token_ids or body.return_token_ids:
        extras["prompt_token_ids"] = prompt_ids(session)
    if body.return_meta_info:
        extras["meta_info"] = {
            "id": output.rid,
            "finish_reason": native_reason(output.finish, output.completion_tokens),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            "weight_version": session.state.weight_version,
            **spec_fields(output),
            **(sampling_mask(output) if body.return_sampling_mask else {}),
        }
    return extras


def prompt_ids(session: ChatSession) -> list[int] | None:
    """The ids of the prompt, with the checkpoint's placeholder token for media."""
    prompt = session.request.prompt
    return session.request.input_ids if prompt is None else prompt.plain.tolist()


# ---- streams -------------------------------------------------------------------------------


class _Counter:
    """The usage of a stream so far."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._last: dict[int, Output] = {}
        self._reasoning: dict[int, str] = {}
        self._token_ids: dict[int, list[int]] = {}  # kept where they are asked for
        self._keeps_ids = _wants_output_ids(chat.session)

    def add(self, delta: Delta) -> None:
        before = self._last.get(delta.index)
        if before is not None:
            take_rows(delta.output, before)
        self._last[delta.index] = delta.output
        if self._keeps_ids:
            self._token_ids.setdefault(delta.index, []).extend(delta.output.token_ids)
        reasoning = self._reasoning.get(delta.index, "")
        self._reasoning[delta.index] = reasoning + delta.parsed.reasoning

    def extension(self) -> dict[str, Any]:
        """``sglext`` of the stream, at its end."""
        indices = sorted(self._last)
        outputs = [self._last[index] for index in indices]
        token_ids = [self._token_ids.get(index, []) for index in indices]
        return _extension(self._chat.session, outputs, token_ids)

    def usage(self, index: int | None = None) -> dict[str, Any]:
        """Of all samples, or of one."""
        session = self._chat.session
        chosen = sorted(self._last) if index is None else [index]
        reasoning = None
        if session.reasoning is not None:
            reasoning = sum(session.count(self._reasoning[i]) for i in chosen)
        return usage(
            [self._last[i] for i in chosen],
            shows_cached=self._chat.shows_cached,
            reasoning_tokens=reasoning,
        )


async def _events(chat: Chat) -> AsyncGenerator[bytes, None]:
    """The role, deltas and one finish reason a choice; then the usage if asked for; then [DONE]."""
    wants_usage, continuous = wanted_usage(
        chat.session.body.stream_options, chat.session.state.config.serve
    )
    counter = _Counter(chat)
    started: dict[int, _Calls] = {}
    is_first = True
    async with aclosing(conversation.stream(chat.session)) as deltas:
        async for delta in deltas:
            counter.add(delta)
            if delta.index not in started:
                started[delta.index] = _Calls(chat.session)
            for choice in _chunks(chat.session, delta, started[delta.index]):
                chunk = chat.envelope("chat.completion.chunk") | {"choices": [choice]}
                if chat.session.body.return_token_ids and is_first:
                    chunk["prompt_token_ids"] = prompt_ids(chat.session)
                is_first = False
                if wants_usage or continuous:
                    chunk["usage"] = counter.usage(delta.index) if continuous else None
                yield event(chunk)
    if details := counter.extension():
        yield event(chat.envelope("chat.completion.chunk") | {"choices": []} | details)
    if wants_usage:
        last = chat.envelope("chat.completion.chunk")
        yield event(last | {"choices": [], "usage": counter.usage()})
    yield DONE


def _chunks(session: ChatSession, delta: Delta, calls: _Calls) -> Iterator[dict[str, Any]]:
    """The choices of the chunks for a delta. ``calls``: those of its choice so far."""
    if delta.is_first:
        yield _chunk(session, delta, {"role": "assistant", "content": ""})
        if echoed := conversation.beginning(session.body):
            yield _chunk(session, delta, {"content": echoed})
    parts = list(_parts(session, delta, calls))
    logprobs, stop_logprobs = _split_logprobs(session, delta.output)
    has_more = bool(logprobs and logprobs["content"]) or session.body.return_token_ids
    if not parts and has_more and delta.output.token_ids:
        parts = [{"content": ""}]
    for place, part in enumerate(parts):
        choice = _chunk(session, delta, part)
        if place == 0:
            choice["logprobs"] = logprobs
            if session.body.return_token_ids:
                choice["token_ids"] = delta.output.token_ids
        yield choice
    if delta.finish_reason is None:
        return
    last = _chunk(session, delta, {}) | {"logprobs": stop_logprobs}
    last["finish_reason"] = reason_of(session.body, delta.finish_reason)
    last["matched_stop"] = delta.output.finish.matched if delta.output.finish else None
    if delta.schema_error:
        last["schema_error"] = delta.schema_error
    if delta.output.hidden_states is not None:
        dim = session.state.intake.facts.embed_dim
        last["delta"]["hidden_states"] = last_hidden(delta.output, dim)
    yield last


def _split_logprobs(
    session: ChatSession, output: Output
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The log-probabilities of the text, and of the token that ended it and has no text."""
    found, finish = _logprobs(session, output), output.finish
    has_text = session.request.sampling.no_stop_trim
    if not found or has_text or finish is None or not isinstance(finish.matched, int):
        return found, None
    content = found["content"]
    return found | {"content": content[:-1]}, found | {"content": content[-1:]}


def _chunk(session: ChatSession, delta: Delta, part: dict[str, Any]) -> dict[str, Any]:
    """Every delta has all fields: clients read ``delta.reasoning_content`` without a check."""
    nothing = _NO_DELTA | _reasoning(session, "")
    shown = in_older_form(session.body, nothing | part)
    return {"index": delta.index, "delta": shown, "logprobs": None, "finish_reason": None}


def _parts(session: ChatSession, delta: Delta, calls: _Calls) -> Iterator[dict[str, Any]]:
    if delta.parsed.reasoning and session.shows_reasoning:
        yield _reasoning(session, delta.parsed.reasoning)
    if delta.parsed.text:
        yield {"content": delta.parsed.text}
    for call in delta.parsed.calls:
        for part in calls.parts(call):
            yield {"tool_calls": [part]}
    if delta.finish_reason is not None:
        for part in calls.end():
            yield {"tool_calls": [part]}


class _Calls:
    """The tool calls of a stream's choice. The first part of a call carries its id and name."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._begun: set[int] = set()
        self._custom = CustomCalls(session.tools.custom)

    def parts(self, call: ToolCallDelta) -> Iterator[dict[str, Any]]:
        """What a delta adds."""
        is_custom = self._custom.take(call.index, call.name, call.arguments)
        if call.index in self._begun:
            if not is_custom:
                yield {"index": call.index, "function": {"arguments": call.arguments}}
            return
        self._begun.add(call.index)
        name = call.name or ""
        yield {
            "index": call.index,
            "id": call.call_id or self._session.call_id(name, call.index),
            **_call(self._session, name, "" if is_custom else call.arguments),
        }

    def end(self) -> Iterator[dict[str, Any]]:
        """The inputs of custom calls, at the end of the message."""
        for index, text in self._custom.inputs():
            yield {"index": index, "custom": {"input": text}}
