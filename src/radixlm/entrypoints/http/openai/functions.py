"""OpenAI's older form of tools: ``functions``, ``function_call`` and the finish reason
``function_call``. Requests are read as those with tools, and answers written in the older form."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai.protocol import ChatRequest

_OF_TOOLS = re.compile(r"\btools(\[\d+\])?(\.function\b)?")


def read_functions(body: ChatRequest) -> None:
    """Set the tools and the tool choice that the older fields stand for."""
    choice = body.function_call
    if body.functions is None:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("function_call needs functions", "function_call")
        return
    if body.tools or body.tool_choice is not None:
        raise InvalidRequest("functions: send either functions or tools", "functions")
    if isinstance(choice, str) and choice not in ("none", "auto"):
        text = 'function_call must be "none", "auto" or {"name": a function}'
        raise InvalidRequest(text, "function_call")
    body.tools = [{"type": "function", "function": function} for function in body.functions]
    is_named = isinstance(choice, Mapping)
    body.tool_choice = {"type": "function", "function": choice} if is_named else choice
    body.parallel_tool_calls = False  # there is room for one


@contextmanager
def in_words_of(body: ChatRequest) -> Iterator[None]:
    """Errors about tools name the older fields where the client has sent those."""
    try:
        yield
    except InvalidRequest as error:
        if body.functions is None:
            raise
        message = _OF_TOOLS.sub(r"functions\1", error.message)
        message = message.replace("tool_choice", "function_call")
        param = _OF_TOOLS.sub(r"functions\1", error.param or "") or None
        param = "function_call" if param and param.startswith("tool_choice") else param
        raise InvalidRequest(message, param) from None


def in_older_form(body: ChatRequest, message: dict[str, Any]) -> dict[str, Any]:
    """``message``, or the delta of one, with ``function_call`` in the place of its tool call, where
    the client has sent ``functions``."""
    if body.functions is None:
        return message
    calls = message.get("tool_calls") or [{}]
    return {**message, "tool_calls": None, "function_call": calls[0].get("function")}


def reason_of(body: ChatRequest, reason: str | None) -> str | None:
    """The finish reason under its older name, where the client has sent ``functions``."""
    is_older = reason == "tool_calls" and body.functions is not None
    return "function_call" if is_older else reason
