"""POST /v1/responses: the request body, and its input items as messages of a chat."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.continuation.stream_journal import draw_hex
from radixlm.entrypoints.disaggregation import pair_fields
from radixlm.entrypoints.http.batches.files import page
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.responses.client_tools import call_of, client_tools
from radixlm.entrypoints.http.responses.toolbox import is_remote
from radixlm.entrypoints.media import image_part
from radixlm.entrypoints.request_model import (
    Body,
    Metadata,
    Objects,
    Priority,
    ResumeBody,
    make,
    reject_unsupported,
    with_fields,
)
from radixlm.wire.sampling_params import parameter_names

_INCLUDE = frozenset(
    (
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    )
)
MAX_LISTED = 100
LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
Message = dict[str, Any]


@with_fields("responses")
class ResponsesRequest(Body):
    """OpenAI's fields, and further sampling parameters of chat."""

    is_kept = True

    input: str | Objects | None = None
    model: str | None = None
    instructions: str | None = None
    background: bool | None = False
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: int | None = None
    conversation: str | dict[str, Any] | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    resume: ResumeBody | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = True
    stream: bool | None = False
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: Objects | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    user: str | None = None
    priority: Priority | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def conversation_of(body: ResponsesRequest) -> str | None:
    """The id of the conversation that a response belongs to."""
    given = body.conversation
    found = given.get("id") if isinstance(given, dict) else given
    if given is not None and not isinstance(found, str):
        raise InvalidRequest("conversation must be an id, or an object with id", "conversation")
    if found is not None and body.previous_response_id is not None:
        raise InvalidRequest(
            "conversation: leave out previous_response_id, or this", "conversation"
        )
    return found


def check_request(body: ResponsesRequest) -> None:
    """InvalidRequest for what would change the answer and is not supported."""
    reject_unsupported(body)
    unknown = set(body.include or ()) - _INCLUDE
    if unknown:
        raise InvalidRequest(f"include: {sorted(unknown)[0]!r:.80} is unknown", "include")
    if body.background and body.store is False:
        raise InvalidRequest("background can only be used when `store` is true", "background")
    if body.input is None or body.input == []:
        raise InvalidRequest("input is required", "input")


def chat_of(
    body: ResponsesRequest,
    messages: list[Message],
    remote: Objects | None = None,
    may_call: bool = True,
) -> ChatRequest:
    """The same request in chat's form. ``remote``: the functions of tool servers."""
    effort = (body.reasoning or {}).get("effort")
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    values: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [t.function for t in client_tools(body.tools or ())] + (remote or []) or None,
        "tool_choice": choice_of(body.tool_choice) if may_call else "none",
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": effort,
        "response_format": format_of(body.text),
        "logprobs": wants_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "stream": body.stream,
        "priority": body.priority,
        "data_parallel_rank": body.data_parallel_rank,
        "routed_dp_rank": body.routed_dp_rank,
        "extra_key": body.extra_key,
        "cache_salt": body.cache_salt,
        "chat_template_kwargs": body.chat_template_kwargs,
    } | pair_fields(body)
    for name, alias in parameter_names("chat", "responses").items():
        values[name] = getattr(body, alias)
    return make(ChatRequest, {name: v for name, v in values.items() if v is not None})


def choice_of(choice: str | Mapping[str, Any] | None) -> Any:
    """The tool choice in chat's form."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") in ("function", "custom", "mcp") and choice.get("name"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    if is_remote(choice):
        return "required"
    return dict(choice)


def format_of(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as chat's ``response_format``."""
    format_ = (text or {}).get("format")
    if format_ is None:
        return None
    if not isinstance(format_, Mapping):
        raise InvalidRequest("text.format must be an object", "text.format")
    if format_.get("type") != "json_schema":
        return dict(format_)
    names = ("name", "description", "schema", "strict")
    schema = {name: format_[name] for name in names if format_.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


# ---- items -> messages ---------------------------------------------------------------------


def messages_of(items: str | list[dict[str, Any]], where: str = "input") -> list[Message]:
    """The messages that input items make; InvalidRequest names the item."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    reasoning, last = "", ""
    for index, item in enumerate(items):
        here = f"{where}[{index}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            reasoning += _joined(item.get("content") or item.get("summary") or [], here)
        elif kind == "message":
            message = _message(item, here)
            if reasoning and message["role"] == "assistant":
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(messages, item, reasoning)
            reasoning = ""
        elif kind == "mcp_call":
            results = _results(messages) if last == kind else []
            call_id = str(item.get("id") or "")
            _add_call(messages, dict(item) | {"call_id": call_id}, reasoning)
            reasoning = ""
            result = {"role": "tool", "tool_call_id": call_id, "content": result_of(item)}
            messages += [*results, result]
        elif kind == "mcp_list_tools":
            continue  # the tools are listed again
        elif kind == "additional_tools":
            continue  # they have joined those of the request
        elif kind == "compaction":
            summary = _summary(item, f"{here}.encrypted_content")
            messages.append({"role": "assistant", "content": summary})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output") or "", f"{here}.output")
            call_id = str(item.get("call_id") or "")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            raise InvalidRequest(f"{here}.type {kind!r:.80} is not supported", f"{here}.type")
        last = kind
    return messages


def is_unfinished(items: str | Objects) -> bool:
    """Whether the input ends with a message of the assistant that the answer goes on with."""
    last = items[-1] if items and isinstance(items, list) else {}
    is_message = last.get("type") in (None, "message") and last.get("role") == "assistant"
    return is_message and last.get("status") in ("in_progress", "incomplete")


def _summary(item: Mapping[str, Any], where: str) -> str:
    """The summary in an item of /v1/responses/compact."""
    try:
        text = base64.b64decode(str(item.get("encrypted_content")), validate=True).decode()
    except ValueError:
        raise InvalidRequest(f"{where} is not of this server", where) from None
    return f"Summary of our conversation so far:\n{text}"


def _results(messages: list[Message]) -> list[Message]:
    """Remove the tool results at the end, so that a further call joins the earlier calls."""
    results: list[Message] = []
    while messages and messages[-1]["role"] == "tool":
        results.insert(0, messages.pop())
    return results


def result_of(item: Mapping[str, Any]) -> str:
    """The text that the model reads of a call that a tool server ran."""
    error = item.get("error")
    if error:
        text = error.get("content", error.get("message")) if isinstance(error, Mapping) else error
        return f"Error: {text}"
    return str(item.get("output") or "")


def _message(item: Mapping[str, Any], where: str) -> Message:
    content = item.get("content")
    if content is None:
        raise InvalidRequest(f"{where}.content is required", f"{where}.content")
    return {"role": item.get("role"), "content": _content(content, f"{where}.content")}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A text, or parts if some are images."""
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if "input_image" not in kinds:
        return _joined(content, where)
    made: list[dict[str, Any]] = []
    for place, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        here = f"{where}[{place}]"
        if kind == "input_image":
            if not isinstance(part.get("image_url"), str):
                here = f"{here}.image_url"
                raise InvalidRequest(f"{here} must be a URL or a data URI", here)
            made.append(image_part(part["image_url"], f"{here}.image_url"))
        else:
            made.append({"type": "text", "text": _joined([part], here)})
    return made


def message_of(message: Message) -> dict[str, Any]:
    """A user message of a chat as an input item."""
    content = message["content"]
    parts: Objects = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
        for part in parts
    ]
    return {"type": "message", "role": message["role"], "content": shown}


def listed_items(items: str | Objects) -> Objects:
    """Input items as they are listed: with type and id, the content of messages as parts."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    shown = []
    for item in items:
        listed: dict[str, Any] = {"id": f"msg_{draw_hex(16)}", "type": "message"}
        listed |= {"status": "completed"} | {n: v for n, v in item.items() if v is not None}
        if isinstance(text := item.get("content"), str):
            part: dict[str, Any] = {"type": "input_text", "text": text}
            if item.get("role") == "assistant":
                part |= {"type": "output_text", "annotations": []}
            listed["content"] = [part]
        shown.append(listed)
    return shown


def page_of_items(
    items: Objects, limit: int, order: str, after: str | None = None
) -> dict[str, Any]:
    """A page of stored items, oldest first in ``items``."""
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    listed = page(items if order == "asc" else items[::-1], after, limit, MAX_LISTED)
    return listed | {name: listed[name] or "" for name in ("first_id", "last_id")}


def _joined(content: Any, where: str) -> str:
    """The text of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a text or a list of parts", where)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            here = f"{where}[{place}]"
            raise InvalidRequest(f"{here}: only text is supported here, not {kind!r:.60}", here)
        texts.append(text)
    return "".join(texts)


def _add_call(messages: list[Message], item: Mapping[str, Any], reasoning: str) -> None:
    """Add a call; consecutive calls belong to one message of the assistant."""
    if not messages or messages[-1]["role"] != "assistant" or reasoning:
        message: Message = {"role": "assistant", "content": ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        messages.append(message)
    messages[-1].setdefault("tool_calls", []).append(call_of(item))
