"""Measures how far one tenant's load moves the latency of another behind the gateway.

    python bench/router_tenants.py [--seconds 20] [--rate 5] [router options]

Mock workers queue like an engine: so many slots, a first-come queue, a step for all that run.
Tenant "small" sends at `--rate` a second, tenant "big" at the same rate and then at ten times of
it; without fair shares, and with them. The exit status is 1 if with them a p95 of "small" moves by
over 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections import Counter, deque
from typing import Any

import numpy as np
import orjson
from server_process import free_port

from radixlm.base.errors import TransferError
from radixlm.bench.client import HttpClient

NUM_WORKERS, SLOTS = 4, 8
STEP_S = 0.04  # of one request alone; a tenth more for a full batch
NUM_TOKENS = 25
PREFILL_TOKENS = 512  # of prompts a step
WARM_S = 3.0
ALLOWED = 1.10
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"t "},"finish_reason":null}]}\n\n'
Percentiles = tuple[float, float, float]


class Running:
    """A request in an engine."""

    def __init__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        num_prompt = len(body["messages"][0]["content"]) // 4
        self.num_steps = -(-num_prompt // PREFILL_TOKENS)
        self.num_tokens, self.writer = body["max_tokens"], writer
        self.done = asyncio.Event()

    def step(self) -> bool:
        """One step of prefill or one token; whether it goes on."""
        self.num_steps -= 1
        if self.num_steps > 0:
            return True
        self.num_tokens -= 1
        data = EVENT if self.num_tokens else EVENT + b"data: [DONE]\n\n"
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        if self.num_tokens and not self.writer.is_closing():
            return True
        self.done.set()
        return False


class Engine:
    """A mock worker: at most SLOTS requests in a batch, the others wait in order."""

    def __init__(self) -> None:
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.work = asyncio.Event()
        self.max_waiting = 0

    async def start(self) -> str:
        """Serve; the url."""
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1024)
        self.task = asyncio.create_task(self.loop())
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def loop(self) -> None:
        """Step after step."""
        while True:
            while self.waiting and len(self.running) < SLOTS:
                self.running.append(self.waiting.popleft())
            if not self.running:
                self.work.clear()
                await self.work.wait()
                continue
            await asyncio.sleep(STEP_S * (1 + 0.1 * len(self.running) / SLOTS))
            self.running = [one for one in self.running if one.step()]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, found, rest = head.partition(b"content-length: ")
                body = await reader.readexactly(int(rest.partition(b"\r\n")[0]) if found else 0)
                path = head.split(b" ", 2)[1].partition(b"?")[0]
                if path == b"/v1/chat/completions":
                    await self.chat(orjson.loads(body), writer)
                else:
                    writer.write(control(path))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    async def chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """One stream."""
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        request = Running(body, writer)
        self.waiting.append(request)
        self.max_waiting = max(self.max_waiting, len(self.waiting))
        self.work.set()
        await request.done.wait()
        writer.write(b"0\r\n\r\n")


def control(path: bytes) -> bytes:
    """The answer of a route that generates nothing."""
    facts = {"max_running_requests": SLOTS, "model_path": "mock", "served_model_name": "mock"}
    known = {b"/health": {}, b"/server_info": facts, b"/model_info": {"model_path": "mock"}}
    status = b"200 OK" if path in known else b"404 Not Found"
    data = orjson.dumps(known.get(path, {}))
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(data)) + data


class Tenant:
    """A tenant that sends at random times, whatever becomes of its requests."""

    def __init__(self, url: str, name: str, rate: float) -> None:
        self.name, self.rate = name, rate
        self.client = HttpClient(url, {"x-tenant": name})
        self.first_s: list[float] = []
        self.whole_s: list[float] = []
        self.statuses: Counter[int] = Counter()

    async def send_all(self, seconds: float) -> None:
        """Send for so long, then wait for what runs."""
        draw, tasks = random.Random(self.name), []
        began_s = next_s = time.perf_counter()
        while next_s - began_s < seconds:
            next_s += draw.expovariate(self.rate)
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            is_warm = next_s - began_s > WARM_S
            tasks.append(asyncio.create_task(self.send(is_warm)))
        await asyncio.gather(*tasks)
        self.client.close()

    async def send(self, is_warm: bool) -> None:
        """One request; measured if ``is_warm``."""
        text = f"{random.random()} " + "word " * 100
        body = {"model": "mock", "stream": True, "max_tokens": NUM_TOKENS}
        body["messages"] = [{"role": "user", "content": text}]
        times: list[float] = []
        began_s = time.perf_counter()
        try:
            answer = await self.client.ask(
                "POST", "/v1/chat/completions", body, lambda _, at_s: times.append(at_s)
            )
        except TransferError:
            self.statuses[0] += 1
            return
        self.statuses[answer.status] += 1
        if is_warm and len(times) == NUM_TOKENS + 1:
            self.first_s.append(times[0] - began_s)
            self.whole_s.append(times[-1] - began_s)

    @property
    def percentiles(self) -> Percentiles:
        """p50 and p95 of the time to the first token, p95 of the whole, in seconds."""
        first, whole = np.array(self.first_s or [0]), np.array(self.whole_s or [0])
        p50, p95 = np.quantile(first, (0.5, 0.95))
        return float(p50), float(p95), float(np.quantile(whole, 0.95))


async def measure(args: argparse.Namespace, flags: list[str], factor: float) -> Percentiles:
    """A gateway, both tenants; the percentiles of "small"."""
    engines = [Engine() for _ in range(NUM_WORKERS)]
    urls = [await engine.start() for engine in engines]
    port = free_port()
    command = [
        sys.executable, "-m", "radixlm", "router", "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", *urls, "--prometheus-port", "-1", "--log-level", "warn", *flags,
    ]  # fmt: skip
    gateway = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        await ready(url)
        small, big = Tenant(url, "small", args.rate), Tenant(url, "big", args.rate * factor)
        await asyncio.gather(small.send_all(args.seconds), big.send_all(args.seconds))
    finally:
        gateway.kill()
        gateway.wait()
        for engine in engines:
            engine.task.cancel()
            engine.server.close()
    first_p50, first_p95, whole_p95 = small.percentiles
    print(
        f"big x{factor:<4g} {' '.join(flags):62} small: first p50 {first_p50:6.3f} p95 "
        f"{first_p95:6.3f}, whole p95 {whole_p95:6.3f} s, {dict(small.statuses)}; "
        f"big: {dict(big.statuses)}; longest queue of a worker "
        f"{max(engine.max_waiting for engine in engines)}",
        flush=True,
    )
    return small.percentiles


async def ready(url: str) -> None:
    """Wait until all workers have joined."""
    client = HttpClient(url)
    async with asyncio.timeout(30):
        while True:
            try:
                report = (await client.ask("GET", "/readiness")).json() or {}
                if report.get("healthy_workers") == NUM_WORKERS:
                    break
            except TransferError:
                pass
            await asyncio.sleep(0.05)
    client.close()


async def main(args: argparse.Namespace, flags: list[str]) -> int:
    """Print a line a run; the exit status."""
    queue = ["--queue-size", "100", "--queue-timeout-secs", "10"]
    moved = {}
    for shares in (["--fair-share"],) if args.only_fair else ([], ["--fair-share"]):
        runs = [await measure(args, [*flags, *queue, *shares], factor) for factor in (1, 10)]
        moved[bool(shares)] = [after / before for before, after in zip(*runs, strict=True)]
        names = ("first p50", "first p95", "whole p95")
        told = (
            f"{name} x{ratio:.2f}" for name, ratio in zip(names, moved[bool(shares)], strict=True)
        )
        print("  ten times the load of the other:", ", ".join(told), flush=True)
    return int(max(moved[True][1:]) > ALLOWED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--only-fair", action="store_true")
    known, rest = parser.parse_known_args()
    raise SystemExit(asyncio.run(main(known, rest or ["--policy", "power_of_two"])))
