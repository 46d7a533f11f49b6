"""Clients of MCP (Model Context Protocol) tool servers, which --tool-server lists.

A request names one of them; it cannot give an address.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from radixlm.base.errors import ConfigError, RequestError
from radixlm.base.lazy import require

log = logging.getLogger(__name__)

CONNECT_S = 10.0
CALL_S = 120.0
MAX_TOOLS = 512
MAX_RESULT_CHARS = 200_000


class ToolServerError(RequestError):
    """A tool server failed or did not answer."""

    status = 424
    code = "tool_server_error"


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """A function of a tool server. ``schema``: the JSON schema of its arguments."""

    label: str
    name: str
    description: str | None
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call, as text for the model."""

    text: str
    is_error: bool = False


class Connection(Protocol):
    """A session with one server, for one response."""

    tools: list[RemoteTool]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Outcome: ...

    async def close(self) -> None: ...


class ToolServer(Protocol):
    """A server of --tool-server."""

    label: str
    url: str

    async def connect(self) -> Connection:
        """Open a session and list the tools; ToolServerError."""


class McpServer:
    """A server at an address: streamable HTTP, or server-sent events where the path is /sse."""

    def __init__(self, label: str, url: str) -> None:
        self.label, self.url = label, url
        self._mcp = require("mcp", "mcp", "--tool-server")

    async def connect(self) -> Connection:
        session = McpSession(self.label, self._transport(), self._mcp)
        try:
            await session.open()
        except BaseException:
            await session.close()
            raise
        return session

    def _transport(self) -> Any:
        if urlsplit(self.url).path.rstrip("/").endswith("/sse"):
            return require("mcp.client.sse", "mcp", "--tool-server").sse_client(self.url)
        return self.url


class McpSession:
    """A session in a task of its own: the task that enters it must also leave it."""

    def __init__(self, label: str, transport: Any, mcp: Any) -> None:
        self.label, self.tools = label, list[RemoteTool]()
        self._client = mcp.Client(transport, read_timeout_seconds=CALL_S)
        self._failure = mcp.MCPError
        self._leave = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._client as client:
                await self._list(client)
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._leave.wait()
        except Exception as error:  # any failure of the tool server or the network
            if self._ready.done():
                log.warning("tool server %s: the session ended: %s", self.label, _reason(error))
            else:
                self._ready.set_exception(
                    ToolServerError(f"tool server {self.label!r}: {_reason(error)}", "tools")
                )

    async def _list(self, client: Any) -> None:
        cursor = None
        while len(self.tools) < MAX_TOOLS:
            page = await client.list_tools(cursor=cursor)
            self.tools += [
                RemoteTool(self.label, tool.name, tool.description, dict(tool.input_schema))
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                return

    async def open(self) -> None:
        """Wait for the list of tools."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise ToolServerError(
                f"tool server {self.label!r}: no answer within {CONNECT_S:g} s", "tools"
            ) from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Outcome:
        """Call a tool. An error is an outcome too, which the model reads."""
        try:
            async with asyncio.timeout(CALL_S):
                result = await self._client.call_tool(name, dict(arguments))
        except TimeoutError:
            return Outcome(f"no answer within {CALL_S:g} s", True)
        except (self._failure, OSError, RuntimeError) as error:
            return Outcome(_reason(error), True)
        texts = [_text(part) for part in result.content]
        return Outcome("\n".join(texts)[:MAX_RESULT_CHARS], bool(result.is_error))

    async def close(self) -> None:
        """Close the session; one that hangs is cancelled."""
        self._leave.set()
        if not self._ready.done():
            self._task.cancel()
            self._ready.cancel()
        with suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await self._task


def _text(part: Any) -> str:
    """A part of a result as text; other parts as JSON."""
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else json.dumps(part.model_dump(mode="json"))


def _reason(error: BaseException) -> str:
    """The innermost reason of an error, which task groups wrap."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]


def addresses(option: str) -> list[tuple[str, str]]:
    """(label, URL) of a --tool-server list: ``[label=]URL`` or ``host:port``, with commas."""
    servers: list[tuple[str, str]] = []
    for entry in (part.strip() for part in option.split(",")):
        label, separator, url = entry.partition("=")
        if not separator or "/" in label or ":" in label:
            label, url = "", entry
        if "://" not in url:
            url = f"http://{url.rstrip('/')}"
            url += "" if urlsplit(url).path else "/sse"  # as the reference reads host:port
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--tool-server {entry!r}: must be demo, host:port or [label=]http://host/path"
            )
        servers.append((label or parts.netloc, url))
    labels = [label for label, _ in servers]
    if len(set(labels)) != len(labels):
        raise ConfigError("--tool-server: two servers have one label; write label=URL")
    return servers
