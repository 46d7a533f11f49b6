"""``--tool-server demo``: Python in a container without network, and search by Exa's service.

Python needs a ``docker`` program, search needs EXA_API_KEY.
"""

import asyncio
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.entrypoints.http.responses.tool_servers import (
    MAX_RESULT_CHARS,
    Connection,
    Outcome,
    RemoteTool,
    ToolServer,
)

PYTHON_S = 60.0
SEARCH_S = 20.0
NUM_RESULTS = 5
IMAGE = "python:3.11-slim"
EXA_URL = "https://api.exa.ai/search"
_DOCKER = (
    "docker run --rm -i --network none --memory 512m --cpus 1 --pids-limit 64 --read-only "
    "--tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --user 65534:65534"
).split()


def _schema(name: str, description: str) -> dict[str, Any]:
    field = {"type": "string", "description": description}
    return {"type": "object", "properties": {name: field}, "required": [name]}


class PythonServer:
    """Runs each program in a new container."""

    label, url = "python", "demo:python"
    tools = (
        RemoteTool("python", "python", "Run Python code; what it prints is the result.",
                   _schema("code", "The program")),
    )  # fmt: skip

    async def connect(self) -> Connection:
        return _LocalConnection(self)

    async def call(self, arguments: Mapping[str, Any]) -> Outcome:
        command = [*_DOCKER, IMAGE, "python3", "-"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(PYTHON_S):
                out, _ = await process.communicate(str(arguments["code"]).encode())
        except TimeoutError:
            return Outcome(f"the program ran longer than {PYTHON_S:g} s", True)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        return Outcome(out.decode(errors="replace")[:MAX_RESULT_CHARS], process.returncode != 0)


class SearchServer:
    """Searches with Exa's service."""

    label, url = "browser", "demo:browser"
    tools = (
        RemoteTool("browser", "search", "Search the web; the best pages with their texts.",
                   _schema("query", "What to look for")),
    )  # fmt: skip

    def __init__(self, key: str, service_url: str = EXA_URL) -> None:
        self._key, self._service_url = key, service_url

    async def connect(self) -> Connection:
        return _LocalConnection(self)

    async def call(self, arguments: Mapping[str, Any]) -> Outcome:
        return await asyncio.to_thread(self._ask, str(arguments["query"]))

    def _ask(self, query: str) -> Outcome:
        wanted = {"text": {"maxCharacters": 2000}}
        body = {"query": query, "numResults": NUM_RESULTS, "contents": wanted}
        headers = {"x-api-key": self._key, "content-type": "application/json"}
        request = urllib.request.Request(
            self._service_url, json.dumps(body).encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=SEARCH_S) as answer:
                found = json.load(answer).get("results", [])
        except (OSError, ValueError, urllib.error.URLError) as error:
            return Outcome(f"the search failed: {error}", True)
        pages = (f"{p.get('title')}\n{p.get('url')}\n{p.get('text', '')}" for p in found)
        return Outcome("\n\n".join(pages)[:MAX_RESULT_CHARS] or "no page was found")


class _LocalConnection:
    """The connection to a tool that runs in this process."""

    def __init__(self, server: PythonServer | SearchServer) -> None:
        self._server = server
        self.tools = list(server.tools)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Outcome:
        missing = [key for key in self.tools[0].schema["required"] if key not in arguments]
        if missing:
            return Outcome(f"the argument {missing[0]!r} is missing", True)
        return await self._server.call(arguments)

    async def close(self) -> None:
        """Nothing is open."""


def demo_servers() -> list[ToolServer]:
    """The tools that can run on this machine; ConfigError if there are none."""
    servers: list[ToolServer] = []
    if shutil.which("docker"):
        servers.append(PythonServer())
    key = os.environ.get("EXA_API_KEY")
    if key:
        servers.append(SearchServer(key))
    if not servers:
        raise ConfigError(
            "--tool-server demo: neither a docker program (for Python) nor EXA_API_KEY "
            "(for search) is here; name MCP servers instead: --tool-server host:port"
        )
    return servers
