"""The grammar for a tool choice.

``required`` and a named function are enforced. Hermes-like formats, whose tags are plain text, use
the format itself; all others use a JSON array that the "json" parser reads, because a grammar over
text cannot produce their special tokens. ``auto`` constrains only the arguments of functions marked
strict, by structural tags.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.text.held_schema import hold, unheld_keywords
from radixlm.text.json_schema import close_objects
from radixlm.text.property_names import without_property_names
from radixlm.text.tools.base import ToolSpec
from radixlm.text.tools.table import FORMATS

_HERMES_LIKE = "hermes:"
_NOT_SCHEMAS = frozenset(("const", "enum", "default", "examples", "example"))
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_ALL_KINDS = frozenset(("lark", "json_schema", "structural_tag"))
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


def constraint(
    name: str,
    tools: Sequence[ToolSpec],
    choice: str | Mapping[str, Any],
    parallel: bool = True,
    kinds: Collection[str] = _ALL_KINDS,
    strict_level: int = 0,
) -> dict[str, Any] | None:
    """The grammar for a tool choice in the format ``name``; None if nothing is constrained.

    ``kinds``: grammars that the backend supports; "json_schema" always is. ``strict_level``: see
    ``base.env.TOOL_STRICT_LEVEL``.

    ``choice``: "none", "auto", "required" or ``{"type": "function", "function": {"name": ...}}``.
    Returns ``kind`` ("lark", "json_schema" or "structural_tag") and its ``value``; ``parser``,
    the parser for the message; ``prefix``, the text that each constrained message begins with;
    ``is_forced``, whether the message contains calls only. A grammar starts after the reasoning.
    InvalidRequest for ``required`` without tools and for an unknown function.
    """
    if choice == "none":
        return None
    if choice == "auto":
        return _strict_tags(name, tools, strict_level) if "structural_tag" in kinds else None
    chosen = _chosen(tools, choice)
    is_single = not parallel or not isinstance(choice, str)
    if FORMATS[name].target.startswith(_HERMES_LIKE) and "lark" in kinds:
        value = _hermes_grammar(chosen, is_single)
        return _result("lark", value, name, prefix="<tool_call>\n")
    schema = json.dumps(call_array_schema(chosen, is_single), ensure_ascii=False)
    return _result("json_schema", schema, "json", prefix="[")


def call_array_schema(tools: Sequence[ToolSpec], is_single: bool) -> dict[str, Any]:
    """JSON schema of an array of ``{"name", "parameters"}``, one of ``tools`` each."""
    definitions = {f"tool{i}": hoist(_arguments(t), f"tool{i}") for i, t in enumerate(tools)}
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"$ref": f"#/$defs/tool{i}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    items = options[0] if len(options) == 1 else {"anyOf": options}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if is_single:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions}


def hoist(schema: Any, name: str) -> Any:
    """``schema`` for the position ``#/$defs/{name}``, with its internal references adjusted."""
    if isinstance(schema, list):
        return [hoist(item, name) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            result[key] = {member: hoist(inside, name) for member, inside in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            result[key] = f"#/$defs/{name}{value[1:]}"
        elif key not in ("$schema", "$id"):
            result[key] = value if key in _NOT_SCHEMAS else hoist(value, name)
    return result


def _chosen(tools: Sequence[ToolSpec], choice: str | Mapping[str, Any]) -> Sequence[ToolSpec]:
    if isinstance(choice, str):
        if choice != "required":
            raise InvalidRequest(
                f"tool_choice {choice!r} is none of: none, auto, required, a function",
                param="tool_choice",
            )
        if not tools:
            raise InvalidRequest("tool_choice required needs tools", param="tools")
        return tools
    function = choice.get("function") or choice
    wanted_name = function.get("name") if isinstance(function, Mapping) else None
    chosen = [tool for tool in tools if tool.name == wanted_name]
    if not chosen:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidRequest(
            f"tool_choice: Tool {wanted_name!r} not found in tools list: {known}",
            param="tool_choice",
        )
    return chosen[:1]


def _hermes_grammar(tools: Sequence[ToolSpec], is_single: bool) -> str:
    calls = " | ".join(f"call{i}" for i in range(len(tools)))
    lines = [f"start: call{'' if is_single else ' (NEXT call)*'}", f"call: {calls}", 'NEXT: "\\n"']
    for i, tool in enumerate(tools):
        head = '<tool_call>\n{"name": ' + json.dumps(tool.name) + ', "arguments": '
        arguments = _arguments(tool)
        if not tool.strict and unheld_keywords(arguments):
            arguments["x-guidance"] = {"lenient": True}  # the request is told what is left out
        schema = json.dumps(arguments)
        lines.append(f"call{i}: {_quoted(head)} args{i} {_quoted('}' + chr(10) + '</tool_call>')}")
        lines.append(f"args{i}: %json {schema}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A string literal of the grammar, with JSON escapes."""
    return json.dumps(text)


def _strict_tags(name: str, tools: Sequence[ToolSpec], level: int) -> dict[str, Any] | None:
    structure = FORMATS[name].structure
    if structure is None or not (level or any(tool.strict for tool in tools)):
        return None
    structures = [
        {
            "begin": structure.begin.format(name=json.dumps(tool.name)[1:-1]),
            "schema": _arguments(tool) if tool.strict or level == 2 else _ANY_ARGUMENTS,
            "end": structure.end,
        }
        for tool in tools
    ]
    value = {"type": "structural_tag", "structures": structures, "triggers": [structure.trigger]}
    text = json.dumps(value, ensure_ascii=False)
    return _result("structural_tag", text, name, is_forced=False)


def _arguments(tool: ToolSpec) -> dict[str, Any]:
    """The schema of a call's arguments, which may not contain undeclared ones by default."""
    schema = {**(tool.parameters or {"properties": {}})}
    if "$ref" not in schema:
        schema.setdefault("type", "object")
    return dict(without_property_names(close_objects(hold(schema))))


def _result(
    kind: str, value: str, parser: str, prefix: str = "", is_forced: bool = True
) -> dict[str, Any]:
    return {
        "kind": kind,
        "value": value,
        "parser": parser,
        "prefix": prefix,
        "is_forced": is_forced,
    }
