"""Five minutes (`--minutes`) of drawn requests through two prefill and two decode servers with
tiers, while each process in turn is killed with SIGKILL: does any answer differ from one plain
server's?

    PYTHONPATH=src python bench/soak_pages.py --minutes 5
    PYTHONPATH=src python bench/soak_pages.py --requests 2000 --kill-seconds 15
    PYTHONPATH=src python bench/soak_pages.py --requests 500 --router PYTHON

With --router the pairs are drawn by SGLang's router 0.3.2 in PD mode, which PYTHON can import
(`pip install sglang-router==0.3.2`).

One prefill server keeps pages on a full disk (a tmpfs of 1 MB; in a folder where none can be
mounted), the other in a slow store; both decode servers use one folder, the second with write_back.
A request that a killed server has taken along is sent again. The exit status is 1 if an answer
differs, or if nothing was killed or moved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from server_process import ServerProcess, free_port

from radixlm.base.errors import TransferError
from radixlm.bench.client import HttpClient
from radixlm.tiers.stores.base import StoreOptions

NUM_BODIES = 300
RETRY_S = 90.0
KV = ("--max-total-tokens", "4096", "--max-engine-restarts", "1000", "--enable-metrics")
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "1",
         "--hicache-storage-prefetch-policy", "timeout")  # fmt: skip
MOVED = ("kv_pulls_whole", "prefetched_tokens_total", "backuped_tokens_total")
WORDS = "the capital of France is Paris 17 and 25 quick brown fox list code dog".split()


class SlowStore:
    """A store in memory whose answers take up to 0.3 s; for --hicache-storage-backend dynamic."""

    Options = StoreOptions
    medium = "EXTERNAL"

    def __init__(self, options: dict[str, Any], namespace: str) -> None:
        self._values: dict[str, bytes] = {}
        self._random = random.Random(1)

    def open(self) -> None:
        """It is there."""

    def _wait(self) -> None:
        time.sleep(0.3 * self._random.random() ** 3)

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._wait()
        return [name in self._values for name in names]

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        self._wait()
        sizes = []
        for name, buffer in zip(names, buffers, strict=True):
            value = self._values.get(name)
            is_there = value is not None and len(value) <= len(buffer)
            if value is not None and is_there:
                buffer[: len(value)] = value
            sizes.append(len(value) if value is not None and is_there else -1)
        return sizes

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        self._wait()
        self._values.update(zip(names, map(bytes, values), strict=True))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._values.pop(name, None)

    def clear(self) -> None:
        self._values.clear()

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to give up."""


def draw_bodies(seed: int) -> list[dict[str, Any]]:
    """Requests of 40 conversations that share their heads; some sampled, with log-probabilities,
    with a grammar, two answers."""
    rng = random.Random(seed)
    heads = [[rng.choice(WORDS) for _ in range(rng.choice([20, 120, 300]))] for _ in range(8)]
    chats = [rng.choice(heads) + [rng.choice(WORDS) for _ in range(30)] for _ in range(40)]
    bodies = []
    for number in range(NUM_BODIES):
        words = rng.choice(chats)
        sampling: dict[str, Any] = {
            "max_new_tokens": rng.choice([1, 8, 40]),
            "temperature": rng.choice([0, 0.9]),
            "sampling_seed": number,
            "n": rng.choice([1, 1, 1, 2]),
        }
        if rng.random() < 0.15:
            sampling["json_schema"] = '{"type": "object", "properties": {"a": {"type": "string"}}}'
        body = {"text": " ".join(words[: rng.randint(5, len(words))]), "sampling_params": sampling}
        bodies.append(body | {"return_logprob": rng.random() < 0.3})
    return bodies


def facts(answer: Any) -> list[Any]:
    """What must be equal in two answers: log-probabilities as float32, which they are, since a
    router that reads and writes JSON changes the last digit of some."""
    found = []
    for one in answer if isinstance(answer, list) else [answer]:
        logprobs = one["meta_info"].get("output_token_logprobs") or ()
        found.append((one["output_ids"], [(np.float32(p), token) for p, token, _ in logprobs]))
    return found


class Soak:
    """The load, and what was found. ``servers``: two for prefill, then two for decode, then the
    plain one."""

    def __init__(
        self, servers: Sequence[ServerProcess], ports: Sequence[int], seed: int, router: str = ""
    ) -> None:
        """``router``: the address of a router before the pairs; else they are drawn here."""
        self.servers, self._ports = servers, ports
        self._router = HttpClient(router) if router else None
        self.clients = [HttpClient(server.base_url) for server in servers]
        self.bodies, self._random = draw_bodies(seed), random.Random(seed)
        self._wanted: dict[int, Any] = {}
        self.counts: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    async def run_client(self, end_s: float, max_requests: int) -> None:
        """One request after another."""
        while time.monotonic() < end_s and self.counts["requests"] < max_requests:
            self.counts["requests"] += 1
            number = self._random.randrange(NUM_BODIES)
            if number not in self._wanted:
                plain = await self.clients[4].ask("POST", "/generate", self.bodies[number])
                self._wanted[number] = facts(plain.json())
            got = await self._ask_pair(self.bodies[number])
            if got is None:
                self.counts["never answered"] += 1
            elif got != self._wanted[number]:
                self.counts["different"] += 1
                print(f"differs: {json.dumps(self.bodies[number])}\n  {got}", flush=True)
            else:
                self.counts["equal"] += 1

    async def _ask_pair(self, body: dict[str, Any]) -> Any:
        """The answer of a drawn pair; again where a server died with the request."""
        until_s = time.monotonic() + RETRY_S
        while time.monotonic() < until_s:
            if self._router is not None:
                calls = [self._router.ask("POST", "/generate", body)]
            else:
                first, second = self._random.randrange(2), 2 + self._random.randrange(2)
                fields = {
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_port": self._ports[first],
                    "bootstrap_room": self._random.getrandbits(63),
                }
                calls = [
                    self.clients[i].ask("POST", "/generate", body | fields) for i in (first, second)
                ]
            *_, answer = await asyncio.gather(*calls, return_exceptions=True)
            if not isinstance(answer, BaseException) and answer.status == 200:
                return facts(answer.json())
            self.counts["sent again"] += 1
            await asyncio.sleep(0.2)
        return None

    async def run_kills(self, end_s: float, every_s: float) -> None:
        """Kill an engine, then a whole server, of each of the four in turn."""
        turn = 0
        while time.monotonic() + every_s < end_s:
            await asyncio.sleep(every_s)
            server, is_whole = self.servers[turn // 2 % 4], bool(turn % 2)
            await self.note_moved()
            server.kill(is_whole=is_whole)
            self.counts["servers killed" if is_whole else "engines killed"] += 1
            if is_whole:
                await server.__aenter__()
            turn += 1

    async def note_moved(self) -> None:
        """Add up the metrics of servers; they begin anew with each start."""
        for server, client in zip(self.servers[:4], self.clients, strict=False):
            with contextlib.suppress(TransferError, OSError):
                text = (await client.ask("GET", "/metrics")).body.decode()
                for name in MOVED:
                    values = (line.rpartition(" ")[2] for line in text.splitlines()
                              if line.split("{")[0].endswith(f":{name}"))  # fmt: skip
                    key = f"{name} {server.port}"
                    self.moved[key] = max(self.moved[key], int(sum(map(float, values))))


@contextlib.asynccontextmanager
async def sglang_router(
    python: str, servers: Sequence[ServerProcess], ports: Sequence[int], log: Path
) -> AsyncIterator[str]:
    """The address of SGLang's router before two prefill and two decode servers."""
    port = free_port()
    command = [python, "-m", "sglang_router.launch_router", "--pd-disaggregation",
               "--host", "127.0.0.1", "--port", str(port), "--policy", "random"]  # fmt: skip
    for server, bootstrap in zip(servers, ports, strict=False):
        command += ["--prefill", server.base_url, str(bootstrap)]
    for server in servers[2:4]:
        command += ["--decode", server.base_url]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + 120
    client = HttpClient(url)
    try:
        while True:
            with contextlib.suppress(TransferError, OSError):
                if (await client.ask("GET", "/health")).status == 200:
                    break
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the router did not start:\n{log.read_text()[-3000:]}")
            await asyncio.sleep(0.2)
        yield url
    finally:
        client.close()
        process.kill()
        process.wait()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 1 MB, where one can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    print(f"full disk: {'yes' if is_mounted else 'no: none can be mounted here'}")
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def flags_of(home: Path, disk: Path, ports: Sequence[int]) -> list[tuple[str, ...]]:
    """Of two prefill and two decode servers, and a plain one."""

    def storage(name: str, **extra: Any) -> tuple[str, ...]:
        text = json.dumps(extra)
        return (*TIERS, "--hicache-storage-backend", name,
                "--hicache-storage-backend-extra-config", text)  # fmt: skip

    slow = storage("dynamic", module_path="soak_pages", class_name="SlowStore")
    full = storage("file", directory=str(disk), min_free_gb=1e-6, max_size_gb=1)
    shared = storage("file", directory=str(home / "shared"), max_size_gb=1)
    mode, port = "--disaggregation-mode", "--disaggregation-bootstrap-port"
    return [
        (*KV, *full, mode, "prefill", port, str(ports[0])),
        (*KV, *slow, mode, "prefill", port, str(ports[1])),
        (*KV, *shared, mode, "decode"),
        (*KV, *shared, mode, "decode", "--hicache-write-policy", "write_back"),
        ("--max-total-tokens", "4096"),
    ]


async def soak(args: argparse.Namespace) -> int:
    """The exit status."""
    ports = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="radixlm-soak-") as name:
        home = Path(name)
        async with contextlib.AsyncExitStack() as stack:
            disk = stack.enter_context(small_disk(home / "disk"))
            servers = [
                await stack.enter_async_context(ServerProcess(flags, home / f"{i}.log"))
                for i, flags in enumerate(flags_of(home, disk, ports))
            ]
            url = ""
            if args.router:
                router = sglang_router(args.router, servers, ports, home / "router.log")
                url = await stack.enter_async_context(router)
            made = Soak(servers, ports, args.seed, url)
            end_s = time.monotonic() + args.minutes * 60
            kills = asyncio.create_task(made.run_kills(end_s, args.kill_seconds))
            clients = (made.run_client(end_s, args.requests) for _ in range(args.clients))
            await asyncio.gather(*clients)
            kills.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await kills
            await made.note_moved()
            for i, server in enumerate(servers):
                if "Traceback" in (log := server.log.read_text(errors="replace")):
                    made.counts["tracebacks"] += log.count("Traceback")
                    print(f"server {i}:\n{log[log.index('Traceback') :][:3000]}")
    print(dict(made.counts), dict(made.moved), sep="\n")
    counts = made.counts
    is_bad = counts["different"] or counts["never answered"] or counts["tracebacks"]
    is_idle = not counts["engines killed"] or not any(made.moved.values())
    return int(bool(is_bad or is_idle))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=10**9, help="end after so many")
    parser.add_argument("--clients", type=int, default=6, help="requests at once")
    parser.add_argument("--kill-seconds", type=float, default=5.0, help="between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router", metavar="PYTHON", help="draw pairs by SGLang's router")
    args = parser.parse_args()
    here = str(Path(__file__).parent)  # for SlowStore
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(":")])
    return asyncio.run(soak(args))


if __name__ == "__main__":
    sys.exit(main())
