"""How long a server is away after SIGKILL of one of its ranks, by the number of ranks.

    python bench/restart.py [--rounds 5] [server options]

Servers of one rank, of two and of four run side by side without requests. In each round the last
rank of each is killed, one server after the other. Seconds from the signal until all replicas say
that they are ready; ratios are to the server of one rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from server_process import ServerProcess

from radixlm.base.errors import TransferError
from radixlm.bench.client import HttpClient

LAYOUTS = {
    "1 rank": (),
    "tp 2": ("--tp-size", "2"),
    "tp 2 x pp 2": ("--tp-size", "2", "--pp-size", "2"),
}


async def is_ready(client: HttpClient) -> bool:
    """Whether all replicas of a server are ready."""
    try:
        answer = await client.ask("GET", "/get_server_info")
    except TransferError:
        return False
    return answer.status == 200 and all(one["is_ready"] for one in answer.json()["replicas"])


async def away_s(server: ServerProcess) -> float:
    """Kill the last rank of a server; seconds until it is ready again."""
    client = HttpClient(server.base_url)
    with contextlib.closing(client):
        before = server.engines()
        killed_s = time.monotonic()
        before[-1].kill()
        psutil.wait_procs(before, timeout=60)
        while len(server.engines()) < len(before) or not await is_ready(client):
            await asyncio.sleep(0.01)
        return time.monotonic() - killed_s


async def run(rounds: int, options: list[str]) -> None:
    found: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as scratch:
        async with contextlib.AsyncExitStack() as stack:
            servers = {}
            for number, (name, flags) in enumerate(LAYOUTS.items()):
                more = ["--cpu-threads", "1", "--max-engine-restarts", "1000", *options]
                server = ServerProcess([*flags, *more], Path(scratch, f"{number}.log"))
                servers[name] = await stack.enter_async_context(server)
            for number in range(rounds + 1):  # the first one warms up
                for name, server in servers.items():
                    seconds = await away_s(server)
                    if number:
                        found[name].append(seconds)
    one = statistics.median(found["1 rank"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{name:12} {median:6.2f} s (min {min(seconds):.2f}), ratio {median / one:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    args, options = parser.parse_known_args()
    asyncio.run(run(args.rounds, options))


if __name__ == "__main__":
    main()
