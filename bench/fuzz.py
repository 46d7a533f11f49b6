"""100,000 (`--count`) malformed requests over keep-alive connections.

    python bench/fuzz.py --count 100000 --minutes 60 [server options]

Bodies are made of the fields that the server's own OpenAPI document names, with values that hurt:
wrong types, huge and broken numbers, lone surrogates, depth, length, half of a body, bytes that are
no JSON, bytes that are no HTTP. Between them come plain requests, which must be answered. No
request may hang, end in a 5xx other than an honest 501, 503 or 507, or cost the engine its life.
The exit status is 1 if a claim of the table at the end is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server_process import Sample, ServerProcess
from slo import SloCheck, render

from radixlm.base.errors import TransferError
from radixlm.base.units import format_bytes
from radixlm.bench.client import HttpClient

HANG_S = 60.0
HONEST = (501, 503, 507)
RSS_BYTES = 96 << 20
SHOWN = 20
# routes that stop or slow the server, wait, or write logs by design
LEFT_OUT = frozenset(
    "/pause_generation /continue_generation /slow_down /flush_cache /configure_logging "
    "/release_memory_occupation /resume_memory_occupation /start_profile /stop_profile".split()
)
LIMITS = (
    *("--context-length", "512", "--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--max-queued-requests", "64", "--request-timeout-s", "10", "--cpu-threads", "1"),
    *("--max-request-bytes", "1000000"),
)
PLAIN = ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
NASTY_TEXT = (
    "", "\0", "\ud800", "\udfff\ud800", "a" * 10_000, "\u202e", "{{7*7}}", "{% for x in y %}",
    "../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "' OR 1=1 --", "(a+)+$",
    "(" * 500, "[" * 500, "\\", "%00%ff", "\r\nSet-Cookie: x", "null", "NaN", "-1", "1e999", "true",
    "data:image/png;base64,AAAA", "<|im_end|>", "<|im_start|>system", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "e\u0301" * 300,
)  # fmt: skip
NASTY_NUMBERS = (
    0, -1, 1, 2, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    10**30, -(2**63) - 1, 0.0, -0.0, 1e-320, 1e308, 0.1, 1.5, -1.5,
)  # fmt: skip


class Maker:
    """Draws requests from one seed."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._random = random.Random(seed)
        self._routes: list[tuple[str, str, list[str]]] = []
        schemas = document.get("components", {}).get("schemas", {})
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if path not in LEFT_OUT:
                    self._routes.append((method.upper(), path, _fields(operation, schemas)))
        self._all_fields = sorted({f for _, _, fields in self._routes for f in fields})

    def make(self) -> tuple[bytes, bool]:
        """(bytes of one request, whether it is a plain one that must be answered with 200)."""
        kind = self._random.random()
        if kind < 0.02:
            return _message("POST", PLAIN[0], json.dumps(PLAIN[1]).encode()), True
        if kind < 0.05:
            return self._no_http(), False
        method, path, fields = self._random.choice(self._routes)
        while "{" in path:
            before, _, rest = path.partition("{")
            path = before + self._in_path() + rest.partition("}")[2]
        if method in ("GET", "HEAD", "DELETE") and self._random.random() < 0.9:
            return _message(method, path + self._query(fields), b""), False
        return _message(method, path, self._body(fields), self._header()), False

    def _in_path(self) -> str:
        texts = ("x", "%2e%2e", "..%2f..", "%00", "file-" + "0" * 24, "%ff", "a" * 2000, "batch_1")
        return self._random.choice(texts)

    def _query(self, fields: Sequence[str]) -> str:
        if self._random.random() < 0.5:
            return ""
        name = self._random.choice([*fields, "limit", "after", "dp_rank", "include", "x"])
        return f"?{name}={self._random.choice(('', '-1', '1e9', '%00', '%ff', 'NaN', 'a' * 3000))}"

    def _header(self) -> bytes:
        return self._random.choice(
            (
                *[b""] * 12,
                b"Authorization: Bearer \xff\r\n",
                b"X-Request-Id: " + b"x" * 5000 + b"\r\n",
                b"Content-Encoding: gzip\r\n",
                b"Content-Type: text/plain\r\n",
                b"Expect: 100-continue\r\n",
                b"X-A: \x01\x02\r\n",
                b"Accept: */*;q=broken\r\n",
            )
        )

    def _body(self, fields: Sequence[str]) -> bytes:
        kind = self._random.random()
        if kind < 0.05:
            return self._random.randbytes(self._random.randrange(200))
        if kind < 0.08:
            return b"[" * self._random.choice((10, 1000, 100_000))
        body: dict[str, Any] = dict(self._sane()) if self._random.random() < 0.7 else {}
        names = [*fields, *fields, *self._random.sample(self._all_fields, 3)]
        for _ in range(self._random.choice((1, 1, 1, 2, 5))):
            place: Any = body
            if self._random.random() < 0.4 and isinstance(body.get("sampling_params"), dict):
                place = body["sampling_params"]
            place[self._random.choice(names)] = self._value(0)
        data = json.dumps(body).encode()
        if kind < 0.12:
            return data[: self._random.randrange(len(data) + 1)]
        if kind < 0.16:
            spoiled = bytearray(data)
            for _ in range(self._random.randint(1, 5)):
                spoiled[self._random.randrange(len(spoiled))] = self._random.randrange(256)
            return bytes(spoiled)
        return data

    def _sane(self) -> dict[str, Any]:
        """A valid body for some route, so that the damage in it is reached."""
        message = {"role": "user", "content": "hi"}
        return self._random.choice(
            (
                {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
                {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "n": 2}},
                {"prompt": "hi", "max_tokens": 2},
                {"messages": [message], "max_tokens": 2},
                {"messages": [message], "max_tokens": 2, "stream": True},
                {"input": "hi", "max_output_tokens": 2},
                {"model": "radix-tiny", "prompt": "hi", "options": {"num_predict": 2}},
            )
        )

    def _value(self, depth: int) -> Any:
        kind = self._random.randrange(9 if depth < 4 else 5)
        if kind == 0:
            return self._random.choice((None, True, False, float("nan"), float("inf")))
        if kind in (1, 2):
            return self._random.choice(NASTY_NUMBERS)
        if kind in (3, 4):
            return self._random.choice(NASTY_TEXT)
        if kind == 5:
            return [self._value(depth + 1) for _ in range(self._random.choice((0, 1, 2, 30)))]
        if kind == 6:
            return [self._random.choice(NASTY_NUMBERS)] * self._random.choice((1, 100, 5000))
        names = self._random.sample(self._all_fields, self._random.randint(0, 3))
        return {name: self._value(depth + 1) for name in names}

    def _no_http(self) -> bytes:
        return self._random.choice(
            (
                self._random.randbytes(self._random.randrange(1, 300)) + b"\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"POST /generate HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
                b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
                b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
                b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
                b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40 + b"\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
        )


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    """Field names of a body and parameter names of a query."""
    names = [p["name"] for p in operation.get("parameters", ()) if p.get("in") == "query"]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content.get("schema", {})
        schema = schemas.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
        names += schema.get("properties", {})
    return names or ["x"]


def _message(method: str, path: str, body: bytes, header: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head.encode() + header + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


class Prober:
    """Sends the maker's requests over several connections and counts the answers."""

    def __init__(self, port: int, maker: Maker, most: int, end_s: float) -> None:
        self._port, self._maker, self._most, self._end_s = port, maker, most, end_s
        self.statuses: Counter[int] = Counter()  # 0: the connection was closed without an answer
        self.honest: Counter[tuple[int, str]] = Counter()  # (status, message of the server)
        self.bad: list[tuple[str, bytes]] = []
        self.sent = 0
        self.num_hangs = 0
        self.num_plain_failed = 0

    async def run(self) -> None:
        """One connection after another, many requests on each."""
        writer: asyncio.StreamWriter | None = None
        while self.sent < self._most and time.monotonic() < self._end_s:
            self.sent += 1
            data, is_plain = self._maker.make()
            status, is_open = 0, False
            try:
                async with asyncio.timeout(HANG_S):
                    if writer is None:
                        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    writer.write(data)
                    status, is_open, said = await _answer(reader, data.startswith(b"HEAD"))
                    if status in HONEST:
                        self.honest[status, _message_of(said)] += 1
            except TimeoutError:
                self.num_hangs += 1
                self._note("no answer", data)
            except (OSError, ValueError, asyncio.IncompleteReadError):
                pass  # closed
            self.statuses[status] += 1
            if status >= 500 and status not in HONEST:
                self._note(f"status {status}", data)
            if is_plain and status != 200 and status not in (429, *HONEST):
                self.num_plain_failed += 1
                self._note(f"a plain request: status {status}", data)
            if not is_open and writer is not None:
                writer.close()
                writer = None
        if writer is not None:
            writer.close()

    def _note(self, what: str, data: bytes) -> None:
        if len(self.bad) < 1000:
            self.bad.append((what, data[:20_000]))


def _message_of(body: bytes) -> str:
    """The error message without numbers, so that equal errors are counted together."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return re.sub(r"\d+(\.\d+)?", "#", text)[:160]


async def _answer(reader: asyncio.StreamReader, is_head: bool) -> tuple[int, bool, bytes]:
    """(status, whether the connection can be used again, body) of one whole answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    status = int(lines[0].split()[1])
    if status == 100:
        return await _answer(reader, is_head)
    headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
    body = b""
    if headers.get(b"transfer-encoding") == b"chunked":
        while (size := int(await reader.readline(), 16)) > 0:
            await reader.readexactly(size + 2)
        await reader.readline()
    elif not is_head and status not in (204, 304):
        body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    return status, headers.get(b"connection") != b"close", body


async def engine_pid(client: HttpClient) -> int:
    info = (await client.ask("GET", "/get_server_info")).json() or {}
    return int(info.get("engine", {}).get("pid", 0))


def judge(
    prober: Prober, before: Sample, after: Sample, pids: tuple[int, int], is_well: bool
) -> list[SloCheck]:
    """The checks of the run."""
    bad = sum(n for status, n in prober.statuses.items() if status >= 500 and status not in HONEST)
    most = format_bytes(RSS_BYTES)
    return [
        SloCheck("no 5xx but honest ones", str(bad), "0", not bad),
        SloCheck("nothing hangs", str(prober.num_hangs), "0", not prober.num_hangs),
        SloCheck("plain requests are answered", f"{prober.num_plain_failed} failed", "0",
                not prober.num_plain_failed),
        SloCheck("the engine lives on", f"{pids[0]} -> {pids[1]}", "the same process",
                pids[0] == pids[1] != 0),
        SloCheck("and never starts anew", str(num_renewed := sum(
            n for (_, said), n in prober.honest.items() if "restarts" in said)), "0",
            not num_renewed),
        SloCheck("memory stays",
                f"{format_bytes(before.rss_bytes)} -> {format_bytes(after.rss_bytes)}",
                f"+{most}", after.rss_bytes - before.rss_bytes <= RSS_BYTES),
        SloCheck("descriptors stay", f"{before.num_fds} -> {after.num_fds}", "+8",
                after.num_fds - before.num_fds <= 8),
        SloCheck("answers again afterwards", str(is_well), "True", is_well),
    ]  # fmt: skip


async def fuzz(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The exit status."""
    folder = Path(args.folder or tempfile.mkdtemp(prefix="radixlm-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*LIMITS, "--file-storage-path", str(folder / "files"), *options]
    async with ServerProcess(flags, folder / "server.log") as server:
        client = HttpClient(server.base_url)
        document = (await client.ask("GET", "/openapi.json")).json()
        end_s = time.monotonic() + args.minutes * 60
        warm = Prober(server.port, Maker(document, args.seed + 1), args.count // 20, end_s)
        await asyncio.gather(*(warm.run() for _ in range(args.connections)))
        before, pid, began_s = server.sample(), await engine_pid(client), time.monotonic()
        prober = Prober(server.port, Maker(document, args.seed), args.count, end_s)
        await asyncio.gather(*(prober.run() for _ in range(args.connections)))
        took_s = time.monotonic() - began_s
        await asyncio.sleep(2.0)  # abandoned requests end
        after, pids = server.sample(), (pid, await engine_pid(client))
        is_well = (await client.ask("POST", *PLAIN)).status == 200
        client.close()
    for number, (what, data) in enumerate(prober.bad):
        (folder / f"bad-{number}.bin").write_bytes(data)
        if number < SHOWN:
            print(f"{what}: {data[:200]!r} ({folder}/bad-{number}.bin)")
    print(f"{prober.sent} requests in {took_s:.0f} s, seed {args.seed}")
    print("statuses:", dict(sorted(prober.statuses.items())))
    for (status, said), number in prober.honest.most_common(SHOWN):
        print(f"{number} x {status}: {said}")
    checks = judge(prober, before, after, pids, is_well)
    print(render(checks), end="")
    return int(not all(check.is_kept for check in checks))


def main() -> int:
    """The exit status: 1 if a claim is broken."""
    parser = argparse.ArgumentParser(
        description="Requests that no client should send, to a server of its own.",
        epilog="Other options go to `radixlm serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="for the server's log and what went wrong")
    args, options = parser.parse_known_args()
    try:
        return asyncio.run(fuzz(args, options))
    except TransferError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
