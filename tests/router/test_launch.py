"""The gateway as a process: its start, SIGTERM with answers under way, a second signal."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from radixlm.base.errors import ConfigError
from radixlm.router.launch import bind
from tests.router.client import Connection, Response, ask
from tests.router.processes import Process, gateway_process, mock_process

PATH = "/v1/chat/completions"


@pytest.fixture
def gateway() -> Iterator[Process]:
    """In front of one worker whose streams take 40 events of 25 ms."""
    worker = mock_process("--faults", '{"gap_s": 0.025, "num_events": 40}')
    try:
        running = gateway_process("--worker-urls", worker.url)
        yield running
        running.kill()
    finally:
        worker.kill()


async def _begun_stream(connection: Connection, response: Response) -> None:
    await connection.send("POST", PATH, {"model": "mock", "messages": [], "stream": True})
    async for _ in connection.chunks(response):
        return


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_lets_streams_end(gateway: Process, signum: signal.Signals) -> None:
    """No new connection is accepted, an idle one is closed, the stream is whole, exit 0."""
    async with Connection(gateway.url) as busy, Connection(gateway.url) as idle:
        first = Response()
        await _begun_stream(busy, first)
        gateway.popen.send_signal(signum)
        assert await asyncio.wait_for(idle.reader.read(), 10) == b""
        with pytest.raises(OSError):
            await ask(gateway.url, "GET", "/health")
        rest = await asyncio.wait_for(busy.reader.read(), 10)
        assert b"[DONE]" in rest and rest.endswith(b"0\r\n\r\n")
    assert await asyncio.to_thread(gateway.popen.wait, 10) == 0


async def test_a_second_signal_ends_at_once(gateway: Process) -> None:
    async with Connection(gateway.url) as busy, Connection(gateway.url) as idle:
        await _begun_stream(busy, Response())
        gateway.popen.send_signal(signal.SIGTERM)
        await asyncio.wait_for(idle.reader.read(), 10)  # the first signal has arrived
        gateway.popen.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(gateway.popen.wait, 10) == 0
        rest = await asyncio.wait_for(busy.reader.read(), 10)
        assert not rest.endswith(b"0\r\n\r\n")


def test_an_address_that_is_taken() -> None:
    taken = bind("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--port {port}: Address already in use; --port 0"):
        bind("127.0.0.1", port)
    for host in ("192.0.2.1", "a" * 70, "a..b"):
        with pytest.raises(ConfigError, match=f"--host {host}.*; --host 127\\.0\\.0\\.1 works"):
            bind(host, port)
    command = [sys.executable, "-m", "radixlm", "router", "--host", "127.0.0.1"]
    done = subprocess.run([*command, "--port", str(port)], capture_output=True, timeout=20)
    taken.close()
    assert done.returncode == 2 and b"Address already in use" in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_gateway_needs_no_torch_and_no_framework() -> None:
    code = (
        "import sys; from radixlm.router.app import Gateway; from radixlm.router.options import "
        "Options; import radixlm.router.launch; Gateway(Options());"
        "heavy = {'torch', 'transformers', 'numpy.testing', 'fastapi', 'uvicorn', 'pydantic', "
        "'aiohttp', 'tokenizers'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr.decode()
