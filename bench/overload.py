"""Sends `--factor` (4) times more requests than the server can answer, for `--minutes`.

    python bench/overload.py --minutes 5 [server options]

First the server's capacity is measured with as many clients as it runs requests; then requests
come at a multiple of that rate. What does not fit must be refused at once with 429 or 503 and a
Retry-After; what is accepted must be answered, and not after a long wait; memory must stay.
The exit status is 1 if a claim of the table at the end is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from server_process import Sample, ServerProcess
from slo import SloCheck, render

from radixlm.base.errors import TransferError
from radixlm.base.units import format_bytes
from radixlm.bench.backends import BACKENDS, Outcome, RequestOptions
from radixlm.bench.client import HttpClient
from radixlm.bench.datasets import Row
from radixlm.bench.load import Traffic, run_load
from radixlm.bench.progress import Progress
from radixlm.bench.requester import Requester

REFUSALS = (429, 503)
KV_TOKENS = 32_768
RSS_SHARE, RSS_BYTES = 0.10, 96 << 20


def make_rows(count: int, args: argparse.Namespace, seed: int) -> list[Row]:
    """Random prompts without a common prefix; ids below 1,000 exist in every vocabulary."""
    ids = np.random.default_rng(seed).integers(100, 1000, (count, args.input_len))
    return [Row(None, row.tolist(), args.input_len, args.output_len) for row in ids]


async def watch(server: ServerProcess, samples: list[Sample]) -> None:
    """Take a sample each second until cancelled."""
    while True:
        samples.append(server.sample())
        await asyncio.sleep(1.0)


async def capacity(requester: Requester, args: argparse.Namespace) -> float:
    """Requests a second at the concurrency limit, after a warm-up round."""
    first = make_rows(args.max_running, args, seed=0)
    await asyncio.gather(*(requester.ask(row) for row in first))
    rows = make_rows(args.max_running * args.capacity_rounds, args, seed=1)
    outcomes, duration_s = await run_load(
        rows, requester.ask, Traffic(math.inf, args.max_running), Progress(len(rows), False)
    )
    failed = [outcome for outcome in outcomes if not outcome.is_ok]
    if failed:
        raise TransferError(f"a request failed before the overload: {failed[0].error}")
    return len(rows) / duration_s


def judge(
    outcomes: Sequence[Outcome], samples: Sequence[Sample], allowed_queue_s: float, is_well: bool
) -> list[SloCheck]:
    """The checks of the run."""
    statuses = Counter(outcome.status for outcome in outcomes)
    odd = {status: n for status, n in statuses.items() if status not in (200, *REFUSALS)}
    refused = [outcome for outcome in outcomes if outcome.status in REFUSALS]
    num_with_retry = sum(outcome.retry_after is not None for outcome in refused)
    broken = sum(outcome.status == 200 and not outcome.is_ok for outcome in outcomes)
    queues_s = [outcome.queue_s for outcome in outcomes if outcome.is_ok and outcome.queue_s >= 0]
    p99_s = float(np.percentile(queues_s or [math.inf], 99))
    rss = [sample.rss_bytes for sample in samples]
    most = max(RSS_SHARE * rss[0], RSS_BYTES)
    return [
        SloCheck("some are answered, some refused",
                f"{statuses[200]} and {len(refused)} of {len(outcomes)}", "both more than 0",
                statuses[200] > 0 and len(refused) > 0),
        SloCheck("no other status", str(odd or "none"), "none", not odd),
        SloCheck("refusals say Retry-After", f"{num_with_retry} of {len(refused)}", "all",
                num_with_retry == len(refused)),
        SloCheck("accepted requests are answered", f"{broken} broken", "0", broken == 0),
        SloCheck("p99 time in the queue", f"{p99_s:.2f} s", f"{allowed_queue_s:.2f} s",
                p99_s <= allowed_queue_s),
        SloCheck("memory stays", f"{format_bytes(rss[0])} -> {format_bytes(max(rss))}",
                f"+{format_bytes(most)}", max(rss) - rss[0] <= most),
        SloCheck("answers again afterwards", str(is_well), "True", is_well),
    ]  # fmt: skip


async def overload(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The exit status."""
    log = Path(args.log or Path(tempfile.mkdtemp(prefix="radixlm-overload-")) / "server.log")
    limits = ["--max-running-requests", str(args.max_running)]
    limits += ["--max-queued-requests", str(args.max_queued)]
    if "--max-total-tokens" not in options:
        # KV cache memory is resident from its first use, so a small cache is filled early
        limits += ["--max-total-tokens", str(KV_TOKENS)]
    async with ServerProcess([*limits, *options], log) as server:
        client = HttpClient(server.base_url)
        requester = Requester(client, BACKENDS["sglang"], RequestOptions("", is_stream=True))
        base = await capacity(requester, args)
        rate = args.factor * base
        count = max(int(rate * args.minutes * 60), 1)
        print(f"capacity {base:.2f} req/s; now {count} requests at {rate:.2f} req/s", flush=True)
        samples: list[Sample] = []
        watcher = asyncio.create_task(watch(server, samples))
        rows = make_rows(count, args, seed=2)
        progress = Progress(count)
        outcomes, duration_s = await run_load(rows, requester.ask, Traffic(rate, None, 3), progress)
        progress.close()
        samples.append(server.sample())
        watcher.cancel()
        last = await requester.ask(rows[0])
        client.close()
    # twice the time to empty the queue, for the noise of a shared machine
    allowed_s = args.max_queue_seconds or 2.0 * (args.max_queued + args.max_running) / base + 1.0
    checks = judge(outcomes, samples, allowed_s, last.is_ok)
    goodput = sum(outcome.is_ok for outcome in outcomes) / duration_s
    print(f"answered {goodput:.2f} req/s of {rate:.2f} ({goodput / base:.0%} of the capacity)")
    print("statuses:", dict(sorted(Counter(o.status for o in outcomes).items())))
    print(render(checks), end="")
    if args.output_file:
        record = {"factor": args.factor, "capacity": base, "goodput": goodput}
        found = {v.claim: [v.found, v.allowed, v.is_kept] for v in checks}
        with Path(args.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"verdicts": found}) + "\n")
    return int(not all(check.is_kept for check in checks))


def main() -> int:
    """The exit status: 1 if a claim is broken."""
    parser = argparse.ArgumentParser(
        description="More requests than a server of its own can answer.",
        epilog="Other options go to `radixlm serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--factor", type=float, default=4.0, help="times the measured capacity")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-queued", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--capacity-rounds", type=int, default=8, help="requests a client sends")
    parser.add_argument("--max-queue-seconds", type=float, help="allowed p99 time in the queue")
    parser.add_argument("--log", help="file for the server's output")
    parser.add_argument("--output-file", help="append the checks as a line of JSON")
    args, options = parser.parse_known_args()
    try:
        return asyncio.run(overload(args, options))
    except TransferError as error:
        print(f"overload: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
