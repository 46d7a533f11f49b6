"""Two hours (`--minutes`) of mixed load on its own server: does anything grow or leak?

    python bench/soak.py --minutes 120 [server options]
    python bench/soak.py --minutes 60 --clients 2 --rest-seconds 8   # a small load

Chats, completions and native requests, streamed and whole, long and short, some given up half
way, some nonsense. Every few seconds: resident memory, descriptors, threads, shared memory and
processor time of all processes.
The exit status is 1 if a claim of the table at the end is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from server_process import Sample, ServerProcess
from slo import SloCheck, growth, render

from radixlm.base.errors import TransferError
from radixlm.base.units import format_bytes
from radixlm.bench.client import HttpClient

RSS_SHARE, RSS_BYTES = 0.05, 64 << 20  # resident memory may grow by the larger of the two
MAX_FDS, MAX_THREADS = 8, 2
KV_TOKENS = 32_768
REQUEST_S = 120.0
SUBJECTS = "the sea, a cat, trains, snow, bread, music, a letter, the moon, a garden, chess".split(
    ", "
)
NONSENSE: tuple[tuple[str, Any], ...] = (
    ("/generate", {"text": 5}),
    ("/generate", {"sampling_params": {"temperature": -1}, "text": "x"}),
    ("/generate", {"input_ids": [-1]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": "many"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_p": 7}),
)


class Load:
    """Clients that send requests until the end time, each one after another."""

    def __init__(self, client: HttpClient, model: str, seed: int, rest_s: float = 0.0) -> None:
        """`rest_s`: mean pause of a client after a request."""
        self._client, self._model, self._rest_s = client, model, rest_s
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.num_tokens = 0

    async def run(self, end_s: float) -> None:
        """Run one client."""
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._stream_chat, 5),
            (self._stream_native, 4),
            (self._whole_completion, 4),
            (self._samples, 1),
            (self._give_up, 3),
            (self._nonsense, 2),
        ]
        works, weights = zip(*kinds, strict=True)
        while time.monotonic() < end_s:
            work = self._random.choices(works, weights)[0]
            name = work.__name__.strip("_")
            try:
                await asyncio.wait_for(work(), REQUEST_S)
                self.counts[name] += 1
            except TransferError as error:
                self.problems[f"{name}: {error}"] += 1
            except TimeoutError:
                self.problems[f"{name}: no answer in {REQUEST_S:.0f} s"] += 1
            if self._rest_s:
                rest_s = self._random.uniform(0.5, 1.5) * self._rest_s
                await asyncio.sleep(min(rest_s, max(end_s - time.monotonic(), 0.0)))

    def _prompt(self) -> str:
        """Often a shared beginning, so that the prefix cache is used; sometimes a long prompt."""
        subject = self._random.choice(SUBJECTS)
        story = f"Write about {subject}. " * self._random.choice((1, 1, 1, 8, 40))
        return f"You are a careful writer.\n{story}{self._random.randrange(1000)}"

    def _length(self) -> int:
        return self._random.choice((1, 8, 32, 32, 128))

    async def _ask(self, path: str, body: dict[str, Any], is_stream: bool) -> int:
        """Events or tokens of the answer; any status but 200 is a problem."""
        events = 0

        def on_event(data: bytes, now_s: float) -> None:
            nonlocal events
            events += 1
            if data.startswith(b'{"error"'):
                self.problems[f"{path}: {data[:200]!r}"] += 1

        response = await self._client.ask("POST", path, body, on_event if is_stream else None)
        if response.status != 200:
            self.problems[f"{path}: status {response.status} {response.body[:200]!r}"] += 1
        self.num_tokens += events
        return events

    async def _stream_chat(self) -> None:
        message = {"role": "user", "content": self._prompt()}
        body = {"model": self._model, "messages": [message], "stream": True}
        await self._ask("/v1/chat/completions", body | {"max_tokens": self._length()}, True)

    async def _stream_native(self) -> None:
        sampling = {
            "max_new_tokens": self._length(),
            "temperature": self._random.choice((0.0, 0.7, 1.2)),
            "top_p": 0.9,
            "frequency_penalty": self._random.choice((0.0, 0.4)),
            "ignore_eos": True,
        }
        body = {"text": self._prompt(), "sampling_params": sampling, "stream": True}
        await self._ask("/generate", body, True)

    async def _whole_completion(self) -> None:
        body = {"model": self._model, "prompt": self._prompt(), "max_tokens": self._length()}
        await self._ask("/v1/completions", body | {"stop": ["\n\n"], "logprobs": 2}, False)

    async def _samples(self) -> None:
        sampling = {"max_new_tokens": 16, "n": 4, "temperature": 1.0}
        await self._ask("/generate", {"text": self._prompt(), "sampling_params": sampling}, False)

    async def _give_up(self) -> None:
        """Close the connection in the middle of a stream."""
        sampling = {"max_new_tokens": 256, "ignore_eos": True}
        body = {"text": self._prompt(), "sampling_params": sampling, "stream": True}
        task = asyncio.create_task(self._ask("/generate", body, True))
        await asyncio.wait([task], timeout=self._random.uniform(0.05, 1.0))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _nonsense(self) -> None:
        path, body = self._random.choice(NONSENSE)
        response = await self._client.ask("POST", path, body)
        if not 400 <= response.status < 500:
            self.problems[f"nonsense to {path}: status {response.status}"] += 1


async def watch(server: ServerProcess, samples: list[Sample], end_s: float, gap_s: float) -> None:
    """Take samples, and print the progress on one line."""
    while time.monotonic() < end_s:
        await asyncio.sleep(min(gap_s, max(end_s - time.monotonic(), 0.01)))
        sample = server.sample()
        samples.append(sample)
        left_min = max(end_s - time.monotonic(), 0) / 60
        print(
            f"{left_min:6.1f} min left  {format_bytes(sample.rss_bytes)}  "
            f"{sample.num_fds} descriptors  {sample.num_threads} threads  "
            f"{sample.num_shared} shared  {_cpu_share(samples):.1%} of a core",
            flush=True,
        )


def _cpu_share(samples: Sequence[Sample]) -> float:
    """Share of one core that all processes used between the first and the last sample."""
    first, last = samples[0], samples[-1]
    return (last.cpu_s - first.cpu_s) / max(last.at_s - first.at_s, 1e-9)


async def settled(client: HttpClient, patience_s: float = 30.0) -> dict[str, Any]:
    """The server's own counts after the load."""
    deadline_s = time.monotonic() + patience_s
    while True:
        loads = (await client.ask("GET", "/get_load")).json() or [{}]
        if not loads[0].get("num_reqs") or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.5)
    info = (await client.ask("GET", "/get_server_info")).json() or {}
    flushed = await client.ask("POST", "/flush_cache")
    states = info.get("internal_states") or [{}]
    return {
        "num_reqs": loads[0].get("num_reqs", -1),
        "num_breaches": states[0].get("num_breaches", 0),
        "is_flushed": flushed.status == 200,
    }


def judge(samples: Sequence[Sample], load: Load, end: dict[str, Any]) -> list[SloCheck]:
    """The checks of the run."""
    rss = growth([float(s.rss_bytes) for s in samples])
    fds = growth([float(s.num_fds) for s in samples])
    threads = growth([float(s.num_threads) for s in samples])
    shared = growth([float(s.num_shared) for s in samples])
    processes = {s.num_processes for s in samples}
    most = max(RSS_SHARE * rss[0], RSS_BYTES)
    problems = sum(load.problems.values())
    return [
        SloCheck("memory does not grow", _change(rss, format_bytes), f"+{format_bytes(most)}",
                rss[1] - rss[0] <= most),
        SloCheck("descriptors do not grow", _change(fds, "{:.0f}".format), f"+{MAX_FDS}",
                fds[1] - fds[0] <= MAX_FDS),
        SloCheck("threads do not grow", _change(threads, "{:.0f}".format), f"+{MAX_THREADS}",
                threads[1] - threads[0] <= MAX_THREADS),
        SloCheck("shared memory does not grow", _change(shared, "{:.0f}".format), "+0",
                shared[1] <= shared[0]),
        SloCheck("no process died or was added", str(sorted(processes)), "one number",
                len(processes) == 1),
        SloCheck("no request failed", f"{problems} of {load.counts.total()}", "0", problems == 0),
        SloCheck("nothing runs at the end", str(end["num_reqs"]), "0", end["num_reqs"] == 0),
        SloCheck("the KV accounting balances", f"{end['num_breaches']} breaches", "0",
                not end["num_breaches"]),
        SloCheck("the cache can be emptied", str(end["is_flushed"]), "True", end["is_flushed"]),
    ]  # fmt: skip


def _change(pair: tuple[float, float], shown: Callable[[float], str]) -> str:
    return f"{shown(pair[0])} -> {shown(pair[1])}"


async def soak(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The exit status."""
    log = Path(args.log or Path(tempfile.mkdtemp(prefix="radixlm-soak-")) / "server.log")
    samples: list[Sample] = []
    if "--max-total-tokens" not in options:
        # KV cache memory is resident from its first use, so a small cache is filled early
        options = ["--max-total-tokens", str(KV_TOKENS), *options]
    async with ServerProcess(options, log) as server:
        client = HttpClient(server.base_url)
        model = (await client.ask("GET", "/v1/models")).json()["data"][0]["id"]
        load = Load(client, model, args.seed, args.rest_seconds)
        end_s = time.monotonic() + args.minutes * 60
        clients = [load.run(end_s) for _ in range(args.clients)]
        await asyncio.gather(watch(server, samples, end_s, args.sample_seconds), *clients)
        end = await settled(client)
        client.close()
    checks = judge(samples, load, end)
    print(f"\n{args.minutes:g} min, {load.num_tokens} events; requests: {dict(load.counts)}")
    print(f"processor time: {_cpu_share(samples):.2%} of one core")
    for problem, count in load.problems.most_common(10):
        print(f"{count} x {problem}")
    print(render(checks), end="")
    if args.output_file:
        record = {"minutes": args.minutes, "requests": dict(load.counts)}
        record["cpu_share"] = _cpu_share(samples)
        record["verdicts"] = {v.claim: [v.found, v.allowed, v.is_kept] for v in checks}
        with Path(args.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    is_kept = all(check.is_kept for check in checks)
    if not is_kept:
        print(f"the server's log: {log}")
    return int(not is_kept)


def main() -> int:
    """The exit status: 1 if a claim is broken."""
    parser = argparse.ArgumentParser(
        description="Mixed load on a server of its own; does anything grow or leak?",
        epilog="Other options go to `radixlm serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=12, help="requests at once")
    parser.add_argument("--rest-seconds", type=float, default=0.0, help="between two of a client")
    parser.add_argument("--sample-seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", help="file for the server's output")
    parser.add_argument("--output-file", help="append the checks as a line of JSON")
    args, options = parser.parse_known_args()
    try:
        return asyncio.run(soak(args, options))
    except TransferError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
