"""Tools: Python functions that the model calls before it answers (``tool_loop``)."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pydantic

from radixlm.base.lazy import load
from radixlm.lang.budget import ProgramError
from radixlm.lang.executor import StreamExecutor
from radixlm.lang.ir import SglGen, SglToolLoop
from radixlm.lang.model_template import ModelTemplate
from radixlm.lang.trace import CallRecord
from radixlm.text.tools.base import ParsedCall, parse_all, tool_specs
from radixlm.text.tools.registry import call_id, create, detect, keep_special_tokens

if TYPE_CHECKING:
    from radixlm.lang.ir import SglSamplingParams

_SIDE_BY_SIDE = 32  # functions of one round
_SHOWN = 2000  # characters of an error that the model reads


class Tool:
    """A function with type hints: its name, its docstring and its arguments as a JSON schema."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """TypeError for a function whose arguments have no names."""
        self.function, self.name = function, function.__name__
        hints = typing.get_type_hints(function)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"{self.name}: a tool names its arguments, not *{name}")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
        forbid = pydantic.ConfigDict(extra="forbid")
        self._arguments = pydantic.create_model(self.name, __config__=forbid, **fields)
        schema = self._arguments.model_json_schema()
        for name in ("title", "additionalProperties"):
            schema.pop(name, None)
        described = inspect.getdoc(function) or ""
        self.spec = {
            "type": "function",
            "function": {"name": self.name, "description": described, "parameters": schema},
        }

    def call(self, arguments: str) -> Any:
        """What the function returns. ValueError for arguments that it does not take."""
        read = self._arguments.model_validate_json(arguments or "{}")
        return self.function(**{name: getattr(read, name) for name in type(read).model_fields})


def run_tools(
    s: StreamExecutor, expr: SglToolLoop, params: SglSamplingParams
) -> tuple[str, dict[str, Any]]:
    """The model's answer after at most ``max_rounds`` rounds of calls, and its meta_info, which has
    ``tool_calls`` too: name, arguments and result of each."""
    template = s.chat_template
    if not isinstance(template, ModelTemplate):
        raise ProgramError(
            "tool_loop needs a model with a chat template of its own, on an Engine or a server of "
            "RadixLM"
        )
    rendered, tools = template.rendered, {tool.name: tool for tool in map(Tool, expr.tools)}
    specs = [tool.spec for tool in tools.values()]
    format_name = expr.parser or detect(rendered.source)
    if format_name is None:
        raise ProgramError("the chat template has no known form of tool calls: parser='qwen' ...")
    more = params.clone()
    more.skip_special_tokens = not keep_special_tokens(format_name)
    messages: list[dict[str, Any]] = [dict(message) for message in s.messages_]
    done: list[dict[str, Any]] = []
    for number in range(expr.max_rounds + 1):
        offered = specs if number < expr.max_rounds else None
        prompt = rendered.render(messages, tools=offered).removeprefix(template.bos)
        answer, meta = _ask(s, prompt, more)
        text, calls = parse_all(create(format_name, tool_specs(specs)), answer)
        if not calls or offered is None:
            return text, {**(meta or {}), "tool_calls": done}
        ids = [c.call_id or call_id(format_name, c.name, len(done) + c.index) for c in calls]
        messages.append(_said(text, calls, ids))
        for call, own_id, result in zip(calls, ids, _results(s, tools, calls), strict=True):
            done.append({"name": call.name, "arguments": call.arguments, "result": result})
            messages.append(
                {"role": "tool", "tool_call_id": own_id, "name": call.name, "content": result}
            )
    raise AssertionError


def _ask(s: StreamExecutor, prompt: str, params: SglSamplingParams) -> tuple[str, Any]:
    """One answer, as a state of its own in the trace."""
    child = StreamExecutor(s.backend, s.arguments, params, s.chat_template, parent=s)
    child.text_, child.images_ = prompt, list(s.images_)
    try:
        child.submit(SglGen("answer"))
        return child.get_var("answer"), child.get_meta_info("answer")
    finally:
        child.end()


def _said(text: str, calls: Sequence[ParsedCall], ids: Sequence[str]) -> dict[str, Any]:
    functions = ({"name": call.name, "arguments": call.arguments} for call in calls)
    asked = [
        {"id": own_id, "type": "function", "function": function}
        for own_id, function in zip(ids, functions, strict=True)
    ]
    return {"role": "assistant", "content": text, "tool_calls": asked}


def _results(s: StreamExecutor, tools: dict[str, Tool], calls: Sequence[ParsedCall]) -> list[str]:
    """What the functions of one round return, as text, run side by side. A failure is a text too:
    the model may try again."""

    def one(call: ParsedCall) -> str:
        record = CallRecord(s.sid, "tool", call.name, len(s.text_))
        s.calls.append(record)
        try:
            if call.name not in tools:
                raise KeyError(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
            found = tools[call.name].call(call.arguments)
            if inspect.iscoroutine(found):
                found = load("asyncio:run")(found)
            record.value = found if isinstance(found, str) else json.dumps(found, default=str)
        except Exception as error:
            record.end(error)
            return f"Error: {type(error).__name__}: {error}"[:_SHOWN]
        record.end()
        return str(record.value)

    pool = ThreadPoolExecutor(min(len(calls), _SIDE_BY_SIDE), thread_name_prefix="tool")
    try:
        left_s = s.budget.left_s() if s.budget is not None else None
        return list(pool.map(one, calls, timeout=left_s))
    except TimeoutError:
        raise ProgramError("the program's time (timeout_s) is over amid a tool") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
