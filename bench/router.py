"""What the gateway costs: processor time a request and an event, and what it adds to both.

    python bench/router.py [--peer PYTHON] [--seconds 2] [--rounds 3] [-- gateway options]

Two workers that do nothing but answer stand behind each gateway. `--peer` is the interpreter of an
environment with sglang-router, which then runs the same load, in turn with ours. Processor time is
that of the gateway's threads (/proc/PID/task/*/schedstat). One table, of each target's best round,
with a column `direct` without any gateway. The exit status is 1 if ours misses a goal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httptools
import orjson
import uvloop

RECORD = "k6NyaWTZJGNjZDI2YmM5LTRlMTYtNDMwZC1hYjM2LTg1MTI3YmM5ZDI3ZJKRzgAAAQ=="
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
RATE = "requests a second, c=32"
# name -> (unit, upper limit for ours, or None)
GOALS: dict[str, tuple[str, float | None]] = {
    "CPU a request, c=1": ("us", None),
    "CPU a request, c=32": ("us", 60),
    "p50, c=1": ("ms", None),
    RATE: ("", None),
    "first event, kept connection": ("ms", None),
    "CPU an event, 16 streams": ("us", 5),
    "CPU an event, 32 x 100/s": ("us", None),
    "event delay p50, 32 x 100/s": ("ms", None),
    "event delay p99, 32 x 100/s": ("ms", None),
    "resident memory": ("MB", 60),
    "start to ready": ("s", 0.8),
}
ADDED = {"p50, c=1": 0.3, "first event, kept connection": 0.5, "event delay p99, 32 x 100/s": 5.0}


# a worker


class Worker(asyncio.Protocol):
    """Answers at once; a stream has `events` events, `rate` a second (0: one a turn of the loop).
    It keeps a journal where it is asked to."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.data = transport, b""
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answer = _whole_answer(b"application/json", orjson.dumps(_completion()))

    def data_received(self, data: bytes) -> None:
        data = self.data = self.data + data if self.data else data
        head, end, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not end or len(body) < (int(length[1]) if length else 0):
            return
        self.data = b""
        if head.startswith(b"GET"):
            self.transport.write(_facts(head.split(b" ", 2)[1]))
        elif b'"stream":true' in body:
            wanted = re.search(rb"events=(\d+) rate=(\d+)", body)
            assert wanted
            is_journaled = b"x-radixlm-journal" in head
            stream = self.stream(int(wanted[1]), int(wanted[2]), is_journaled)
            self.task = asyncio.ensure_future(stream)
        else:
            self.transport.write(self.answer)

    async def stream(self, num_events: int, rate: int, is_journaled: bool) -> None:
        write, loop = self.transport.write, asyncio.get_running_loop()
        write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        line = f": j {RECORD}\n" if is_journaled else ""
        began_s = loop.time()
        for number in range(num_events):
            event = f"{line}data: {_EVENT % time.monotonic_ns()}\n\n"
            write(f"{len(event):x}\r\n{event}\r\n".encode())
            await asyncio.sleep(max(0.0, began_s + number / rate - loop.time()) if rate else 0)
            if self.transport.is_closing():
                return
        write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


_EVENT = (
    '{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    '"model":"mock","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],'
    '"t":%d}'
)


def _completion() -> object:
    message = {"role": "assistant", "content": "word " * 16}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 40, "completion_tokens": 16, "total_tokens": 56}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000} | {
        "model": "mock", "choices": [choice], "usage": usage
    }  # fmt: skip


def _facts(path: bytes) -> bytes:
    facts = {"model_path": "mock", "served_model_name": "mock", "resume_digest": "mock"}
    if path == b"/v1/models":
        facts = {"object": "list", "data": [{"id": "mock", "object": "model"}]}  # type: ignore[dict-item]
    return _whole_answer(b"application/json", orjson.dumps(facts))


def _whole_answer(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


async def serve_worker(port: int) -> None:
    """Until the process is ended."""
    loop = asyncio.get_running_loop()
    await loop.create_server(Worker, "127.0.0.1", port)
    await asyncio.Event().wait()


# the load


class Client(asyncio.Protocol):
    """One connection. ``ask`` sends a request; the future has the answer's size."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] | None = None
        self.delays_ns: list[int] = []  # of events
        self.num_events = 0
        self.first_s = 0.0  # when the first event came
        self.is_stream = False
        self._expected = 0
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def ask(self, request: bytes) -> float:
        """The seconds until the answer was complete."""
        self.done = asyncio.get_running_loop().create_future()
        self.is_stream, self.first_s = b'"stream":true' in request, 0.0
        self._parser = httptools.HttpResponseParser(self)
        began_s = time.perf_counter()
        self.transport.write(request)
        await self.done
        return time.perf_counter() - began_s

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        if self.is_stream:
            self._parser.feed_data(data)
            return
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not self._expected and end:
            if b" 200 " not in head[:16]:
                raise SystemExit(f"unexpected answer: {self._data[:300]!r}")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            assert length, head
            self._expected = int(length[1])
        if end and len(body) >= self._expected:
            self._end()

    def on_body(self, data: bytes) -> None:
        """Of the parser: some of a stream, without the chunks' lengths."""
        if self._parser.get_status_code() != 200:
            raise SystemExit(f"unexpected answer: {data[:300]!r}")
        now_ns = time.monotonic_ns()
        data = self._data + data
        for found in re.finditer(rb'"t":(\d+)}', data):
            self.delays_ns.append(now_ns - int(found[1]))
            self.num_events += 1
        if not self.first_s and self.num_events:
            self.first_s = time.perf_counter()
        self._data = data[data.rfind(b"}") + 1 :]

    def on_message_complete(self) -> None:
        """Of the parser."""
        self._end()

    def _end(self) -> None:
        self._data, self._expected = b"", 0
        assert self.done is not None
        self.done.set_result(None)


def request(*, stream: str = "") -> bytes:
    """A chat request of some 300 bytes."""
    messages = [{"role": "user", "content": stream + PROMPT}]
    body = {"model": "mock", "messages": messages, "max_tokens": 16, "stream": bool(stream)}
    data = orjson.dumps(body)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: bench\r\n"
        "accept: */*\r\nauthorization: Bearer none\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def connect(port: int, count: int) -> list[Client]:
    """Kept-alive connections."""
    loop = asyncio.get_running_loop()
    pairs = [await loop.create_connection(Client, "127.0.0.1", port) for _ in range(count)]
    return [client for _, client in pairs]


async def plain(
    port: int, count: int, seconds: float, cpu: Callable[[], float]
) -> dict[str, float]:
    """Requests in turn on each of ``count`` connections."""
    clients, message = await connect(port, count), request()
    latencies: list[float] = []
    for client in clients:
        await client.ask(message)
    end_s = time.perf_counter() + seconds

    async def turn(client: Client) -> None:
        while time.perf_counter() < end_s:
            latencies.append(await client.ask(message))

    began_s, before = time.perf_counter(), cpu()
    await asyncio.gather(*map(turn, clients))
    used, wall_s = cpu() - before, time.perf_counter() - began_s
    _close(clients)
    found = {f"CPU a request, c={count}": used / len(latencies) * 1e6}
    if count == 1:
        return found | {"p50, c=1": statistics.median(latencies) * 1e3}
    return found | {f"requests a second, c={count}": len(latencies) / wall_s}


async def first_event(port: int, seconds: float) -> dict[str, float]:
    """Short streams on one kept connection."""
    (client,) = await connect(port, 1)
    message = request(stream="events=1 rate=0")
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        client.num_events = 0
        began_s = time.perf_counter()
        await client.ask(message)
        found.append(client.first_s - began_s)
    _close([client])
    return {"first event, kept connection": statistics.median(found) * 1e3}


async def streams(
    port: int, count: int, rate: int, seconds: float, cpu: Callable[[], float]
) -> dict[str, float]:
    """``count`` streams at once, at ``rate`` events a second, or as fast as they go."""
    clients = await connect(port, count)
    num_events = int(rate * seconds) if rate else int(2500 * seconds)
    message, before = request(stream=f"events={num_events} rate={rate}"), cpu()
    await asyncio.gather(*(client.ask(message) for client in clients))
    used = cpu() - before
    total = sum(client.num_events for client in clients)
    if total != count * num_events:
        raise SystemExit(f"{total} of {count * num_events} events came")
    delays = sorted(delay / 1e6 for client in clients for delay in client.delays_ns)
    _close(clients)
    name = f"{count} x {rate}/s" if rate else f"{count} streams"
    found = {f"CPU an event, {name}": used / total * 1e6}
    if rate:
        found[f"event delay p50, {name}"] = delays[len(delays) // 2]
        found[f"event delay p99, {name}"] = delays[len(delays) * 99 // 100]
    return found


def _close(clients: list[Client]) -> None:
    for client in clients:
        client.done = None
        client.transport.close()


async def measure(port: int, seconds: float, pid: int | None) -> dict[str, float]:
    """All figures of one target. ``pid``: of the gateway. TimeoutError: an answer has no end."""
    async with asyncio.timeout(30 + 10 * seconds):
        return await _measure(port, seconds, pid)


async def _measure(port: int, seconds: float, pid: int | None) -> dict[str, float]:

    def cpu() -> float:
        return cpu_s(pid) if pid else 0.0

    found = await plain(port, 1, seconds / 2, cpu)
    found |= await plain(port, 32, seconds, cpu)
    found |= await first_event(port, seconds / 4)
    found |= await streams(port, 16, 0, seconds, cpu)
    found |= await streams(port, 32, 100, seconds, cpu)
    if pid:
        found["resident memory"] = rss_mb(pid)
    return found


# processes


def cpu_s(pid: int) -> float:
    """Seconds that the threads of a process have run."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else 0.0


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, ended with the block; its output is shown if it ends by itself."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield child
        finally:
            if child.poll() is not None or sys.exc_info()[0]:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            child.kill()
            child.wait()


def wait_ready(port: int, child: subprocess.Popen[bytes], path: str) -> float:
    """Seconds until GET ``path`` answers 200."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < 20 and child.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
            if b" 200 " in sock.recv(4096)[:16]:
                return time.monotonic() - began_s
        time.sleep(0.005)
    return float("inf")


def gateway_commands(
    args: argparse.Namespace, urls: list[str]
) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Name -> (port, command)."""
    port, peer_port = free_port(), free_port()
    shared = ("--policy", args.policy, "--host", "127.0.0.1", "--worker-urls", *urls)

    def flags(port: int) -> tuple[str, ...]:
        return (*shared, "--port", str(port), "--prometheus-port", str(free_port()))

    found = {"radixlm": (port, (sys.executable, "-m", "radixlm", "router", *flags(port)))}
    found["radixlm"] = (port, (*found["radixlm"][1], *args.options))
    if args.peer:
        launch = (args.peer, "-m", "sglang_router.launch_router", *flags(peer_port))
        found["sglang-router"] = (peer_port, (*launch, "--log-level", "warn"))
    return found


def report(results: dict[str, dict[str, float]]) -> int:
    """Print the table; 1 if a goal is missed."""
    names, status = list(results), 0
    print("| figure | " + " | ".join(names) + " | goal |")
    print("|---|" + "---|" * (len(names) + 1))
    for figure, (unit, limit) in GOALS.items():
        cells = [f"{results[n][figure]:.4g}" if figure in results[n] else "-" for n in names]
        ours = results["radixlm"].get(figure)
        if figure in ADDED and ours is not None:
            limit = results["direct"][figure] + ADDED[figure]
        is_missed = limit is not None and ours is not None and ours > limit
        status |= is_missed
        goal = "" if limit is None else f"<= {limit:.4g}{' MISSED' if is_missed else ''}"
        print(f"| {figure} {f'({unit})' if unit else ''} | " + " | ".join(cells) + f" | {goal} |")
    return status


def main() -> int:
    """Run all targets in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help="python with sglang-router")
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("options", nargs="*", help="further options of our gateway, after --")
    args = parser.parse_args()
    if args.worker:
        uvloop.run(serve_worker(args.worker))
    ports = [free_port(), free_port()]
    samples: dict[str, list[dict[str, float]]] = {"direct": []}
    with contextlib.ExitStack() as stack:
        for port in ports:
            child = stack.enter_context(process(sys.executable, __file__, "--worker", str(port)))
            wait_ready(port, child, "/health")
        targets: dict[str, tuple[int, int | None, float]] = {"direct": (ports[0], None, 0.0)}
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for name, (port, command) in gateway_commands(args, urls).items():
            child = stack.enter_context(process(*command))
            ready_s = wait_ready(port, child, "/readiness")
            targets[name] = (port, child.pid, ready_s)
            samples[name] = []
        for _ in range(args.rounds):
            for name, (port, pid, ready_s) in targets.items():
                found = uvloop.run(measure(port, args.seconds, pid))
                samples[name].append(found | ({"start to ready": ready_s} if pid else {}))
    best: dict[str, dict[str, float]] = {}
    for name, rounds in samples.items():
        best[name] = {figure: min(one[figure] for one in rounds) for figure in rounds[0]}
        best[name][RATE] = max(one[RATE] for one in rounds)
    return report(best)


if __name__ == "__main__":
    sys.exit(main())
