"""Ollama's routes. Streams are JSON lines, sampling parameters stand in ``options``."""

import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm import __version__
from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.entrypoints.disaggregation import pair_fields
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.off_loop import off_loop_by_body
from radixlm.entrypoints.http.openai import conversation
from radixlm.entrypoints.http.openai.completions import filled
from radixlm.entrypoints.http.openai.conversation import ChatSession, make_chat_session
from radixlm.entrypoints.http.openai.logprobs import chat_logprobs
from radixlm.entrypoints.http.openai.output_parser import ParsedDelta
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.pool import as_prompts, pool, truncate
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body, stream_response
from radixlm.entrypoints.media import image_part
from radixlm.entrypoints.request_model import (
    Body,
    Objects,
    ResumeBody,
    Strings,
    make,
    reject_unsupported,
    table_fields,
    with_fields,
)
from radixlm.intake.records import Output
from radixlm.wire.fields import check_unsupported
from radixlm.wire.unknown import note_unknown

router = APIRouter(tags=["ollama"])

NDJSON = "application/x-ndjson"
_NEVER = "9999-12-31T23:59:59Z"  # `ollama ps` reads no expires_at as "Stopping..."
_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "abort"}
_OPTIONS = table_fields("ollama_options")


class OllamaBase(Body):
    """What all generating routes have in common."""

    model: str
    stream: bool | None = True
    resume: ResumeBody | None = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


@with_fields("ollama")
class OllamaChat(OllamaBase):
    """POST /api/chat."""

    messages: Objects | None = None
    tools: Objects | None = None


@with_fields("ollama_generate")
class OllamaGenerate(OllamaBase):
    """POST /api/generate."""

    prompt: str | None = ""
    system: str | None = None
    raw: bool | None = False
    images: list[Any] | None = None
    suffix: str | None = None


@with_fields("ollama_embed")
class OllamaEmbed(Body):
    """POST /api/embed and /api/embeddings (which has ``prompt``)."""

    model: str
    input: str | Strings | None = None
    prompt: str | None = None
    dimensions: int | None = None


class OllamaShow(Body):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaPull(Body):
    """POST /api/pull."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = True


@dataclass(slots=True)
class OllamaAnswer:
    """One answer, of /api/chat (a message) or of /api/generate (a response)."""

    session: ChatSession
    model: str
    is_chat: bool
    began_s: float = field(default_factory=time.monotonic)

    def line(
        self, parsed: ParsedDelta, is_done: bool = False, output: Output | None = None
    ) -> dict[str, Any]:
        """One line. ``output``: for its log-probabilities."""
        shown: dict[str, Any] = {"model": self.model, "created_at": now()}
        if output is not None and self.session.body.logprobs:
            tokenizer = self.session.state.require_tokenizer()
            top = self.session.body.top_logprobs or 0
            shown["logprobs"] = chat_logprobs(tokenizer, output.logprobs, top)
        if not self.is_chat:
            shown["response"] = parsed.text
            if parsed.reasoning:
                shown["thinking"] = parsed.reasoning
            return shown | {"done": is_done}
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
        if parsed.reasoning:
            message["thinking"] = parsed.reasoning
        calls = parsed.whole_calls()
        if calls:
            message["tool_calls"] = [_call(c.name, c.arguments, c.index) for c in calls]
        return shown | {"message": message, "done": is_done}

    def totals(self, reason: str, output: Output) -> dict[str, Any]:
        """The further fields of the last line."""
        total_ns = int((time.monotonic() - self.began_s) * 1e9)
        prompt_ns = min(int(output.prefill_s * 1e9), total_ns)  # queueing included
        return {
            "done": True,
            "done_reason": _REASONS[reason],
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": output.prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": output.completion_tokens,
            "eval_duration": total_ns - prompt_ns,
        }


def _call(name: str, arguments: str, index: int) -> dict[str, Any]:
    return {"function": {"index": index, "name": name, "arguments": json.loads(arguments or "{}")}}


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@router.post("/api/chat", openapi_extra=documented(OllamaChat))
async def chat(request: Request) -> Response:
    """Answer a conversation in Ollama's form."""
    body = await read_body(request, OllamaChat, any_type=True)
    state = state_of(request)
    state.check_model(body.model)
    if not body.messages:
        empty = {"message": {"role": "assistant", "content": ""}}
        return json_response(_loaded(body.model) | empty)
    session = await make_chat_session(state, await off_loop_by_body(_chat_of, body))
    return await _answer(request, OllamaAnswer(session, body.model, True), body)


@router.post("/api/generate", openapi_extra=documented(OllamaGenerate))
async def generate(request: Request) -> Response:
    """Answer a prompt in Ollama's form, with the chat template unless ``raw``;
    with ``suffix`` what belongs between the two."""
    body = await read_body(request, OllamaGenerate, any_type=True)
    state = state_of(request)
    state.check_model(body.model)
    reject_unsupported(body)
    if not body.prompt:
        return json_response(_loaded(body.model) | {"response": ""})
    chat = await off_loop_by_body(_chat_of_prompt, body)
    if body.raw or body.suffix:
        text = filled(state, body.prompt, body.suffix)
        chat.input_ids = state.require_tokenizer().encode(text)
        chat.separate_reasoning = False
    session = await make_chat_session(state, chat)
    return await _answer(request, OllamaAnswer(session, body.model, False), body)


def _loaded(model: str) -> dict[str, Any]:
    """The answer to an empty request, which clients send to load a model."""
    return {"model": model, "created_at": now(), "done": True, "done_reason": "load"}


def _chat_of(body: OllamaChat) -> ChatRequest:
    messages = [_message(message, i) for i, message in enumerate(body.messages or ())]
    return _chat(body, messages, body.tools)


def _chat_of_prompt(body: OllamaGenerate) -> ChatRequest:
    content = _with_images(body.prompt, body.images, "images")
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return _chat(body, messages, None)


def _chat(
    body: OllamaBase, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> ChatRequest:
    """The same request in OpenAI's form."""
    values: dict[str, Any] = {"model": body.model, "messages": messages, "tools": tools or None}
    values |= _options(body.options or {})
    if body.format == "json":
        values["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, Mapping):
        schema = {"name": "output", "schema": body.format}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        raise InvalidRequest("format must be 'json' or a JSON schema", "format")
    values |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs} | pair_fields(body)
    if isinstance(body.think, bool):
        values["enable_thinking"] = body.think
    elif body.think is not None:
        values["reasoning_effort"] = body.think
    return make(ChatRequest, {name: v for name, v in values.items() if v is not None})


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Chat's sampling parameters, of Ollama's options."""
    check_unsupported(_OPTIONS, options)
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _OPTIONS:
            note_unknown(name, "option", "options.")
        elif value is not None and _OPTIONS[name].state == "works":
            values[_OPTIONS[name].names["chat"]] = value
    limit = values.get("max_completion_tokens", 0)
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise InvalidRequest("options.num_predict must be an integer", "num_predict")
    if limit < 0:
        del values["max_completion_tokens"]  # until the context is full
    return values


def _with_images(text: Any, images: list[Any] | None, where: str) -> Any:
    """Content parts with the base64 images of the field ``where`` before the text."""
    if not images:
        return text
    parts = [image_part(one, f"{where}[{place}]") for place, one in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Ollama's message in OpenAI's form."""
    where = f"messages[{index}]"
    chat: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
    images = message.get("images")
    if images is not None and not isinstance(images, list):
        raise InvalidRequest(f"{where}.images must be a list", f"{where}.images")
    chat["content"] = _with_images(chat["content"], images, f"{where}.images")
    if message.get("thinking"):
        chat["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        chat["name"] = message["tool_name"]
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(c, Mapping) for c in calls):
            raise InvalidRequest(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
        chat["tool_calls"] = [{"type": "function", **call} for call in calls]
    return chat


async def _answer(request: Request, answer: OllamaAnswer, body: OllamaBase) -> Response:
    answer.session.request.clamp_max_tokens = True
    if body.stream is not False:
        answer.session.request.stream = True
        return await stream_response(request, _lines(answer), _stream_error, NDJSON)
    return json_response(await cancel_on_disconnect(request, _complete(answer)))


async def _complete(answer: OllamaAnswer) -> dict[str, Any]:
    (sample,) = await conversation.collect(answer.session)
    whole = answer.line(sample.parsed, output=sample.output)
    return whole | answer.totals(sample.finish_reason, sample.output)


async def _lines(answer: OllamaAnswer) -> AsyncGenerator[bytes, None]:
    """Texts as they come; complete tool calls in the last line but one."""
    calls = ParsedDelta()
    async with aclosing(conversation.stream(answer.session)) as deltas:
        async for delta in deltas:
            parsed = delta.parsed
            calls.calls += parsed.calls
            has_logprobs = answer.session.body.logprobs and delta.output.token_ids
            if parsed.text or parsed.reasoning or has_logprobs:
                shown = ParsedDelta(parsed.reasoning, parsed.text)
                yield _line(answer.line(shown, output=delta.output))
            if delta.finish_reason is not None:
                if calls.calls:
                    yield _line(answer.line(calls))
                totals = answer.totals(delta.finish_reason, delta.output)
                yield _line(answer.line(ParsedDelta()) | totals)


def _line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value) + b"\n"


def _stream_error(error: RadixError | None) -> bytes:
    return _line({"error": str(error) if error else "internal error"})


# ---- the model -----------------------------------------------------------------------------


def _details(state: ServerState) -> dict[str, Any]:
    family = state.info.model_type
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": state.config.model.quantized_as or "none",
    }


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The model and its adapters."""
    return json_response({"models": _models(state_of(request))})


@router.get("/api/ps")
async def ps(request: Request) -> Response:
    """The model and its adapters, which stay loaded."""
    models = _models(state_of(request))
    return json_response({"models": [one | {"expires_at": _NEVER} for one in models]})


def _models(state: ServerState) -> list[dict[str, Any]]:
    weights = state.intake.engine_facts.get("weight_bytes", 0)
    modified = datetime.fromtimestamp(state.started_s, UTC).isoformat()
    model = {
        **_names(state.model_name),
        "modified_at": modified,
        "size": weights,
        "size_vram": 0,
        "digest": _digest(state, state.model_name),
        "details": _details(state),
        "context_length": state.intake.facts.context_len,
    }
    details = model["details"] | {"parent_model": state.model_name}
    adapters = [
        model
        | {**_names(one.name), "size": one.num_bytes, "details": details}
        | {"digest": _digest(state, one.name)}
        for one in state.intake.adapters.entries
    ]
    return [model, *adapters]


def _names(name: str) -> dict[str, str]:
    """A model's name in a list, where Ollama's have a tag: Open WebUI looks for one with a tag."""
    tagged = name if ":" in name else f"{name}:latest"
    return {"name": tagged, "model": tagged}


def _digest(state: ServerState, name: str) -> str:
    """64 hex digits of the name and the label of the weights: ``ollama list`` prints twelve."""
    return hashlib.sha256(f"{name} {state.weight_version}".encode()).hexdigest()


@router.post("/api/show", openapi_extra=documented(OllamaShow))
async def show(request: Request) -> Response:
    """The model's template, size and capabilities."""
    body = await read_body(request, OllamaShow, any_type=True)
    state = state_of(request)
    state.check_model(body.model or body.name or "")
    family = state.info.model_type
    facts = {
        "general.architecture": family,
        "general.name": state.model_name,
        f"{family}.context_length": state.intake.facts.context_len,
        f"{family}.vocab_size": state.info.decoder.vocab,
    }
    return json_response(
        {
            "modelfile": f"FROM {state.model_name}\n",
            "parameters": "",
            "template": state.template.source if state.template else "",
            "details": _details(state),
            "model_info": facts,
            "capabilities": _capabilities(state),
            "modified_at": datetime.fromtimestamp(state.started_s, UTC).isoformat(),
        }
    )


def _capabilities(state: ServerState) -> list[str]:
    """What the model can do, in Ollama's words, by which clients choose what they offer."""
    if not state.intake.facts.is_generation:
        return ["embedding"]
    kinds = state.media.kinds if state.media is not None else ()
    found = {
        "completion": True,
        "vision": "image" in kinds,
        "audio": "audio" in kinds,
        "tools": state.tool_format is not None,
        "thinking": state.reasoning_format is not None,
        "insert": state.fim is not None,
    }
    return [name for name, is_there in found.items() if is_there]


@router.post("/api/pull", openapi_extra=documented(OllamaPull))
async def pull(request: Request) -> Response:
    """Nothing is fetched: the model that is served is there, whatever its name."""
    body = await read_body(request, OllamaPull, any_type=True)
    state_of(request).check_model(body.model or body.name or "")
    if body.stream is False:
        return json_response({"status": "success"})
    lines = ({"status": "pulling manifest"}, {"status": "success"})
    return Response(b"".join(map(_line, lines)), media_type=NDJSON)


@router.get("/api/version")
async def version() -> Response:
    """The version of RadixLM."""
    return json_response({"version": __version__})


@router.post("/api/embed", openapi_extra=documented(OllamaEmbed))
@router.post("/api/embeddings", openapi_extra=documented(OllamaEmbed))
async def embed(request: Request) -> Response:
    """Vectors of texts."""
    body = await read_body(request, OllamaEmbed, any_type=True)
    state = state_of(request)
    state.check_model(body.model)
    is_old = request.url.path.endswith("/embeddings")
    param = "prompt" if is_old else "input"
    prompts = as_prompts(getattr(body, param), param)
    work = pool(state, prompts, param)
    results = await cancel_on_disconnect(request, work)
    vectors = [truncate(state, one.vector, body.dimensions) for one in results]
    if is_old:
        return json_response({"embedding": vectors[0]})
    count = sum(one.output.prompt_tokens for one in results)
    return json_response({"model": body.model, "embeddings": vectors, "prompt_eval_count": count})


# as Ollama, whose clients look that way whether it runs
router.add_api_route("/api/tags", tags, methods=["HEAD"], include_in_schema=False)
router.add_api_route("/api/version", version, methods=["HEAD"], include_in_schema=False)
