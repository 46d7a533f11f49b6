"""Custom tools, whose input is a text and not JSON: the model reads each as a function of one text,
and writes calls of that function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.text.lark import regex_of
from radixlm.text.tools.schema import load_json
from radixlm.wire.unknown import note_warning

_INPUT = "input"  # the only argument of the function


def custom_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The function for a tool ``{"name", "description", "format"}``; ``where`` names it in errors.
    A grammar constrains the text if it has an expression."""
    format_ = tool.get("format") or {}
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{where}.name is required", f"{where}.name")
    if not isinstance(format_, Mapping):
        raise InvalidRequest(f"{where}.format must be an object", f"{where}.format")
    described = str(tool.get("description") or "")
    text, is_held = {"type": "string"}, False
    if format_.get("type") == "grammar":
        grammar = format_.get("grammar", format_)  # in a chat it has a name of its own
        syntax, definition = _grammar(grammar, f"{where}.format")
        described += f"\n\nThe input follows this grammar ({syntax}):\n{definition}"
        regex = _regex(syntax, definition, f"{where}.format")
        if regex is not None:
            text, is_held = {"type": "string", "pattern": f"^(?:{regex})$"}, True
        else:
            note_warning(f"{where}.format: the model reads the grammar, but is not held to it")
    parameters = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    made = {"description": described.strip(), "parameters": parameters, "strict": is_held}
    return {"name": tool["name"]} | made


def _regex(syntax: Any, definition: str, where: str) -> str | None:
    """An expression of the inputs that the grammar allows, None if there is none."""
    if syntax != "lark":
        return definition if syntax == "regex" else None
    found = regex_of(definition)
    if found is not None and found.depth:
        note_warning(f"{where}: rules of the grammar nest {found.depth} deep at most")
    return found.expression if found is not None else None


def _grammar(grammar: Any, where: str) -> tuple[Any, str]:
    """The syntax and the definition."""
    definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
    if not isinstance(definition, str):
        field = f"{where}.definition"
        raise InvalidRequest(f"{field} must be a text, the grammar", field)
    return grammar.get("syntax"), definition


def input_of(arguments: str) -> str:
    """The input of a call, from the arguments that the model wrote."""
    values = load_json(arguments)
    text = values.get(_INPUT) if isinstance(values, dict) else None
    return text if isinstance(text, str) else arguments


def arguments_of(call: Mapping[str, Any]) -> str:
    """The arguments of the function, of a call with an ``input``."""
    return json.dumps({_INPUT: call.get("input") or ""}, ensure_ascii=False)


def read_custom_tools(body: ChatRequest) -> frozenset[str]:
    """Set the functions that custom tools of a chat stand for, in the tools, the tool choice and
    the calls of messages. Returns the names of the tools."""
    names: set[str] = set()
    for place, tool in enumerate(body.tools or ()):
        if tool.get("type") == "custom":
            where = f"tools[{place}].custom"
            function = custom_function(_inside(tool, where), where)
            body.tools[place] = {"type": "function", "function": function}  # type: ignore[index]
            names.add(function["name"])
    choice = body.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "custom":
        named = {"name": _inside(choice, "tool_choice.custom").get("name")}
        body.tool_choice = {"type": "function", "function": named}
    body.messages = [_read_calls(one, place) for place, one in enumerate(body.messages)]
    return frozenset(names)


def _inside(holder: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``custom`` of a tool, a choice or a call; these fields may stand outside, too."""
    found = holder.get("custom", holder)
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"{where} must be an object", where)
    return found


def _read_calls(message: dict[str, Any], place: int) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    read: list[Any] = []
    for number, call in enumerate(calls):
        if isinstance(call, Mapping) and call.get("type") == "custom":
            custom = _inside(call, f"messages[{place}].tool_calls[{number}].custom")
            function = {"name": custom.get("name"), "arguments": arguments_of(custom)}
            call = {"id": call.get("id"), "type": "function", "function": function}
        read.append(call)
    return message | {"tool_calls": read}


class CustomCalls:
    """The custom calls of a stream's choice, whose inputs are known when they are whole."""

    def __init__(self, names: frozenset[str]) -> None:
        """``names``: of the custom tools."""
        self._names = names
        self._arguments: dict[int, str] = {}  # by the index of the call

    def take(self, index: int, name: str | None, arguments: str) -> bool:
        """Whether this part belongs to a custom call; its arguments are kept then."""
        if index not in self._arguments:
            if name not in self._names:
                return False
            self._arguments[index] = ""
        self._arguments[index] += arguments
        return True

    def inputs(self) -> list[tuple[int, str]]:
        """(index, input) of each call, at the end of the message."""
        return [(index, input_of(text)) for index, text in self._arguments.items()]
