"""Tools that the client runs: functions, custom tools (their input is a text, not JSON), and
namespaces of both. The model reads each of them as a function of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai.custom_tools import arguments_of, custom_function
from radixlm.entrypoints.http.responses.toolbox import is_left_out, is_remote

_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ClientTool:
    """One tool. ``function``: the form in which the model reads it."""

    name: str
    namespace: str | None
    is_custom: bool
    function: dict[str, Any]

    def call_item(self, item_id: str, call_id: str) -> dict[str, Any]:
        """The output item of a call that has begun."""
        kind = "custom_tool_call" if self.is_custom else "function_call"
        item = {"id": item_id, "type": kind, "call_id": call_id, "name": self.name}
        item |= {"namespace": self.namespace} if self.namespace else {}
        return item | {"input" if self.is_custom else "arguments": "", "status": "in_progress"}


def additional_tools(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools in input items of that type, which join those of the request."""
    tools: list[Mapping[str, Any]] = []
    for place, item in enumerate(items):
        if item.get("type") == "additional_tools":
            tools += _listed(item.get("tools"), f"input[{place}].tools")
    return tools


def _listed(tools: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest(f"{where} must be a list of tools", where)
    return tools


def client_tools(tools: Sequence[Mapping[str, Any]]) -> list[ClientTool]:
    """The tools of a request that the client runs; InvalidRequest for a type that is unknown."""
    made: list[ClientTool] = []
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if tool.get("type") == "namespace":
            made += _namespace(tool, where)
        elif not is_remote(tool) and not is_left_out(tool):
            made.append(_client_tool(tool, where, None))
    return made


def _namespace(tool: Mapping[str, Any], where: str) -> Iterator[ClientTool]:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name is required", f"{where}.name")
    for place, one in enumerate(_listed(tool.get("tools"), f"{where}.tools")):
        yield _client_tool(one, f"{where}.tools[{place}]", name)


def _client_tool(tool: Mapping[str, Any], where: str, namespace: str | None) -> ClientTool:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        raise InvalidRequest(
            f"{where}.type {kind!r:.80}: must be function, custom or namespace, or a tool of a "
            "tool server (--tool-server): mcp, web_search, code_interpreter",
            f"{where}.type",
        )
    if kind == "custom":
        function = custom_function(tool, where)
    else:
        function = {field: tool[field] for field in _FIELDS if tool.get(field) is not None}
    if isinstance(name, str):
        function["name"] = model_name(name, namespace)
    chat_tool = {"type": "function", "function": function}
    return ClientTool(str(name), namespace, kind == "custom", chat_tool)


def model_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a tool."""
    return f"{namespace}__{name}" if namespace else name


def call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """An input item of a call as the model wrote it: a call of a chat."""
    arguments = item.get("arguments") or "{}"
    if item.get("type") == "custom_tool_call":
        arguments = arguments_of(item)
    name, namespace = item.get("name"), item.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = model_name(name, namespace)
    return {
        "id": str(item.get("call_id") or item.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
