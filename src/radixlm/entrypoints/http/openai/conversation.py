"""From messages to a request for intake, and from its answers to reasoning, text and calls.

The chat, Anthropic, Ollama and Responses routes all go through here; they differ in how they
write what comes out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.output_parser import OutputParser, ParsedDelta
from radixlm.entrypoints.http.openai.protocol import (
    MAX_TOP_LOGPROBS,
    ChatRequest,
    check_request,
)
from radixlm.entrypoints.http.openai.sampling import (
    check_sampling,
    client_names,
    request_of,
    sampling_of,
)
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.media import MediaSource, sources_of
from radixlm.intake.records import GenerateRequest, Output
from radixlm.intake.tokenizer_manager import grammar_of
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tools import registry as tools
from radixlm.text.tools.base import ToolSpec, tool_specs
from radixlm.wire.requests import GrammarSpec, LogprobParams

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NO_THINKING = ("none", "minimal")


@dataclass(slots=True)
class Tools:
    """What the model may call. ``format`` names the parser of its calls, None: none is read.
    ``grammar`` is the constraint that the choice means."""

    shown: list[dict[str, Any]] | None = None
    specs: list[ToolSpec] = field(default_factory=list)
    format: str | None = None
    grammar: dict[str, Any] | None = None

    @property
    def is_forced(self) -> bool:
        return bool(self.grammar and self.grammar["is_forced"])


@dataclass(slots=True)
class ChatSession:
    """One chat request, ready to run."""

    state: ServerState
    body: ChatRequest
    model: str
    request: GenerateRequest
    tools: Tools
    reasoning: str | None
    is_inside: bool
    num_earlier_calls: int

    def reader(self) -> OutputParser:
        """A parser of one sample's message."""
        thinking = None
        if self.reasoning is not None:
            streams = self.body.stream_reasoning is not False
            thinking = reasoning.create(
                self.reasoning, starts_inside=self.is_inside, stream_reasoning=streams
            )
        calls = None
        if self.tools.format is not None:
            drop = self.state.config.serve.drop_unknown_tools
            calls = tools.create(self.tools.format, self.tools.specs, drop_unknown=drop)
        return OutputParser(thinking, calls, self.body.parallel_tool_calls is False)

    def call_id(self, name: str, index: int) -> str:
        """The id of a call of this answer."""
        return tools.call_id(self.tools.format or "", name, self.num_earlier_calls + index)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.state.require_tokenizer().encode(text, False)) if text else 0


@dataclass(slots=True)
class Delta:
    """What is new of one sample."""

    index: int
    is_first: bool
    piece: ParsedDelta
    output: Output
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """One finished sample."""

    index: int
    piece: ParsedDelta
    output: Output
    finish_reason: str


async def make_chat_session(state: ServerState, body: ChatRequest) -> ChatSession:
    """Check a chat request and write its prompt. Errors name the field."""
    check_request(body)
    model = state.check_model(body.model)
    check_messages(body.messages)
    sources = sources_of(body.messages, state.media)
    if sources and state.media is not None:
        await state.media.ready()  # its placeholders stand in the prompt
    chosen = _tools(state, body)
    variables = template_variables(state, body)
    prompt = _render(state, body, chosen, variables)
    name = state.reasoning_format
    shown = name if body.separate_reasoning is not False else None
    request = await _request(state, body, chosen, prompt, shown)
    await _set_prompt(state, body, request, prompt, sources)
    _set_grammar(request, chosen, _grammar_after(state, name, prompt, variables))
    return ChatSession(
        state=state,
        body=body,
        model=model,
        request=request,
        tools=chosen,
        reasoning=shown,
        is_inside=shown is not None and reasoning.starts_inside(shown, prompt),
        num_earlier_calls=sum(_num_calls(m) for m in body.messages),
    )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """InvalidRequest that names the message."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role must be one of {', '.join(sorted(ROLES))}, "
                f"not {role!r:.80}",
                param=f"messages[{index}].role",
            )
        content = message.get("content")
        if content is None and role in ("user", "system", "developer"):
            where = f"messages[{index}].content"
            raise InvalidRequest(f"{where} is required", where)


def _num_calls(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


# ---- tools ---------------------------------------------------------------------------------


def _tools(state: ServerState, body: ChatRequest) -> Tools:
    given = body.tools or []
    for place, tool in enumerate(given):
        if tool.get("type", "function") != "function":
            where = f"tools[{place}].type"
            raise InvalidRequest(f"{where} must be 'function', not {tool.get('type')!r:.80}", where)
        if not isinstance(tool.get("function", {}), Mapping):
            where = f"tools[{place}].function"
            raise InvalidRequest(f"{where} must be an object", where)
    choice, given = _allowed(body.tool_choice, given)
    specs = tool_specs(given)
    if choice is None:
        choice = "auto" if specs else "none"
    if choice == "none":
        return Tools()
    if not specs and choice != "auto":
        raise InvalidRequest("tool_choice: without tools there is nothing to choose", "tool_choice")
    if not specs:
        return Tools()
    name = state.tool_format
    parallel = body.parallel_tool_calls is not False
    grammar = None
    if name is not None or choice != "auto":
        grammar = tools.constraint(name or "json", specs, choice, parallel)
    reads = grammar["parser"] if grammar else name
    return Tools(given, specs, reads, grammar)


def _allowed(
    choice: str | Mapping[str, Any] | None, given: list[dict[str, Any]]
) -> tuple[str | Mapping[str, Any] | None, list[dict[str, Any]]]:
    """OpenAI's "allowed_tools": a mode and some of the tools."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, given
    allowed = choice.get("allowed_tools") or choice
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(listed, list):
        raise InvalidRequest("tool_choice.allowed_tools.tools must be a list", "tool_choice")
    names = {_tool_name(tool) for tool in listed}
    kept = [tool for tool in given if _tool_name(tool) in names]
    return str(allowed.get("mode", "auto")), kept


def _tool_name(tool: Any) -> str | None:
    if not isinstance(tool, Mapping):
        return None
    holder = tool.get("function") or tool
    name = holder.get("name") if isinstance(holder, Mapping) else None
    return name if isinstance(name, str) else None


# ---- thinking ------------------------------------------------------------------------------


def template_variables(state: ServerState, body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template, with the request's wish to think among them."""
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if isinstance(effort, str) and effort not in _EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(_EFFORTS)}, not {effort!r:.80}",
            param="reasoning_effort",
        )
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    wish = _wish(body)
    if wish is not None:
        name = state.reasoning_format
        switch = reasoning.template_switch(name) if name else None
        variables.setdefault(switch[0] if switch else "enable_thinking", wish)
    return variables


def _wish(body: ChatRequest) -> bool | None:
    """Whether the client wants the model to think; None: as the template has it."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    thinking = body.thinking
    if isinstance(thinking, bool):
        return thinking
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "disabled"):
        return bool(thinking["type"] == "enabled")
    effort = body.reasoning_effort
    if effort is None:
        return None
    return effort not in _NO_THINKING if isinstance(effort, str) else effort > 0


def _grammar_after(
    state: ServerState, name: str | None, prompt: str, variables: Mapping[str, Any]
) -> str | None:
    """The marker behind which a grammar begins: the end of the thinking, if there will be some."""
    if name is None:
        return None
    end = reasoning.end_marker(name)
    if reasoning.starts_inside(name, prompt):
        return end
    switch = reasoning.template_switch(name)
    if (
        switch is None
        or prompt.rstrip().endswith(end)
        or not state.require_template().mentions(switch[0])
    ):
        return None
    return end if variables.get(switch[0], switch[1]) else None


# ---- prompt and request --------------------------------------------------------------------


def _render(
    state: ServerState, body: ChatRequest, chosen: Tools, variables: Mapping[str, Any]
) -> str:
    if body.input_ids is not None:
        return ""
    last = body.messages[-1]
    goes_on = bool(body.continue_final_message) or last.get("prefix") is True
    if goes_on and last.get("role") != "assistant":
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's", "messages"
        )
    adds = body.add_generation_prompt
    return state.require_template().render(
        body.messages,
        tools=chosen.shown,
        documents=body.documents,
        add_generation_prompt=adds is not False,
        continue_final_message=goes_on,
        template_kwargs=variables,
    )


async def _request(
    state: ServerState, body: ChatRequest, chosen: Tools, prompt: str, shown: str | None
) -> GenerateRequest:
    most = body.max_completion_tokens
    sampling = sampling_of(body, state.defaults, body.max_tokens if most is None else most)
    keeps = chosen.format is not None and tools.keep_special_tokens(chosen.format)
    keeps = keeps or (shown is not None and reasoning.keep_special_tokens(shown))
    template = state.require_template()
    sampling = msgspec.structs.replace(
        sampling,
        stop=(*sampling.stop, *template.stops),
        skip_special_tokens=sampling.skip_special_tokens and not keeps,
    )
    check_sampling(state, sampling, client_names(body))
    if isinstance(body.rid, list):
        raise InvalidRequest("rid must be one string: a chat has one prompt", "rid")
    request = request_of(state, body, sampling, body.rid)
    request.logprobs = _logprob_need(body)
    return request


async def _set_prompt(
    state: ServerState,
    body: ChatRequest,
    request: GenerateRequest,
    prompt: str,
    sources: Sequence[MediaSource],
) -> None:
    """Token ids of the written prompt, with its images in their places."""
    adds = state.require_template().adds_special_tokens
    if body.input_ids is not None:
        request.input_ids = body.input_ids
    elif sources and state.media is not None:
        request.prompt = await state.media.prompt(prompt, sources, adds)
    else:
        request.input_ids = await encode(state, prompt, "messages", adds)


def _logprob_need(body: ChatRequest) -> LogprobParams | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {top}", "top_logprobs"
        )
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return LogprobParams(-1, top or 0) if body.logprobs else None


def _set_grammar(request: GenerateRequest, chosen: Tools, after: str | None) -> None:
    """A forced call goes before the format of the answer, which goes before strict arguments."""
    spec = grammar_of(request.sampling)
    if chosen.grammar and (spec is None or chosen.is_forced):
        spec = GrammarSpec(chosen.grammar["kind"], chosen.grammar["value"])
    if spec is not None:
        request.grammar = msgspec.structs.replace(spec, after=after)


# ---- answers -------------------------------------------------------------------------------


async def collect(session: ChatSession) -> list[Answer]:
    """The finished samples."""
    (outputs,) = await generate.collect(session.state, [session.request])
    answers = []
    for output in outputs:
        reader = session.reader()
        piece = reader.feed(output.text)
        piece.absorb(reader.finish())
        reason = _reason(session, reader, output)
        answers.append(Answer(output.index, piece, output, reason or "stop"))
    return answers


def _reason(session: ChatSession, reader: OutputParser, output: Output) -> str | None:
    reason = generate.finish_reason(output)
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


async def stream(session: ChatSession) -> AsyncGenerator[Delta, None]:
    """What is new, as it comes; each sample's last Delta has a finish reason."""
    readers: dict[int, OutputParser] = {}
    async with aclosing(generate.stream(session.state, [session.request])) as deltas:
        async for _, output in deltas:
            reader = readers.get(output.index)
            is_first = reader is None
            if reader is None:
                reader = readers[output.index] = session.reader()
            piece = reader.feed(output.text)
            reason = None
            if output.finish is not None:
                piece.absorb(reader.finish())
                reason = _reason(session, reader, output)
            yield Delta(output.index, is_first, piece, output, reason)
