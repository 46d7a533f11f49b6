"""Restarts all workers behind a gateway under load; each stream is to say what it said before.

    python bench/router_rolling.py [--workers 4] [--streams 256] [server options]

Streams of several kinds (greedy, sampled, penalties, logprobs, n = 2, grammar) run all the time,
each again and again; meanwhile `POST /rolling_restart` restarts one server after the other by
SIGTERM. The exit status is 1 if a stream fails or says anything else than before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
from server_process import ServerProcess, free_port

from radixlm.base.errors import TransferError
from radixlm.bench.client import HttpClient

LIMIT_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 1.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "n": 2},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
)


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    """The request of a stream."""
    text = f"Tell a story about the number {number}, please."
    return {
        "model": "radix-tiny",
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "seed": number,
        "max_tokens": max_tokens,
    } | KINDS[number % len(KINDS)]


async def answer(client: HttpClient, body: dict[str, Any]) -> Any:
    """What a stream says, without ids and times: text, logprobs and finish of each choice. A text
    says what went wrong."""
    said: dict[int, list[Any]] = {}
    ends: list[bytes] = []

    def on_event(data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            ends.append(data)
            return
        event = orjson.loads(data)
        if "error" in event:
            ends.append(data)
        for choice in event.get("choices", ()):
            parts = said.setdefault(choice["index"], ["", [], None])
            parts[0] += choice["delta"].get("content") or ""
            parts[1] += (choice.get("logprobs") or {}).get("content") or []
            parts[2] = choice.get("finish_reason") or parts[2]

    try:
        async with asyncio.timeout(LIMIT_S):
            response = await client.ask("POST", "/v1/chat/completions", body, on_event)
    except (TransferError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    if response.status != 200 or ends != [b"[DONE]"]:
        return f"status {response.status}, ends {ends}, {response.body[:200]!r}"
    return said


class Run:
    """The servers, the gateway and the streams."""

    def __init__(self, args: argparse.Namespace, options: list[str], folder: Path) -> None:
        self.args, self.folder = args, folder
        logs = (folder / f"server{number}.log" for number in range(args.workers))
        self.servers = {one.port: one for one in (ServerProcess(options, log) for log in logs)}
        self.outcomes: Counter[str] = Counter()
        self.examples: list[Any] = []

    async def restart(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Restart the server whose port the --rolling command sends."""
        server = self.servers[int(await reader.readline())]
        began_s = time.monotonic()
        await asyncio.to_thread(server.stop)
        stopped_s = time.monotonic()
        await server.__aenter__()
        print(f"{server.base_url}: stopped in {stopped_s - began_s:.1f} s, back after "
              f"{time.monotonic() - stopped_s:.1f} s", flush=True)  # fmt: skip
        writer.close()

    def start_gateway(self, port: int, restart_port: int) -> subprocess.Popen[bytes]:
        """`radixlm router` whose --rolling command asks this process."""
        program = f"import os,socket;s=socket.create_connection(('127.0.0.1',{restart_port}),600);"
        program += "s.sendall(os.environ['WORKER_PORT'].encode()+b'\\n');s.recv(1)"
        urls = [one.base_url for one in self.servers.values()]
        command = [
            sys.executable, "-m", "radixlm", "router", "--host", "127.0.0.1", "--port", str(port),
            "--worker-urls", *urls, "--policy", "round_robin", "--prometheus-port", "-1",
            "--drain-deadline-secs", "0", "--rolling", f'{sys.executable} -S -c "{program}"',
        ]  # fmt: skip
        with (self.folder / "gateway.log").open("wb") as out:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    async def roll(self, client: HttpClient) -> None:
        """Restart all workers, with the streams of `repeat` meanwhile."""
        expected = await self.undisturbed(client)
        done = asyncio.Event()
        loops = [self.repeat(client, number, one, done) for number, one in enumerate(expected)]
        tasks = asyncio.gather(*loops)
        await asyncio.sleep(1)
        print((await client.ask("POST", "/rolling_restart")).body.decode(), flush=True)
        while (report := (await client.ask("GET", "/rolling_restart")).json())["todo"]:
            if report["status"] == "failed":
                self.outcomes["failed restart"] += 1
                break
            await asyncio.sleep(0.5)
        print(report, flush=True)
        done.set()
        await tasks

    async def undisturbed(self, client: HttpClient) -> list[Any]:
        """What each stream says when nothing is restarted."""
        bodies = [body_of(number, self.args.tokens) for number in range(self.args.streams)]
        began_s = time.monotonic()
        expected = await asyncio.gather(*(answer(client, body) for body in bodies))
        bad = [one for one in expected if isinstance(one, str)]
        if bad:
            raise TransferError(f"the undisturbed run failed: {bad[:3]}")
        print(f"undisturbed: {len(expected)} streams, {time.monotonic() - began_s:.1f} s")
        return expected

    async def repeat(
        self, client: HttpClient, number: int, expected: Any, done: asyncio.Event
    ) -> None:
        """One stream, again and again."""
        body = body_of(number, self.args.tokens)
        while not done.is_set():
            said = await answer(client, body)
            kind = "identical" if said == expected else "failed"
            if not isinstance(said, str) and said != expected:
                kind = "different"
            self.outcomes[kind] += 1
            if kind != "identical" and len(self.examples) < 5:
                self.examples.append((body, said, expected))


async def main(args: argparse.Namespace, options: list[str]) -> int:
    """Print what became of the streams; the exit status."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(args, options, Path(name))
        async with AsyncExitStack() as stack:
            for server in run.servers.values():
                await stack.enter_async_context(server)
            service = await asyncio.start_server(run.restart, "127.0.0.1", 0)
            port = free_port()
            gateway = run.start_gateway(port, service.sockets[0].getsockname()[1])
            stack.callback(gateway.kill)
            client = HttpClient(f"http://127.0.0.1:{port}")
            async with asyncio.timeout(LIMIT_S):
                while not await _is_ready(client, args.workers):
                    await asyncio.sleep(0.1)
            async with asyncio.timeout(args.limit_s):
                await run.roll(client)
            client.close()
        moved = (Path(name) / "gateway.log").read_text().split("\n")
        print(*(line for line in moved if "moved" in line), sep="\n")
    print(dict(run.outcomes), *run.examples, sep="\n")
    return int(set(run.outcomes) != {"identical"})


async def _is_ready(client: HttpClient, num_workers: int) -> bool:
    try:
        report = (await client.ask("GET", "/readiness")).json() or {}
    except TransferError:
        return False
    return bool(report.get("healthy_workers") == num_workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--limit-s", type=float, default=600.0)
    known, rest = parser.parse_known_args()
    os.chdir(Path(__file__).parent.parent)
    rest = rest or ["--model-path", "radix-tiny", "--cpu-threads", "1"]
    raise SystemExit(asyncio.run(main(known, rest)))
