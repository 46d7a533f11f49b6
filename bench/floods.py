"""Measures how long a plain request waits while another client floods the server.

    python bench/floods.py [--seconds 20] [--only NAME ...] [--url URL] [server options]

Each flood sends its body again and again over a few connections for `--seconds`, while a
plain request of eight tokens is sent every 50 ms. The exit status is 1 if the 99th percentile of
the plain requests exceeds one second under one of the floods, or if one of them fails.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from server_process import ServerProcess

ALLOWED_S = 1.0
REST_S = 0.05
TIMEOUT_S = 30.0
PLAIN = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
# of an answer that is read and dropped
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Flood:
    """A body that is sent to ``path`` by several connections at once."""

    name: str
    path: str
    make: Callable[[], Any]
    num_connections: int = 2


def _batch(count: int, n: int, max_tokens: int = 1) -> Callable[[], Any]:
    sampling = {"n": n, "max_new_tokens": max_tokens, "ignore_eos": True}
    return lambda: {"text": ["a"] * count, "sampling_params": sampling}


def _chat(count: int) -> Any:
    return {"messages": [{"role": "user", "content": "hi"}] * count, "max_tokens": 1}


def _logprobs(num_ids: int, top: int) -> Any:
    return {
        "input_ids": [i % 1000 + 100 for i in range(num_ids)],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top,
    }


def _response(num_bytes: int) -> Any:
    pairs = {f"key{i}": "x" * (num_bytes // 16) for i in range(16)}
    return {"input": "hi", "max_output_tokens": 1, "metadata": pairs}


FLOODS = (
    Flood("batch of 4096", "/generate", _batch(4096, 1)),
    Flood("batch of 4096, n 16", "/generate", _batch(4096, 16)),
    Flood("batch of 4096, n 256", "/generate", _batch(4096, 256)),
    Flood("batch of 4096, 500 tokens", "/generate", _batch(4096, 1, 500)),
    Flood("completions, 4096 prompts, n 128", "/v1/completions",
          lambda: {"prompt": ["a"] * 4096, "n": 128, "max_tokens": 1}),
    Flood("chat of 60,000 messages", "/v1/chat/completions", lambda: _chat(60_000)),
    Flood("tokenize 60,000 messages", "/tokenize", lambda: _chat(60_000) | {"max_tokens": None}),
    Flood("detokenize 8M ids", "/detokenize", lambda: {"tokens": [100] * 8_000_000}),
    Flood("tokenize 12M characters", "/tokenize", lambda: {"prompt": "a " * 6_000_000}),
    Flood("tokenize 12M letters", "/tokenize", lambda: {"prompt": "a" * 12_000_000}),
    Flood("tokenize 4,000 texts", "/tokenize", lambda: {"prompt": ["a b " * 700] * 4000}),
    Flood("top 2048 of 3,900 ids", "/generate", lambda: _logprobs(3900, 2048)),
    Flood("top 200 of 3,900 ids", "/generate", lambda: _logprobs(3900, 200)),
    Flood("responses with 20 MB", "/v1/responses", lambda: _response(20_000_000)),
)  # fmt: skip


@dataclass(slots=True)
class Result:
    """Seconds of the plain requests, and the statuses of both sides (0: no answer)."""

    flood: Flood
    plain_s: list[float] = field(default_factory=list)
    plain_statuses: Counter[int] = field(default_factory=Counter)
    flood_statuses: Counter[int] = field(default_factory=Counter)
    rss_bytes: int = 0

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.plain_s or [TIMEOUT_S], 99))

    @property
    def is_ok(self) -> bool:
        return self.p99_s <= ALLOWED_S and set(self.plain_statuses) == {200}

    def row(self) -> str:
        p50_s = float(np.percentile(self.plain_s or [TIMEOUT_S], 50))
        most_s = max(self.plain_s, default=TIMEOUT_S)
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(self.flood_statuses.items()))
        verdict = "ok" if self.is_ok else "TOO LONG"
        return (
            f"| {self.flood.name} | {len(self.plain_s)} | {p50_s:.2f} | {self.p99_s:.2f} | "
            f"{most_s:.2f} | {statuses} | {self.rss_bytes >> 20} | {verdict} |"
        )


def ask(url: str, path: str, body: bytes, timeout_s: float) -> int:
    """POST ``body`` and read the answer piece by piece; its status, 0 if none came."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while answer.read(PIECE_BYTES):
            pass
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def run_flood(url: str, flood: Flood, seconds: float) -> Result:
    """One flood and the plain requests beside it."""
    result, data = Result(flood), json.dumps(flood.make()).encode()
    ends_s = time.monotonic() + seconds

    def send() -> None:
        while (left_s := ends_s - time.monotonic()) > 0:
            result.flood_statuses[ask(url, flood.path, data, max(left_s, 1.0))] += 1

    threads = [threading.Thread(target=send) for _ in range(flood.num_connections)]
    for thread in threads:
        thread.start()
    plain = json.dumps(PLAIN).encode()
    while (start_s := time.monotonic()) < ends_s:
        result.plain_statuses[ask(url, "/generate", plain, TIMEOUT_S)] += 1
        result.plain_s.append(time.monotonic() - start_s)
        time.sleep(REST_S)
    for thread in threads:
        thread.join()
    return result


async def measure(args: argparse.Namespace, options: list[str]) -> AsyncIterator[Result]:
    """The chosen floods one after the other, each against a fresh server unless one is named."""
    for flood in FLOODS:
        if args.only and not any(part in flood.name for part in args.only):
            continue
        if args.url:
            yield run_flood(args.url, flood, args.seconds)
            continue
        with tempfile.TemporaryDirectory() as folder:
            async with ServerProcess(options, Path(folder) / "server.log") as server:
                ask(server.base_url, "/generate", json.dumps(PLAIN).encode(), TIMEOUT_S)
                result = run_flood(server.base_url, flood, args.seconds)
                result.rss_bytes = server.sample().rss_bytes
        yield result


async def main(args: argparse.Namespace, options: list[str]) -> int:
    """Print a table row a flood; the exit status."""
    columns = (
        "flood",
        "plain requests",
        "p50 s",
        "p99 s",
        "longest s",
        "statuses of the flood",
        "MiB",
    )
    print("| " + " | ".join(columns) + " | |")
    print("|---" * (len(columns) + 1) + "|", flush=True)
    is_ok = True
    async for result in measure(args, options):
        print(result.row(), flush=True)
        is_ok &= result.is_ok
    return 0 if is_ok else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of floods")
    parser.add_argument("--url", help="a server that runs already")
    sys.exit(asyncio.run(main(*parser.parse_known_args())))
