"""The tools of one response that the server runs: their list and their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.continuation.stream_journal import current_journal, draw_hex
from radixlm.entrypoints.http.responses.demo_tools import demo_servers
from radixlm.entrypoints.http.responses.tool_servers import (
    Connection,
    McpServer,
    Outcome,
    RemoteTool,
    ToolServer,
    addresses,
)
from radixlm.wire.unknown import note_warning

# OpenAI's built-in tools -> the label of the server that runs them, as in the reference
_BUILT_IN = {
    "web_search_preview": "browser",
    "web_search_preview_2025_03_11": "browser",
    "web_search": "browser",
    "web_search_2025_08_26": "browser",
    "code_interpreter": "python",
}
# OpenAI's other tools, which clients such as Codex offer to every server
_LEFT_OUT = frozenset(
    "apply_patch computer computer_use_preview file_search image_generation local_shell shell "
    "tool_search".split()
)
NEEDS = "start with --tool-server"


class ToolServers:
    """The tool servers of --tool-server."""

    def __init__(self, servers: Sequence[ToolServer] = ()) -> None:
        self.servers = list(servers)

    def has(self, label: str | None) -> bool:
        return any(server.label == label for server in self.servers)

    def choose(self, tool: Mapping[str, Any], where: str) -> ToolServer:
        """The server that a tool of a request means; InvalidRequest."""
        label, url = tool.get("server_label"), tool.get("server_url")
        param = f"{where}.server_label"
        if _label_of_built_in(tool) is not None:
            label, url, param = _label_of_built_in(tool), None, f"{where}.type"
        for server in self.servers:
            if server.url == url or (url is None and server.label == label):
                return server
        known = ", ".join(server.label for server in self.servers) or "none"
        raise InvalidRequest(
            f"{param}: this server has no tool server {url or label!r:.120} ({NEEDS}); "
            f"it has {known}",
            param,
        )


def servers_of(option: str | None) -> ToolServers:
    """The tool servers of --tool-server; ConfigError."""
    if not option:
        return ToolServers()
    if option.strip() == "demo":
        return ToolServers(demo_servers())
    return ToolServers([McpServer(label, url) for label, url in addresses(option)])


def _label_of_built_in(tool: Mapping[str, Any]) -> str | None:
    kind = tool.get("type")
    return _BUILT_IN.get(kind) if isinstance(kind, str) else None


def is_remote(tool: Mapping[str, Any]) -> bool:
    """Whether a request's tool is run by a server rather than by the client."""
    return tool.get("type") == "mcp" or _label_of_built_in(tool) is not None


def is_left_out(tool: Mapping[str, Any]) -> bool:
    """Whether a request's tool is one that no server of this kind has; the model does not learn
    of it, as in SGLang."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind in _LEFT_OUT


def check_choice(choice: Any, servers: ToolServers) -> None:
    """InvalidRequest for a ``tool_choice`` that is a tool of OpenAI which no server here runs."""
    if isinstance(choice, Mapping) and _label_of_built_in(choice) is not None:
        servers.choose(choice, "tool_choice")


@dataclass(frozen=True, slots=True)
class Bound:
    """A tool, the session that runs it, and the label that the request gave its server."""

    label: str
    tool: RemoteTool
    connection: Connection


class Toolbox:
    """Open sessions and, by the name that the model reads, the tools in them."""

    def __init__(self) -> None:
        self.tools: dict[str, Bound] = {}
        self.lists: list[dict[str, Any]] = []
        self._connections: dict[str, Connection] = {}
        self.num_calls = 0

    @classmethod
    async def open(cls, servers: ToolServers, tools: Sequence[Mapping[str, Any]]) -> Toolbox:
        """Connect to the servers that the request names; ToolServerError, InvalidRequest. OpenAI's
        tools that no server has are left out, and the client is told."""
        box = cls()
        names = {tool["name"] for tool in tools if isinstance(tool.get("name"), str)}
        try:
            for place, tool in enumerate(tools):
                label = _label_of_built_in(tool)
                if is_left_out(tool) or (label is not None and not servers.has(label)):
                    kind = tool["type"]
                    note_warning(f"tools[{place}]: {kind} is left out: this server has none")
                elif is_remote(tool):
                    await box._add(servers, tool, f"tools[{place}]", names)
        except BaseException:
            await box.close()
            raise
        return box

    async def _add(
        self, servers: ToolServers, tool: Mapping[str, Any], where: str, names: set[str]
    ) -> None:
        if tool.get("type") == "mcp" and tool.get("require_approval") not in (None, "never"):
            raise InvalidRequest(
                f"{where}.require_approval must be 'never': the operator chose the servers",
                f"{where}.require_approval",
            )
        server = servers.choose(tool, where)
        if server.url in self._connections:
            raise InvalidRequest(f"{where}: this server is listed twice", where)
        connection = self._connections[server.url] = await server.connect()
        label = str(tool.get("server_label") or server.label)
        allowed = _allowed(tool.get("allowed_tools"), f"{where}.allowed_tools")
        shown = [t for t in connection.tools if allowed is None or t.name in allowed]
        for one in shown:
            name = one.name if one.name not in names else f"{label}__{one.name}"
            names.add(name)
            self.tools[name] = Bound(label, one, connection)
        self.lists.append(_listed(label, shown))

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools as functions of a chat."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": bound.tool.description or "",
                    "parameters": bound.tool.schema,
                },
            }
            for name, bound in self.tools.items()
        ]

    async def call(self, name: str, arguments: str) -> Outcome:
        """Run a tool call, unless the server on which this call began has run it."""
        self.num_calls += 1
        if (journal := current_journal()) is None:
            return await self._run(name, arguments)

        async def run() -> tuple[str, bool]:
            outcome = await self._run(name, arguments)
            return outcome.text, outcome.is_error

        return Outcome(*await journal.call(run))

    async def _run(self, name: str, arguments: str) -> Outcome:
        bound = self.tools[name]
        try:
            values = json.loads(arguments or "{}")
        except ValueError:
            return Outcome("the arguments are not valid JSON", True)
        if not isinstance(values, dict):
            return Outcome("the arguments must be a JSON object", True)
        return await bound.connection.call(bound.tool.name, values)

    async def close(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()


def _allowed(allowed: Any, where: str) -> set[str] | None:
    if allowed is None:
        return None
    names = allowed.get("tool_names") if isinstance(allowed, Mapping) else allowed
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"{where} must be a list of names", where)
    return set(names)


def _listed(label: str, tools: Sequence[RemoteTool]) -> dict[str, Any]:
    """The output item that lists the tools of a server."""
    shown = [
        {
            "name": t.name,
            "description": t.description,
            "input_schema": t.schema,
            "annotations": None,
        }
        for t in tools
    ]
    item_id = f"mcpl_{draw_hex(16)}"
    return {"id": item_id, "type": "mcp_list_tools", "server_label": label, "tools": shown}
