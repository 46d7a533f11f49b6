"""Anthropic's Messages: /v1/messages and /v1/messages/count_tokens."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.disaggregation import pair_fields
from radixlm.entrypoints.http.anthropic_answer import (
    complete,
    events,
    make_message,
    stream_error,
)
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.off_loop import off_loop_by_body
from radixlm.entrypoints.http.openai.conversation import make_chat_session
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import (
    cancel_on_disconnect,
    read_body,
    stream_response,
)
from radixlm.entrypoints.media import image_part
from radixlm.entrypoints.request_model import (
    Body,
    Objects,
    ResumeBody,
    make,
    reject_unsupported,
    with_fields,
)
from radixlm.wire.sampling_params import parameter_names
from radixlm.wire.unknown import note_warning

router = APIRouter(tags=["anthropic"])

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
_BUILT_IN = re.compile(r"(web_search|computer|bash|text_editor)_\d{8}")


@with_fields("count_tokens")
class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[Objects, Field(min_length=1)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: Any = None


@with_fields("messages")
class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = False
    resume: ResumeBody | None = None
    thread: Any = None


class ThreadsNotSupported(InvalidRequest):
    """Threads are not kept between requests. Clients read ``details`` and continue without."""

    details: ClassVar[Mapping[str, Any]] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


@router.post("/v1/messages", openapi_extra=documented(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer a conversation in Anthropic's form."""
    body = await read_body(request, MessagesRequest)
    chat = await off_loop_by_body(chat_of, body)
    message = await make_message(state_of(request), chat)
    if body.stream:
        return await stream_response(request, events(message), stream_error)
    return json_response(await cancel_on_disconnect(request, complete(message)))


@router.post("/v1/messages/count_tokens", openapi_extra=documented(CountRequest))
async def count_tokens(request: Request) -> Response:
    """The number of prompt tokens of a conversation."""
    body = await read_body(request, CountRequest)
    session = await make_chat_session(state_of(request), await off_loop_by_body(_chat, body))
    return json_response({"input_tokens": len(session.request.input_ids or ())})


def chat_of(body: MessagesRequest) -> ChatRequest:
    """The same request in OpenAI's form; InvalidRequest for what is not supported."""
    if body.thread:
        raise ThreadsNotSupported(
            "thread: this server holds no threads: send all messages", "thread"
        )
    reject_unsupported(body)
    _check_edits(body.context_management)
    return _chat(body)


def _chat(body: CountRequest) -> ChatRequest:
    """The same request in OpenAI's form."""
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": _system(body.system) + _messages(body.messages),
        "continue_final_message": _has_begun(body.messages[-1]) or None,
        "tools": _tools(body.tools or []) or None,
        "enable_thinking": _thinking(body.thinking),
    }
    chat |= _choice(body.tool_choice) | _output(body) | pair_fields(body)
    if isinstance(body, MessagesRequest):
        chat["stream"] = body.stream
        for name, alias in parameter_names("chat", "messages").items():
            chat[name] = getattr(body, alias)
    return make(ChatRequest, {name: v for name, v in chat.items() if v is not None})


def _check_edits(management: Any) -> None:
    """InvalidRequest for edits of the conversation, except one that keeps everything."""
    edits = management.get("edits") if isinstance(management, Mapping) else management
    for edit in edits if isinstance(edits, list) else [edits] if edits else ():
        keeps_all = isinstance(edit, Mapping) and edit.get("keep") == "all"
        if not keeps_all or edit.get("type") != "clear_thinking_20251015":
            raise InvalidRequest(
                "context_management: this server does not edit conversations; it accepts only "
                'clear_thinking_20251015 with keep: "all"',
                "context_management",
            )


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    text = system if isinstance(system, str) else "\n\n".join(_texts(system, "system"))
    return [{"role": "system", "content": text}]


def _texts(blocks: Any, where: str) -> list[str]:
    """The texts of blocks, which must all be text, documents or search results."""
    if isinstance(blocks, str):
        return [blocks]
    listed = blocks if isinstance(blocks, list) else ()
    return [_text(block, f"{where}[{place}]") for place, block in enumerate(listed)]


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind in ("document", "search_result"):
        return _document(block, where)
    if kind != "text" or not isinstance(block.get("text"), str):
        raise InvalidRequest(f"{where}: only text is supported here, not {kind!r:.60}", where)
    return str(block["text"])


def _document(block: Mapping[str, Any], where: str) -> str:
    """The text of a document or of a search result, below its title."""
    source, content = block.get("source"), block.get("content")
    if block["type"] == "document":
        if not isinstance(source, Mapping) or source.get("type") not in ("text", "content"):
            raise InvalidRequest(
                f"{where}.source must be of type text or content",
                f"{where}.source",
            )
        content, source = source.get("data", source.get("content")), None
    head = [block.get("title"), source, block.get("context")]
    lines = [line for line in head if isinstance(line, str) and line]
    if not isinstance(content, str | list):
        raise InvalidRequest(f"{where} has no text", where)
    return "\n".join([*lines, *_texts(content, where)])


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{where}.role must be user or assistant", f"{where}.role")
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise InvalidRequest(f"{where}.content must be a text or blocks", f"{where}.content")
        elif role == "assistant":
            chat.append(_assistant(content, f"{where}.content"))
        else:
            chat.extend(_user(role, content, f"{where}.content"))
    return chat


def _has_begun(message: Mapping[str, Any]) -> bool:
    """Whether the answer has begun: the last message is the assistant's, and only text."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text"}]
    is_text = all(isinstance(b, Mapping) and b.get("type") == "text" for b in blocks)
    return message.get("role") == "assistant" and is_text and bool(content)


def _user(role: str, blocks: list[Any], where: str) -> Iterator[dict[str, Any]]:
    """Tool results become messages of their own; texts and images one message."""
    rest: list[tuple[str, Any]] = []
    for place, block in enumerate(blocks):
        here = f"{where}[{place}]"
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            call_id = str(block.get("tool_use_id") or "")
            yield {"role": "tool", "tool_call_id": call_id, "content": _result(block, here)}
        else:
            rest.append((here, block))
    content = _content(rest)
    if content:
        yield {"role": role, "content": content}


def _result(block: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    """What the model reads of a tool result."""
    inside = block.get("content") or ""
    if isinstance(inside, str):
        content: str | list[dict[str, Any]] = inside
    else:
        listed = inside if isinstance(inside, list) else ()
        content = _content([(f"{where}.content[{i}]", one) for i, one in enumerate(listed)])
    if not block.get("is_error"):
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error: "}, *content]


def _content(blocks: list[tuple[str, Any]]) -> str | list[dict[str, Any]]:
    """The blocks, each after its place, as a text, or as parts if some are images."""
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    for where, block in blocks:
        if not isinstance(block, Mapping) or block.get("type") != "image":
            texts.append(_text(block, where))
            continue
        if texts:
            parts.append({"type": "text", "text": "\n".join(texts)})
        texts = []
        parts.append(_image(block, where))
    if parts and texts:
        parts.append({"type": "text", "text": "\n".join(texts)})
    return parts or "\n".join(texts)


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An image block in OpenAI's form."""
    source = block.get("source")
    fields = source if isinstance(source, Mapping) else {}
    name, url = "url", fields.get("url")
    if fields.get("type") == "base64":
        name, url = "data", f"data:{fields.get('media_type')};base64,{fields.get('data')}"
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.source must be of type base64 or url", f"{where}.source")
    return image_part(url, f"{where}.source.{name}")


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    text: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            thinking.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            name, arguments = str(block.get("name") or ""), block.get("input")
            function = {"name": name, "arguments": json.dumps(arguments or {})}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            text.append(_text(block, f"{where}[{place}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(tools: Objects) -> Objects:
    """The client's own tools. Those that Anthropic defines have no schema here: they are left out,
    as in SGLang, and the client is told."""
    made = []
    for place, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if kind == "custom":
            made.append(_tool(tool))
        elif isinstance(kind, str) and _BUILT_IN.fullmatch(kind):
            note_warning(f"tools[{place}]: {kind} is left out: this server does not have it")
        else:
            where = f"tools[{place}].type"
            raise InvalidRequest(f"{where} {kind!r:.80}: this server runs no tools itself", where)
    return made


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": bool(tool.get("strict")),
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    fields: dict[str, Any] = {
        "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True
    }
    if kind == "tool":
        name = choice.get("name")
        return fields | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest(
            f"tool_choice.type must be auto, any, tool or none, not {kind!r:.60}",
            "tool_choice.type",
        )
    return fields | {"tool_choice": _CHOICES[kind]}


def _thinking(thinking: Mapping[str, Any] | None) -> bool | None:
    if thinking is None:
        return None
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled", "thinking.type")
    return bool(kind != "disabled")


def _output(body: CountRequest) -> dict[str, Any]:
    config = dict(body.output_config or {})
    fields: dict[str, Any] = {}
    effort = config.get("effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise InvalidRequest(
                f"output_config.effort must be one of {', '.join(_EFFORTS)}", "output_config.effort"
            )
        fields["chat_template_kwargs"] = {"reasoning_effort": effort}
    wanted, where = config.get("format"), "output_config.format"
    if not wanted:
        wanted, where = body.output_format, "output_format"
    if wanted is not None:
        if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
            raise InvalidRequest(f"{where}.type must be json_schema", where)
        schema = {"name": "output", "schema": wanted.get("schema")}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
