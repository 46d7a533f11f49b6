"""Tools that this server runs for /v1/responses, over real MCP servers on loopback."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import uvicorn
from tests.fakes import http_server
from tests.fakes.cut_streams import blocks_of, check_all_cuts, raw, timeless, without_records
from tests.fakes.http_server import ScriptedServer, listening, scripted_server
from tests.fakes.lockstep import LockstepLink

from radixlm.base.errors import ConfigError
from radixlm.entrypoints.http.responses.demo_tools import PythonServer, SearchServer, demo_servers
from radixlm.entrypoints.http.responses.tool_servers import addresses

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
ADD = CALL.format(name="add", arguments='{"a": 2, "b": 3}')
TWICE = f"{ADD}\n{ADD}"
SCRIPT = {
    "boom": "It went wrong.",
    "sum is 5": "The sum is 5.",
    "mix please": ADD + "\n" + CALL.format(name="mine", arguments="{}"),
    "twice please": TWICE,
    "fail please": CALL.format(name="fail", arguments="{}"),
    "add please": f"Let me see. {ADD}",
    "for ever": ADD,
}
OWN: Any = {"type": "function", "name": "mine", "parameters": {}, "strict": False}


def tool(label: str = "calc", **more: Any) -> Any:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **more}


@pytest.fixture
def calls() -> list[str]:
    """The calls that the tool server received."""
    return []


@asynccontextmanager
async def mcp_server(calls: list[str], kind: str) -> AsyncIterator[str]:
    """A server with two tools; its address."""
    made = pytest.importorskip("mcp.server.mcpserver").MCPServer("calc")
    errors = pytest.importorskip("mcp.server.mcpserver.exceptions")

    @made.tool()  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """Adds."""
        calls.append(f"{a}+{b}")
        return f"sum is {a + b}"

    @made.tool()  # type: ignore[untyped-decorator]
    def fail() -> str:
        """Fails."""
        raise errors.ToolError("boom")

    app = made.streamable_http_app() if kind == "mcp" else made.sse_app()
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[sock]))
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/{kind}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def served(
    folder: Path, calls: list[str], kind: str = "mcp"
) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of a server with one tool server."""
    async with mcp_server(calls, kind) as url:
        async with (
            scripted_server(folder, SCRIPT, tool_server=f"calc={url}") as server,
            listening(server) as port,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0
            ) as client,
        ):
            yield client


@pytest.mark.parametrize("kind", ["mcp", "sse"])
async def test_the_model_calls_reads_and_answers(
    toy_folder: Path, calls: list[str], kind: str
) -> None:
    async with served(toy_folder, calls, kind) as client:
        got = await client.responses.create(model="tiny", input="add please", tools=[tool()])
        assert calls == ["2+3"]
        kinds = [item.type for item in got.output]
        assert kinds == ["mcp_list_tools", "message", "mcp_call", "message"]
        call: Any = got.output[2]
        assert (call.name, call.output, call.error) == ("add", "sum is 5", None)
        assert got.output_text.endswith("The sum is 5.")
        listed: Any = got.output[0]
        assert {t.name for t in listed.tools} == {"add", "fail"}
        events = [
            event
            async for event in await client.responses.create(
                model="tiny", input="add please", tools=[tool()], stream=True
            )
        ]
        named = [event.type for event in events]
        for part in ("in_progress", "completed"):
            assert f"response.mcp_call.{part}" in named
            assert f"response.mcp_list_tools.{part}" in named
        assert named.count("response.output_item.added") == 4
        assert named.count("response.output_item.done") == 4
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final: Any = events[-1]
        assert final.response.usage.output_tokens == got.usage.output_tokens  # type: ignore[union-attr]
        later = await client.responses.create(model="tiny", input="?", previous_response_id=got.id)
        assert later.output_text == "The sum is 5.", "the result is part of the conversation"


async def test_errors_limits_and_the_clients_own_functions(
    toy_folder: Path, calls: list[str]
) -> None:
    async with served(toy_folder, calls) as client:

        async def ask(text: str, **more: Any) -> Any:
            body = {"model": "tiny", "input": text, "tools": [tool()]} | more
            return await client.responses.create(**body)

        failed = await ask("fail please")
        call: Any = failed.output[1]
        assert call.status == "failed" and "boom" in str(call.error)
        assert failed.output_text == "It went wrong."
        mixed = await ask("mix please", tools=[tool(), OWN])
        assert [i.type for i in mixed.output] == ["mcp_list_tools", "mcp_call", "function_call"]
        assert mixed.output[1].output == "sum is 5" and mixed.status == "completed"
        twice = await ask("twice please", max_tool_calls=1)
        assert [i.status for i in twice.output if i.type == "mcp_call"] == [
            "completed",
            "incomplete",
        ]
        assert calls == ["2+3", "2+3"]
        short = await ask("add please", max_output_tokens=40)
        assert short.status == "incomplete"
        body: Any = {"model": "tiny", "input": "add please", "background": True}
        behind = await client.responses.create(**body, tools=[tool()])
        async with asyncio.timeout(60):
            while behind.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                behind = await client.responses.retrieve(behind.id)
        assert behind.output_text.endswith("The sum is 5.")


async def test_a_request_names_the_operators_servers_only(
    toy_folder: Path, calls: list[str]
) -> None:
    async with served(toy_folder, calls) as client:
        wrong = [
            (tool("other"), "tools[0].server_label"),
            (tool(server_url="http://127.0.0.1:1/mcp"), "tools[0].server_label"),
            (tool(require_approval="always"), "tools[0].require_approval"),
            (tool(allowed_tools="add"), "tools[0].allowed_tools"),
        ]
        for bad, param in wrong:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="tiny", input="x", tools=[bad])
            assert refused.value.param == param
        some = await client.responses.create(
            model="tiny", input="hi", tools=[tool(allowed_tools=["fail"])]
        )
        listed: Any = some.output[0]
        assert [t.name for t in listed.tools] == ["fail"]


async def test_a_server_that_is_gone_is_a_424(toy_folder: Path) -> None:
    pytest.importorskip("mcp")
    with socket.socket() as sock:  # it holds the port without listening
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        await _ask_the_gone(toy_folder, port)


async def _ask_the_gone(toy_folder: Path, port: int) -> None:
    async with scripted_server(toy_folder, SCRIPT, tool_server=f"127.0.0.1:{port}") as server:
        label = f"127.0.0.1:{port}"
        got = await server.post("/v1/responses", input="x", tools=[tool(label)])
        assert got.status_code == 424, got.text
        assert got.json()["error"]["code"] == "tool_server_error"
        assert not server.engine.intake.requests


def test_addresses_of_the_flag() -> None:
    assert addresses("localhost:8001, py=http://a/mcp ,https://b:1/x/sse") == [
        ("localhost:8001", "http://localhost:8001/sse"),
        ("py", "http://a/mcp"),
        ("b:1", "https://b:1/x/sse"),
    ]
    for wrong in ("ftp://x", "", "a=http://x,a=http://y", "http://"):
        with pytest.raises(ConfigError, match="--tool-server"):
            addresses(wrong)


async def test_demo_python_runs_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXA_API_KEY", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="docker"):
        demo_servers()
    fake = tmp_path / "docker"
    fake.write_text('#!/bin/sh\necho "$@"\ncat\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (server,) = demo_servers()
    assert isinstance(server, PythonServer)
    session = await server.connect()
    got = await session.call("python", {"code": "print(1)"})
    assert "--network none" in got.text and "--cap-drop ALL" in got.text
    assert got.text.endswith("print(1)") and not got.is_error
    assert (await session.call("python", {})).is_error


async def test_demo_search_reads_the_service(server: ScriptedServer) -> None:
    """A server that answers JSON replaces the service."""
    async with listening(server) as port:
        found = SearchServer("key", f"http://127.0.0.1:{port}/nowhere")
        session = await found.connect()
        got = await session.call("search", {"query": "x"})
    assert got.is_error and "404" in got.text


def uncached(data: bytes) -> bytes:
    """The first round was not computed on the second server, so its cache does not have it."""
    return re.sub(rb'"cached_tokens":\d+', b"", timeless(data))


async def test_a_tool_is_not_run_again_on_the_server_that_goes_on(
    toy_folder: Path, calls: list[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(http_server, "ThreadLink", LockstepLink)
    body = orjson.dumps({"stream": True, "input": "add please", "tools": [tool()]})
    async with (
        mcp_server(calls, "mcp") as url,
        scripted_server(toy_folder, SCRIPT, tool_server=f"calc={url}") as first,
        scripted_server(toy_folder, SCRIPT, tool_server=f"calc={url}") as second,
    ):
        whole = await raw(first.client, "/v1/responses", body)
        shown = blocks_of(without_records("/v1/responses", whole))
        place = next(i for i, block in enumerate(shown) if b"mcp_call.completed" in block)
        await check_all_cuts(
            first.client,
            second.client,
            "/v1/responses",
            body,
            cuts=lambda count: (place, place + 1, place + 2, count - 1),
            plain=uncached,
        )
    # run by the two whole streams, and once where it was cut before the tool had answered
    assert calls == ["2+3"] * 3
