"""ChatSession: from messages to a request for intake, and from its output to reasoning, text and
tool calls.

The chat, Anthropic, Ollama and Responses routes all use it and differ in the form of the answer.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.continuation.stream_journal import draws
from radixlm.entrypoints.http.off_loop import off_loop, off_loop_by_body
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.custom_tools import read_custom_tools
from radixlm.entrypoints.http.openai.functions import in_words_of, read_functions
from radixlm.entrypoints.http.openai.logprobs import asked_ids, asked_top, prompt_need
from radixlm.entrypoints.http.openai.output_parser import OutputParser, ParsedDelta
from radixlm.entrypoints.http.openai.protocol import (
    ChatRequest,
    check_request,
)
from radixlm.entrypoints.http.openai.sampling import (
    check_sampling,
    client_names,
    refuse_unheld,
    request_of,
    sampling_of,
    truncated,
    unheld_of_body,
)
from radixlm.entrypoints.http.openai.thinking import template_variables
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.tokenization import encode, render
from radixlm.entrypoints.media import MediaSource, sources_of, with_options
from radixlm.entrypoints.reasoning import make_strict
from radixlm.entrypoints.request_options import answer_error
from radixlm.intake.records import GenerateRequest, Output
from radixlm.text.answer_check import UnheldSchema, unheld_schema
from radixlm.text.chat import ChatTemplate
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tokenizer import MAX_TOKEN_ID
from radixlm.text.tools import registry as tools
from radixlm.text.tools.base import ToolSpec, tool_specs
from radixlm.wire.requests import GrammarSpec, LogprobParams
from radixlm.wire.unknown import note_warning

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_TAIL_IDS = 32


@dataclass(slots=True)
class Tools:
    """The tools that the model may call. ``format``: the parser of its calls, None if calls are not
    parsed. ``grammar``: the constraint that ``tool_choice`` asks for."""

    shown: list[dict[str, Any]] | None = None
    specs: list[ToolSpec] = field(default_factory=list)
    format: str | None = None
    grammar: dict[str, Any] | None = None
    unheld: dict[str, UnheldSchema] = field(default_factory=dict)  # by the function's name
    custom: frozenset[str] = frozenset()  # names of the functions that are custom tools

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
    starts_inside: bool
    num_earlier_calls: int

    def parser(self) -> OutputParser:
        """A parser for the message of one sample."""
        thinking = None
        if self.reasoning is not None:
            streams = self.body.stream_reasoning is not False
            thinking = reasoning.create(
                self.reasoning, starts_inside=self.starts_inside, stream_reasoning=streams
            )
        calls = None
        if self.tools.format is not None:
            drop = self.state.config.serve.drop_unknown_tools
            calls = tools.create(self.tools.format, self.tools.specs, drop_unknown=drop)
        return OutputParser(thinking, calls, self.body.parallel_tool_calls is False)

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer has the reasoning; if not it is still parsed, and left out."""
        return self.body.include_reasoning is not False

    def call_id(self, name: str, index: int) -> str:
        return tools.call_id(self.tools.format or "", name, self.num_earlier_calls + index, draws())

    def count(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.state.require_tokenizer().encode(text, False)) if text else 0


@dataclass(slots=True)
class Delta:
    """New output of one sample."""

    index: int
    is_first: bool
    parsed: ParsedDelta
    output: Output
    finish_reason: str | None = None
    schema_error: str = ""


@dataclass(slots=True)
class Answer:
    """One finished sample."""

    index: int
    parsed: ParsedDelta
    output: Output
    finish_reason: str
    schema_error: str = ""


async def make_chat_session(state: ServerState, body: ChatRequest) -> ChatSession:
    """Check a chat request and render its prompt. Errors name the field."""
    model, sources, chosen, variables = await off_loop_by_body(_checked, state, body)
    if sources and state.media is not None:
        await state.media.ready()  # the prompt has its placeholders
    prompt = await rendered(state, body, chosen, variables)
    name = state.reasoning_format
    shown = name if body.separate_reasoning is not False else None
    request = await off_loop_by_body(_request, state, body, chosen, prompt, shown)
    await _set_prompt(state, body, request, prompt, sources)
    request.prediction = await _prediction_ids(state, body.prediction)
    after = _grammar_after(state, name, prompt, variables)
    _set_grammar(request, chosen, after, body.response_format)
    if state.config.serve.enable_strict_thinking:
        make_strict(request, name)
    return ChatSession(
        state=state,
        body=body,
        model=model,
        request=request,
        tools=chosen,
        reasoning=shown,
        starts_inside=shown is not None and reasoning.starts_inside(shown, prompt),
        num_earlier_calls=sum(_num_calls(m) for m in body.messages),
    )


def _checked(
    state: ServerState, body: ChatRequest
) -> tuple[str, Sequence[MediaSource], Tools, dict[str, Any]]:
    """The model, the media, the tools and the variables of the template."""
    check_request(body)
    model = state.check_model(body.model)
    check_messages(body.messages, state.template)
    sources = with_options(sources_of(body.messages, state.media), body.mm_processor_kwargs)
    read_functions(body)
    custom = read_custom_tools(body)
    with in_words_of(body):
        chosen = _tools(state, body)
    chosen.custom = custom
    return model, sources, chosen, template_variables(state, body)


def check_messages(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate | None = None
) -> None:
    """InvalidRequest for a message without content, or without a role that is OpenAI's or that the
    template names."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not (
            role in ROLES or (template is not None and template.names_role(role))
        ):
            raise InvalidRequest(
                f"messages[{index}].role must be one of {', '.join(sorted(ROLES))}, or one that "
                f"the chat template names, not {role!r:.80}",
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
    listed = body.tools or []
    for place, tool in enumerate(listed):
        if tool.get("type", "function") != "function":
            where = f"tools[{place}].type"
            kinds = "'function' or 'custom'"
            raise InvalidRequest(f"{where} must be {kinds}, not {tool.get('type')!r:.80}", where)
        if not isinstance(tool.get("function", {}), Mapping):
            where = f"tools[{place}].function"
            raise InvalidRequest(f"{where} must be an object", where)
    choice, listed = _allowed(body.tool_choice, listed)
    specs = tool_specs(listed)
    if choice is None:
        choice = "auto" if specs else "none"
    if choice == "any":  # Mistral's word
        choice = "required"
    if choice == "none":
        return Tools()
    if not specs and choice != "auto":
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if not specs:
        return Tools()
    name = state.tool_format
    parallel = body.parallel_tool_calls is not False
    grammar = None
    if name is not None or choice != "auto":
        level = state.tool_strict_level
        grammar = tools.constraint(name or "json", specs, choice, parallel, strict_level=level)
    made = Tools(listed, specs, grammar["parser"] if grammar else name, grammar)
    _note_unheld(made, choice, state.tool_strict_level)
    return made


def _note_unheld(made: Tools, choice: str | Mapping[str, Any], strict_level: int) -> None:
    """Tell of the keywords of arguments that the grammar of the calls does not enforce."""
    for place, spec in enumerate(made.specs if made.grammar else ()):
        is_chosen = made.is_forced and (choice == "required" or _tool_name(choice) == spec.name)
        is_held = is_chosen or spec.strict or (not made.is_forced and strict_level == 2)
        if not is_held:
            continue
        where = f"tools[{place}].function.parameters"
        unheld = unheld_schema(spec.parameters or {}, where)
        if unheld is None:
            continue
        if spec.strict:
            refuse_unheld(unheld)
        note_warning(unheld.note)
        made.unheld[spec.name] = unheld


def _allowed(
    choice: str | Mapping[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | Mapping[str, Any] | None, list[dict[str, Any]]]:
    """OpenAI's "allowed_tools": a mode and some of the tools."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, tools
    allowed = choice.get("allowed_tools") or choice
    chosen = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(chosen, list):
        raise InvalidRequest("tool_choice.allowed_tools.tools must be a list", "tool_choice")
    names = {_tool_name(tool) for tool in chosen}
    tools = [tool for tool in tools if _tool_name(tool) in names]
    return str(allowed.get("mode", "auto")), tools


def _tool_name(tool: Any) -> str | None:
    if not isinstance(tool, Mapping):
        return None
    holder = tool.get("function") or tool.get("custom") or tool
    name = holder.get("name") if isinstance(holder, Mapping) else None
    return name if isinstance(name, str) else None


# ---- thinking ------------------------------------------------------------------------------


def _grammar_after(
    state: ServerState, name: str | None, prompt: str, variables: Mapping[str, Any]
) -> str | None:
    """The marker after which a grammar applies: the end of the reasoning, None if there is none."""
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


async def rendered(
    state: ServerState, body: ChatRequest, chosen: Tools, variables: Mapping[str, Any]
) -> str:
    """The text of the prompt; of ``input_ids`` its end. InvalidRequest names the field."""
    if body.input_ids is not None:  # its end tells whether the answer begins in the reasoning
        tail = [i for i in body.input_ids[-_TAIL_IDS:] if 0 <= i <= MAX_TOKEN_ID]
        return state.require_tokenizer().decode(tail, skip_special_tokens=False)
    last = body.messages[-1]
    is_continued = bool(body.continue_final_message) or last.get("prefix") is True
    if is_continued and last.get("role") != "assistant":
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's", "messages"
        )
    adds = body.add_generation_prompt
    if body.continue_final_message and adds:
        raise InvalidRequest(
            "add_generation_prompt begins a new message: with continue_final_message send false",
            "add_generation_prompt",
        )
    return await render(
        state,
        body.messages,
        tools=chosen.shown,
        documents=body.documents,
        add_generation_prompt=adds is not False,
        continue_final_message=is_continued,
        chat_template=body.chat_template,
        template_kwargs=variables,
    )


def _request(
    state: ServerState, body: ChatRequest, chosen: Tools, prompt: str, shown: str | None
) -> GenerateRequest:
    limit = body.max_completion_tokens
    sampling = sampling_of(body, state.defaults, body.max_tokens if limit is None else limit)
    has_special = chosen.format is not None and tools.keep_special_tokens(chosen.format)
    has_special |= shown is not None and reasoning.keep_special_tokens(shown)
    template = state.require_template()
    sampling = msgspec.structs.replace(
        sampling,
        stop=(*sampling.stop, *template.stops),
        skip_special_tokens=sampling.skip_special_tokens and not has_special,
    )
    check_sampling(state, sampling, client_names(body))
    rids = body.rid if isinstance(body.rid, list) else [body.rid]
    if len(rids) != 1:
        raise InvalidRequest("rid must be one string: a chat has one prompt", "rid")
    request = request_of(state, body, sampling, unheld_of_body(body, sampling), rids[0])
    request.logprobs = _logprob_need(body, state.intake.facts.vocab)
    return request


async def _set_prompt(
    state: ServerState,
    body: ChatRequest,
    request: GenerateRequest,
    prompt: str,
    sources: Sequence[MediaSource],
) -> None:
    """Set the token ids of the rendered prompt, with its media."""
    adds = state.require_template().adds_special_tokens
    adds = adds if body.add_special_tokens is None else body.add_special_tokens
    if body.input_ids is not None:
        request.input_ids = body.input_ids
    elif sources and state.media is not None:
        request.prompt = await state.media.prompt(prompt, sources, adds)
    else:
        cut = body.truncate_prompt_tokens
        ids = await encode(state, prompt, "messages", adds, truncates=cut is not None)
        request.input_ids = truncated(body, ids, state.intake.facts.context_len)


async def _prediction_ids(state: ServerState, prediction: Mapping[str, Any] | None) -> list[int]:
    """The token ids of {"type": "content", "content": a text, or text parts}."""
    if prediction is None:
        return []
    where = "prediction.content"
    if prediction.get("type") != "content":
        raise InvalidRequest("prediction.type must be 'content'", "prediction.type")
    content = prediction.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where} must be a text, or a list of text parts", where)
    return await encode(state, "".join(map(str, texts)), where, add_special_tokens=False)


def _logprob_need(body: ChatRequest, vocab: int) -> LogprobParams | None:
    top = asked_top(body.top_logprobs, vocab, "top_logprobs")
    ids = asked_ids(body.logprob_token_ids, dict(body))
    need = LogprobParams(-1, 0 if ids else top, ids) if body.logprobs else None
    if body.prompt_logprobs is not None:
        need = prompt_need(body.prompt_logprobs, top, vocab, bool(body.stream))
    if body.return_sampling_mask:
        if body.stream or not body.return_meta_info:
            raise InvalidRequest(
                "return_sampling_mask: it comes in meta_info of a whole answer: "
                "set return_meta_info, and leave stream out",
                "return_sampling_mask",
            )
        need = msgspec.structs.replace(need or LogprobParams(), kept=True)
    return need


def _set_grammar(
    request: GenerateRequest, chosen: Tools, after: str | None, response_format: Any
) -> None:
    """A forced call takes precedence over response_format, and that over strict arguments."""
    spec = request.grammar
    if chosen.grammar and (spec is None or chosen.is_forced):
        is_strict = any(tool.strict for tool in chosen.specs)
        grammar = chosen.grammar
        spec = GrammarSpec(grammar["kind"], grammar["value"], is_strict=is_strict)
        request.names |= dict.fromkeys(("ebnf", "json_schema", "structural_tag"), "tools")
    elif response_format is not None:
        request.names |= dict.fromkeys(("json_schema", "structural_tag"), "response_format")
    if spec is not None:
        request.grammar = msgspec.structs.replace(spec, after=after)


def beginning(body: ChatRequest) -> str:
    """With ``echo`` the text of the assistant's message that ends the conversation, else ""."""
    last = body.messages[-1] if body.messages else {}
    if not body.echo or last.get("role") != "assistant":
        return ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, dict))


# ---- answers -------------------------------------------------------------------------------


async def collect(session: ChatSession) -> list[Answer]:
    """The finished samples."""
    (outputs,) = await generate.collect(session.state, [session.request])
    answers = []
    for output in outputs:
        answer = await off_loop(len(output.text), _answer, session, output)
        if answer.schema_error:
            note_warning(f"choice {output.index}: {answer.schema_error}")
        answers.append(answer)
    return answers


def _answer(session: ChatSession, output: Output) -> Answer:
    parser = session.parser()
    parsed = parser.feed(output.text)
    parsed.absorb(parser.finish())
    reason, error = _reason(parser, output), _schema_error(session, parsed, output)
    return Answer(output.index, parsed, output, reason or "stop", error)


def _schema_error(session: ChatSession, parsed: ParsedDelta, output: Output) -> str:
    """Why the answer does not fit its schema, or a call its function's; empty if it does."""
    if session.request.unheld is not None and not session.tools.is_forced:
        return answer_error(session.request.unheld, output, parsed.text)
    schemas = session.tools.unheld
    calls = parsed.whole_calls() if schemas else ()
    errors = (answer_error(schemas.get(call.name), output, call.arguments) for call in calls)
    return next(filter(None, errors), "")


def _reason(parser: OutputParser, output: Output) -> str | None:
    reason = generate.finish_reason(output)
    return "tool_calls" if reason == "stop" and parser.num_calls else reason


async def stream(session: ChatSession) -> AsyncGenerator[Delta, None]:
    """The deltas of all samples as they come; the last of each has a finish reason."""
    parsers: dict[int, OutputParser] = {}
    whole: dict[int, ParsedDelta] = {}  # only of answers that are checked
    is_checked = session.request.unheld is not None or bool(session.tools.unheld)
    async with aclosing(generate.stream(session.state, [session.request])) as deltas:
        async for _, output in deltas:
            parser = parsers.get(output.index)
            is_first = parser is None
            if parser is None:
                parser = parsers[output.index] = session.parser()
            parsed = parser.feed(output.text)
            reason, error = None, ""
            if output.finish is not None:
                parsed.absorb(parser.finish())
                reason = _reason(parser, output)
            if is_checked:
                whole.setdefault(output.index, ParsedDelta()).absorb(parsed)
                if output.finish is not None:
                    checked = whole[output.index]
                    error = await off_loop(
                        len(checked.text), _schema_error, session, checked, output
                    )
            yield Delta(output.index, is_first, parsed, output, reason, error)
