"""The events of one response, and the response that results from them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixlm.base.errors import RadixError
from radixlm.continuation.stream_journal import draw_hex, draw_time
from radixlm.entrypoints.http.errors import body_of
from radixlm.entrypoints.http.openai.conversation import ChatSession, Delta
from radixlm.entrypoints.http.openai.custom_tools import input_of
from radixlm.entrypoints.http.openai.logprobs import chat_logprobs
from radixlm.entrypoints.http.responses.client_tools import ClientTool, client_tools
from radixlm.entrypoints.http.responses.schemas import ResponsesRequest
from radixlm.entrypoints.http.responses.tool_servers import Outcome
from radixlm.entrypoints.http.responses.toolbox import Toolbox
from radixlm.intake.records import Output

Event = dict[str, Any]
_ARGUMENTS = {
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
    "mcp_call": "mcp_call_arguments",
}
_BEGUN = {"arguments": "", "status": "in_progress"}
_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}

_ID_BYTES = 16


@dataclass(slots=True)
class OutputItem:
    """The open output item."""

    kind: str
    key: int
    index: int
    value: dict[str, Any]
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Writer:
    """Turns deltas into events; ``response`` is the response so far."""

    def __init__(
        self,
        session: ChatSession,
        body: ResponsesRequest,
        instructions: str | None,
        toolbox: Toolbox | None = None,
    ) -> None:
        """``toolbox``: the tools whose calls the server runs."""
        self._session = session
        self._toolbox = toolbox or Toolbox()
        self._client_tools = {
            tool.function["function"].get("name"): tool for tool in client_tools(body.tools or ())
        }
        self._sequence = 0
        self._item: OutputItem | None = None
        self._space = ""
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text was held back
        self._reasoning = ""
        self._usage: dict[str, Any] | None = None
        self.waiting: list[OutputItem] = []  # calls that this server has to run
        self.num_client_calls = 0  # calls of this round that the client runs
        self.response = _response(session, body, instructions)

    def _event(self, kind: str, **values: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence} | values
        self._sequence += 1
        return event

    def _whole(self, kind: str) -> Event:
        return self._event(kind, response=dict(self.response, output=list(self.output)))

    @property
    def output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = self.response["output"]
        return output

    def begin(self) -> Iterator[Event]:
        """The events before the first delta."""
        yield self._whole("response.created")
        self.response["status"] = "in_progress"
        yield self._whole("response.in_progress")
        for listed in self._toolbox.lists:
            yield from self._list(listed)

    def _list(self, listed: dict[str, Any]) -> Iterator[Event]:
        """The events of the item that lists the tools of a server."""
        place = {"output_index": len(self.output), "item_id": listed["id"]}
        self.output.append(listed)
        added = listed | {"tools": []}
        yield self._event(
            "response.output_item.added", output_index=len(self.output) - 1, item=added
        )
        yield self._event("response.mcp_list_tools.in_progress", **place)
        yield self._event("response.mcp_list_tools.completed", **place)
        yield self._event(
            "response.output_item.done", output_index=len(self.output) - 1, item=listed
        )

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return int(self._usage["output_tokens"]) if self._usage else 0

    def next_round(self, session: ChatSession) -> None:
        """The model continues with the results of calls."""
        self._session, self.waiting, self.num_client_calls = session, [], 0

    def take(self, delta: Delta) -> Iterator[Event]:
        parsed = delta.parsed
        self._logprobs += self._logprobs_of(delta.output)
        if parsed.reasoning:
            self._logprobs = self._logprobs if parsed.text else []
            self._reasoning += parsed.reasoning
            yield from self._text("reasoning", parsed.reasoning, [])
        # what ends the open call stands before the text that came with it
        goes_on = [call for call in parsed.calls if self._has_open(call.index)]
        for call in goes_on:
            yield from self._call(call.index, call.name, call.call_id, call.arguments)
        text, self._space = self._space + parsed.text, ""
        if text and not text.strip() and self._item_kind() != "message":
            self._space = text  # it may only separate the reasoning from a call
        elif text:
            yield from self._message(text)
        for call in parsed.calls[len(goes_on) :]:
            self._space, self._logprobs = "", []
            yield from self._call(call.index, call.name, call.call_id, call.arguments)
        if delta.finish_reason is not None:
            self._space = ""
            if self._logprobs and self._item_kind() == "message":
                yield from self._message("")
            self._logprobs = []
            yield from self._close()
            self._count(delta.output)

    def _item_id(self, prefix: str) -> str:
        """The id of the next item; see ``response_of_item``."""
        suffix = str(self.response["id"]).removeprefix("resp_")
        return f"{prefix}_{suffix}{len(self.output):04x}"

    def _item_kind(self) -> str | None:
        return self._item.kind if self._item else None

    def _message(self, text: str) -> Iterator[Event]:
        logprobs, self._logprobs = self._logprobs, []
        return self._text("message", text, logprobs)

    def _logprobs_of(self, output: Output) -> list[dict[str, Any]]:
        body = self._session.body
        if not body.logprobs:
            return []
        tokenizer = self._session.state.require_tokenizer()
        return chat_logprobs(tokenizer, output.logprobs, body.top_logprobs or 0)

    # ---- items -----------------------------------------------------------------------------

    def _open(self, kind: str, key: int, value: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._item = OutputItem(kind, key, len(self.output), value)
        self.output.append(value)
        yield self._event(
            "response.output_item.added", output_index=self._item.index, item=dict(value)
        )

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._item_kind() != kind:
            prefix = "rs" if kind == "reasoning" else "msg"
            yield from self._open(kind, 0, _empty(kind, self._item_id(prefix)))
            yield self._part("added", _part(kind, "", []))
        item = self._item
        assert item is not None
        item.text += text
        item.logprobs += logprobs
        extra = {"logprobs": logprobs} if kind == "message" else {}
        yield self._event(
            f"response.{_text_name(kind)}.delta", **self._at(item), delta=text, **extra
        )

    def _at(self, item: OutputItem) -> dict[str, Any]:
        return _place(item) | {"content_index": 0}

    def _part(self, what: str, part: dict[str, Any]) -> Event:
        assert self._item is not None
        return self._event(f"response.content_part.{what}", **self._at(self._item), part=part)

    def _has_open(self, key: int) -> bool:
        item = self._item
        return item is not None and item.kind in _ARGUMENTS and item.key == key

    def _call(
        self, key: int, name: str | None, call_id: str | None, arguments: str
    ) -> Iterator[Event]:
        if not self._has_open(key):
            yield from self._open_call(key, name or "", call_id)
        item = self._item
        assert item is not None
        if arguments:
            item.text += arguments
            if item.kind != "custom_tool_call":  # its input is known when it is whole
                yield self._arguments(item, arguments)

    def _arguments(self, item: OutputItem, delta: str) -> Event:
        return self._event(f"response.{_ARGUMENTS[item.kind]}.delta", **_place(item), delta=delta)

    def _open_call(self, key: int, name: str, call_id: str | None) -> Iterator[Event]:
        bound = self._toolbox.tools.get(name)
        call_id = call_id or self._session.call_id(name, key)
        value: dict[str, Any]
        if bound is None:
            self.num_client_calls += 1
            tool = self._client_tools.get(name) or ClientTool(name, None, False, {})
            value = tool.call_item(self._item_id("ctc" if tool.is_custom else "fc"), call_id)
            yield from self._open(value["type"], key, value)
            return
        value = {"id": self._item_id("mcp"), "type": "mcp_call"}
        value |= {
            "server_label": bound.label,
            "name": name,
            "approval_request_id": None,
            "output": None,
            "error": None,
        }
        yield from self._open("mcp_call", key, value | _BEGUN)
        assert self._item is not None
        yield self._event("response.mcp_call.in_progress", **_place(self._item))

    def _close(self) -> Iterator[Event]:
        item, self._item = self._item, None
        if item is None:
            return
        if item.kind == "mcp_call":
            item.value["arguments"] = item.text
            yield self._event(
                "response.mcp_call_arguments.done", **_place(item), arguments=item.text
            )
            self.waiting.append(item)  # ``called`` ends it
            return
        item.value["status"] = "completed"
        if item.kind == "function_call":
            item.value["arguments"] = item.text
            yield self._event(
                "response.function_call_arguments.done",
                **_place(item),
                name=item.value["name"],
                arguments=item.text,
            )
        elif item.kind == "custom_tool_call":
            item.value["input"] = text = input_of(item.text)
            if text:
                yield self._arguments(item, text)
            yield self._event("response.custom_tool_call_input.done", **_place(item), input=text)
        else:
            part = _part(item.kind, item.text, item.logprobs)
            item.value["content"] = [part]
            extra = {"logprobs": item.logprobs} if item.kind == "message" else {}
            name = f"response.{_text_name(item.kind)}.done"
            yield self._event(name, **self._at(item), text=item.text, **extra)
            yield self._event("response.content_part.done", **self._at(item), part=part)
        yield self._event(
            "response.output_item.done", output_index=item.index, item=dict(item.value)
        )

    def called(self, item: OutputItem, outcome: Outcome | None) -> Iterator[Event]:
        """The events of a call that a tool server ran; ``outcome`` None: it was not made."""
        if outcome is None:
            item.value["status"] = "incomplete"
        elif outcome.is_error:
            error = {"type": "mcp_tool_execution_error", "content": outcome.text}
            item.value |= {"status": "failed", "error": error}
            yield self._event("response.mcp_call.failed", **_place(item))
        else:
            item.value |= {"status": "completed", "output": outcome.text}
            yield self._event("response.mcp_call.completed", **_place(item))
        yield self._event(
            "response.output_item.done", output_index=item.index, item=dict(item.value)
        )

    # ---- the end ---------------------------------------------------------------------------

    def end(self, reason: str) -> Iterator[Event]:
        for item in self.waiting:
            yield from self.called(item, None)
        status = _STATUS.get(reason, "incomplete")
        if status == "incomplete":
            why = "max_output_tokens" if reason == "length" else "content_filter"
            self.response["incomplete_details"] = {"reason": why}
            if self.output:
                self.output[-1]["status"] = "incomplete"
        self.response |= {
            "status": status,
            "usage": self._usage,
            "completed_at": int(time.time()) if status == "completed" else None,
        }
        yield self._whole(f"response.{status}")

    def _count(self, output: Output) -> None:
        """Add the usage of a round."""
        before = self._usage or {}
        num_input, num_output = output.prompt_tokens, output.completion_tokens
        cached = before.get("input_tokens_details", {}).get("cached_tokens", 0)
        num_input += before.get("input_tokens", 0)
        num_output += before.get("output_tokens", 0)
        self._usage = {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": cached + output.cached_tokens,
                "cache_write_tokens": 0,  # openai 3.57 requires it; writes are not told apart
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._session.count(self._reasoning)},
            "total_tokens": num_input + num_output,
            # the names of SGLang's clients
            "prompt_tokens": num_input,
            "completion_tokens": num_output,
        }

    def fail(self, error: RadixError | None) -> Event:
        message = body_of(error)["error"]["message"] if error else "internal error"
        code = "server_error"
        if error is not None and int(getattr(error, "status", 500)) < 500:
            code = "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return self._whole("response.failed")

    def cancel(self) -> None:
        """The response was cancelled."""
        for item in self.output:
            if item.get("status") == "in_progress":
                item["status"] = "incomplete"
        self.response["status"] = "cancelled"


def _place(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.value["id"], "output_index": item.index}


def response_of_item(item_id: str) -> str:
    """The id of the response that an item belongs to; the item's id contains it."""
    return "resp_" + item_id.partition("_")[2][: 2 * _ID_BYTES]


def _text_name(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _empty(kind: str, item_id: str) -> dict[str, Any]:
    if kind == "reasoning":
        shown = {"id": item_id, "type": "reasoning", "summary": [], "content": []}
        return shown | {"status": "in_progress"}
    shown = {"id": item_id, "type": "message", "role": "assistant", "content": []}
    return shown | {"status": "in_progress"}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _response(
    session: ChatSession, body: ResponsesRequest, instructions: str | None
) -> dict[str, Any]:
    """The response before the first output."""
    sampling = session.request.sampling
    reasoning = {"effort": None, "summary": None} | (body.reasoning or {})
    return {
        "id": f"resp_{draw_hex(_ID_BYTES)}",
        "object": "response",
        "created_at": draw_time(),
        "completed_at": None,
        "conversation": {"id": body.conversation} if body.conversation else None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": session.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}} | (body.text or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
