"""A Ray Serve application: servers of RadixLM as replicas, which grow with the queue.

    ray start --head
    RADIXLM_ARGS="--model-path /models/my-model" serve run deploy.ray.serve:app

Each replica is a `radixlm serve` of its own on a free port of its machine, and this deployment a
thin proxy before it. It is healthy while /ready answers, and drains as the server does on SIGTERM.
Environment of `serve run`: RADIXLM_ARGS (options of `radixlm serve`), RADIXLM_MIN_REPLICAS (1),
RADIXLM_MAX_REPLICAS (4), RADIXLM_QUEUE_PER_REPLICA (8 waiting requests), RADIXLM_GPUS (0).
"""

import asyncio
import ctypes
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

START_S, STOP_S = 600.0, 60.0
LOG_LINE = 1 << 26  # bytes: logged requests hold whole prompts, and a longer line ends the reader
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class GrowWithTheQueue:
    """Ray Serve's policy: one more replica for every ``queue_per_replica`` requests that wait, and
    one less while none do."""

    def __init__(self, queue_per_replica: float) -> None:
        self.queue_per_replica = queue_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and a state that Ray Serve keeps."""
        waiting = sum((context.aggregated_metrics or {}).get("num_queue_reqs", {}).values())
        most, least = context.capacity_adjusted_max_replicas, context.capacity_adjusted_min_replicas
        return self.replicas(waiting, context.target_num_replicas, least, most), {}

    def replicas(self, waiting: float, current: int, least: int, most: int) -> int:
        wanted = current + int(waiting // self.queue_per_replica) if waiting else current - 1
        return max(least, min(most, wanted))


def end_with_replica() -> None:
    """Have Linux send SIGTERM to this process when the replica that started it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@serve.deployment(
    ray_actor_options={"num_cpus": 1, "num_gpus": float(os.environ.get("RADIXLM_GPUS", "0"))},
    max_ongoing_requests=10_000,  # the server has a queue and limits of its own
    graceful_shutdown_timeout_s=STOP_S,
    health_check_period_s=5,
    health_check_timeout_s=30,
    autoscaling_config=AutoscalingConfig(
        min_replicas=int(os.environ.get("RADIXLM_MIN_REPLICAS", "1")),
        max_replicas=int(os.environ.get("RADIXLM_MAX_REPLICAS", "4")),
        upscale_delay_s=10,
        downscale_delay_s=300,
        policy=AutoscalingPolicy(
            policy_function=GrowWithTheQueue,
            policy_kwargs={
                "queue_per_replica": float(os.environ.get("RADIXLM_QUEUE_PER_REPLICA", "8"))
            },
        ),
    ),
)
class RadixLM:
    """One server, with these options of `radixlm serve`."""

    def __init__(self, args: list[str]) -> None:
        self.args = args
        self.process: asyncio.subprocess.Process | None = None
        self.session: aiohttp.ClientSession
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        """Start the server once, and wait until it is ready."""
        async with self._starting:
            if self.process is not None:
                return
            command = (sys.executable, "-m", "radixlm", "serve")
            self.process = await asyncio.create_subprocess_exec(
                *command, *self.args, "--host", "127.0.0.1", "--port", "0",
                stderr=asyncio.subprocess.PIPE, limit=LOG_LINE, preexec_fn=end_with_replica,
            )  # fmt: skip
            url = await asyncio.wait_for(self._read_url(), START_S)
            self._reader = asyncio.create_task(self._pass_on_log())
            timeout = aiohttp.ClientTimeout(total=None)
            self.session = aiohttp.ClientSession(url, timeout=timeout, auto_decompress=False)

    async def _read_url(self) -> str:
        """The address in the log line that says that the server is ready."""
        assert self.process is not None and self.process.stderr is not None
        async for line in self.process.stderr:
            print(line.decode(errors="replace"), end="", file=sys.stderr)
            found = re.search(r"ready in .*: (http://\S+) serves", line.decode(errors="replace"))
            if found:
                return found[1]
        raise RuntimeError(f"radixlm serve ended with status {await self.process.wait()}")

    async def _pass_on_log(self) -> None:
        assert self.process is not None and self.process.stderr is not None
        async for line in self.process.stderr:
            print(line.decode(errors="replace"), end="", file=sys.stderr)

    async def check_health(self) -> None:
        """Raises while the server cannot answer; Ray Serve then replaces this replica."""
        await self._start()
        assert self.process is not None
        if self.process.returncode is not None:
            raise RuntimeError(f"radixlm serve ended with status {self.process.returncode}")
        async with self.session.get("/health") as answer:
            answer.raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What ``GrowWithTheQueue`` reads."""
        await self._start()
        async with self.session.get("/get_load") as answer:
            loads = await answer.json()
        return {"num_queue_reqs": float(sum(load["num_waiting_reqs"] for load in loads))}

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer as it comes; a client that leaves aborts it."""
        await self._start()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {k: v for k, v in request.headers.items() if k not in HOP_BY_HOP}
        answer = await self.session.request(
            request.method, path, headers=headers, data=await request.body()
        )

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.content.iter_any():
                    yield piece
            finally:
                answer.close()

        kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
        return StreamingResponse(body(), answer.status, kept)

    async def __del__(self) -> None:
        """Drain: what runs may finish."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            await self.process.wait()
            await self.session.close()


app = RadixLM.bind(shlex.split(os.environ.get("RADIXLM_ARGS", "")))
