"""How long a server is away after SIGKILL of one of its ranks, by the number of ranks.

    python bench/restart.py [--rounds 5] [server options]

Servers of one rank and of several, one of them over two nodes on this host, run side by side
without requests. In each round the last rank of each is killed, one server after the other. Seconds
from the signal until all replicas say that they are ready; ratios are to the server of one rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

from server_process import ServerProcess, free_port

from radixlm.base.errors import TransferError
from radixlm.bench.client import HttpClient

LAYOUTS = {
    "1 rank": (),
    "tp 2": ("--tp-size", "2"),
    "tp 3": ("--tp-size", "3"),
    "pp 3": ("--pp-size", "3"),
    "tp 2 x pp 2": ("--tp-size", "2", "--pp-size", "2"),
    "2 nodes": ("--tp-size", "2", "--nnodes", "2"),
}
POLL_S = 0.02
AWAY_S = 1.0  # no server is ready again before; what asks takes processor time from its start


async def is_ready(client: HttpClient) -> bool:
    """Whether all replicas of a server are ready."""
    try:
        answer = await client.ask("GET", "/get_server_info")
    except TransferError:
        return False
    return answer.status == 200 and all(one["is_ready"] for one in answer.json()["replicas"])


async def away_s(servers: list[ServerProcess]) -> float:
    """Kill the last rank of a replica; seconds until it is ready again. ``servers``: its nodes."""
    client = HttpClient(servers[0].base_url)
    with contextlib.closing(client):
        before = [rank for server in servers for rank in server.engines()]
        killed_s = time.monotonic()
        before[-1].kill()
        await asyncio.sleep(AWAY_S)
        while not await is_ready(client):
            await asyncio.sleep(POLL_S)
        return time.monotonic() - killed_s


async def started(
    stack: contextlib.AsyncExitStack, flags: list[str], log: Path
) -> list[ServerProcess]:
    """The nodes of a server, the last one first: node 0 is ready when all have joined."""
    servers = [ServerProcess(flags, log)]
    if "--nnodes" in flags:
        secret = log.with_suffix(".secret")
        secret.write_text("of two nodes on one host")
        address = f"127.0.0.1:{free_port()}"
        shared = [*flags, "--dist-init-addr", address, "--cluster-secret-file", str(secret)]
        servers = [
            ServerProcess([*shared, "--node-rank", str(node)], log.with_suffix(f".{node}.log"))
            for node in (0, 1)
        ]
    for server in reversed(servers):
        await stack.enter_async_context(server)
    return servers


async def run(rounds: int, options: list[str]) -> None:
    found: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    more = ["--cpu-threads", "1", "--max-engine-restarts", "1000", *options]
    with tempfile.TemporaryDirectory() as scratch:
        async with contextlib.AsyncExitStack() as stack:
            servers = {
                name: await started(stack, [*flags, *more], Path(scratch, f"{number}.log"))
                for number, (name, flags) in enumerate(LAYOUTS.items())
            }
            for number in range(rounds + 1):  # the first one warms up
                for name, nodes in servers.items():
                    seconds = await away_s(nodes)
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
