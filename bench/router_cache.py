"""How much of a conversation is found cached behind a gateway, and when the first token comes.

    python bench/router_cache.py [--peer PYTHON] [--workers 4] [--rounds 2] [--policies least_work]

Several RadixLM servers with small KV caches; conversations of some turns, that share `--groups`
system prompts (1: an assistant with many users), a few at a time. Each gateway gets the same
conversations with empty caches, in turn. `--peer` is the interpreter of an environment with
sglang-router, run with its policy cache_aware. Each request has a connection of its own, so that
delayed acknowledgements do not count. Cached tokens are those that the workers tell (`usage`).
With `--groups 8` and room for all, both find all that can be found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

WORDS = (
    "river bridge stone letter window garden winter morning paper silver road captain music "
    "answer question small green yellow under over between people water light night story"
).split()
START_S = 120.0


@dataclass
class Load:
    """The conversations of one run."""

    groups: int = 1
    skew: int = 1  # of the groups' popularity (Zipf); 0: all alike
    system_words: int = 220
    sessions: int = 64
    turns: int = 5
    user_words: int = 70
    max_tokens: int = 16
    active: int = 24  # conversations that have begun and not ended
    concurrency: int = 6
    seed: int = 0

    def texts(self) -> Iterator[tuple[str, list[str]]]:
        """(system prompt, the user's texts) of each session."""
        draw = random.Random(self.seed)
        systems = [" ".join(draw.choices(WORDS, k=self.system_words)) for _ in range(self.groups)]
        for _ in range(self.sessions):
            turns = [" ".join(draw.choices(WORDS, k=self.user_words)) for _ in range(self.turns)]
            [system] = draw.choices(
                systems, [1 / rank**self.skew for rank in range(1, self.groups + 1)]
            )
            yield system, turns


@dataclass
class Result:
    """What one run gave."""

    first_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_failed: int = 0
    seconds: float = 0.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Processes:
    """Processes in groups of their own, killed at the end."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []
        self.log = tempfile.NamedTemporaryFile(prefix="router-cache-", suffix=".log", delete=False)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True
        )
        self._all.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(10)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            self.stop(process)


def fetch(method: str, url: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, method=method, data=b"" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def until_ready(url: str, process: subprocess.Popen[bytes], log: str) -> None:
    end_s = time.monotonic() + START_S
    while fetch("GET", url)[0] != 200:
        if process.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(f"{url} does not become ready; see {log}")
        time.sleep(0.2)


async def ask(port: int, body: dict[str, object], result: Result) -> str:
    """One streamed chat on a connection of its own; the answer's text."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    begun_s, text, usage = time.perf_counter(), "", None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(head.encode() + data)
        while line := await asyncio.wait_for(reader.readline(), 120):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            delta = (event.get("choices") or [{}])[0].get("delta") or {}
            if delta.get("content"):
                if not text:
                    result.first_s.append(time.perf_counter() - begun_s)
                text += delta["content"]
            usage = event.get("usage") or usage
    finally:
        writer.close()
    if usage is None:
        result.num_failed += 1
        return text
    result.prompt_tokens += usage["prompt_tokens"]
    result.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return text


async def drive(port: int, load: Load) -> Result:
    """All conversations: ``active`` at a time, whose turns come in a drawn order."""
    result, draw = Result(), random.Random(load.seed + 1)
    coming = [
        ([{"role": "system", "content": system}], list(turns)) for system, turns in load.texts()
    ]
    thinking = [coming.pop() for _ in range(min(load.active, len(coming)))]

    async def client() -> None:
        while thinking:
            messages, turns = thinking.pop(draw.randrange(len(thinking)))
            messages.append({"role": "user", "content": turns.pop(0)})
            fields = {"model": "radix-tiny", "messages": messages, "max_tokens": load.max_tokens}
            options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
            text = await ask(port, fields | options | {"ignore_eos": True}, result)
            messages.append({"role": "assistant", "content": text})
            if turns:
                thinking.append((messages, turns))
            elif coming:
                thinking.append(coming.pop())

    begun_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    result.seconds = time.perf_counter() - begun_s
    return result


def start_workers(processes: Processes, count: int, cache_tokens: int) -> list[str]:
    urls, started = [], []
    for _ in range(count):
        port, events, replay = free_port(), free_port(), free_port()
        config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{events}"}
        config |= {"replay_endpoint": f"tcp://127.0.0.1:{replay}", "bind": True}
        command = [sys.executable, "-m", "radixlm", "serve", "--model-path", "radix-tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--cpu-threads", "1"]
        command += ["--max-total-tokens", str(cache_tokens), "--enable-cache-report"]
        command += ["--kv-events-config", json.dumps(config), "--max-running-requests", "16"]
        started.append((f"http://127.0.0.1:{port}", processes.start(command)))
    for url, process in started:
        until_ready(f"{url}/ready", process, processes.log.name)
        urls.append(url)
    return urls


def gateway_command(name: str, peer: str | None, port: int, urls: list[str]) -> list[str]:
    common = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    common += ["--prometheus-port", str(free_port())]
    if name == "peer":
        assert peer
        start = [peer, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
    else:
        start = [sys.executable, "-m", "radixlm", "router", "--policy", name]
    return start + common


def measure(
    processes: Processes, name: str, peer: str | None, urls: list[str], load: Load
) -> Result:
    """One run behind one gateway, with empty caches."""
    for url in urls:
        status, body = fetch("POST", f"{url}/flush_cache")
        assert status == 200, body
    port = free_port()
    gateway = processes.start(gateway_command(name, peer, port, urls))
    try:
        until_ready(f"http://127.0.0.1:{port}/readiness", gateway, processes.log.name)
        end_s = time.monotonic() + START_S
        while json.loads(fetch("GET", f"http://127.0.0.1:{port}/readiness")[1])[
            "healthy_workers"
        ] < len(urls):
            assert time.monotonic() < end_s, "not all workers join"
            time.sleep(0.2)
        time.sleep(1.0)  # the tokenizer is read
        result = asyncio.run(drive(port, load))
        for line in fetch("GET", f"http://127.0.0.1:{port}/metrics")[1].decode().splitlines():
            if line.startswith(("radix_router_cached", "radix_router_kv", "radix_router_ids")):
                print("   ", line)
        return result
    finally:
        processes.stop(gateway)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", help="interpreter of an environment with sglang-router")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--policies", default="least_work")
    parser.add_argument("--cache-tokens", type=int, default=8000)
    for name, value in vars(Load()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    args = parser.parse_args()
    names = [*args.policies.split(","), *(["peer"] if args.peer else [])]
    sums: dict[str, list[Result]] = {name: [] for name in names}
    with Processes() as processes:
        urls = start_workers(processes, args.workers, args.cache_tokens)
        for turn in range(args.rounds):
            load = Load(**{key: getattr(args, key) for key in vars(Load())} | {"seed": turn})
            for name in names if turn % 2 == 0 else reversed(names):
                found = measure(processes, name, args.peer, urls, load)
                sums[name].append(found)
                print(name, _line([found]), flush=True)
    print(f"\n{'gateway':12} {'cached':>8} {'share':>6} {'TTFT p50':>9} {'p95':>8} {'seconds':>8}")
    for name, results in sums.items():
        print(f"{name:12} {_line(results)}")
    return int(any(result.num_failed for results in sums.values() for result in results))


def _line(results: list[Result]) -> str:
    cached = sum(result.cached_tokens for result in results)
    prompt = sum(result.prompt_tokens for result in results) or 1
    first = sorted(s for result in results for s in result.first_s) or [0.0]
    p95 = first[min(len(first) - 1, int(0.95 * len(first)))]
    failed = sum(result.num_failed for result in results)
    seconds = sum(result.seconds for result in results)
    text = f"{cached:8} {cached / prompt:6.3f} {1000 * statistics.median(first):6.1f} ms"
    return f"{text} {1000 * p95:5.1f} ms {seconds:8.1f}" + (f"  {failed} FAILED" if failed else "")


if __name__ == "__main__":
    sys.exit(main())
