"""What workers tell of their load, asked each --load-monitor-interval seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from radixlm.base.errors import TransferError
from radixlm.router.worker import Load, State, Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

WAIT_S: Final = 5.0
MAX_TOLD: Final = 1e18  # larger numbers are none: sums of them might be infinite


def read_load(entries: Any, rank: int | None) -> Load | None:
    """A ``Load`` from the list of /v1/loads or /get_load: one entry a data-parallel rank, of which
    ``rank`` counts, or all. None if it is no such list."""
    if isinstance(entries, Mapping):
        entries = entries.get("loads")
    if not isinstance(entries, list) or not all(isinstance(one, Mapping) for one in entries):
        return None
    chosen = [one for one in entries if rank is None or one.get("dp_rank", 0) == rank]
    if not chosen:
        return None

    def total(*names: str) -> float:
        values = (next((one[n] for n in names if n in one), 0) for one in chosen)
        return float(sum(v for v in values if isinstance(v, int | float) and abs(v) < MAX_TOLD))

    return Load(
        num_queued_tokens=int(total("num_waiting_uncached_tokens", "num_waiting_tokens")),
        kv_usage=min(1.0, max(0.0, total("token_usage") / len(chosen))),
        tokens_per_s=total("gen_throughput"),
    )


class Loads:
    """Asks the workers of policies that look at loads."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._without: set[str] = set()  # ids of workers that have no /v1/loads

    async def poll(self) -> None:
        """Ask all workers at once."""
        await asyncio.gather(*(self._ask(worker) for worker in self._gateway.registry))

    async def _ask(self, worker: Worker) -> None:
        wanted = self._gateway.dispatcher.pools.of(worker).wants_load
        if worker.state is not State.READY or not wanted:
            return
        path = "/get_load" if worker.id in self._without else "/v1/loads"
        try:
            found = await self._gateway.upstream.fetch(
                worker.url, "GET", path, timeout_s=WAIT_S, api_key=worker.api_key
            )
            worker.load = read_load(orjson.loads(found.body), worker.dp_rank)
        except (TransferError, orjson.JSONDecodeError):
            worker.load = None
            return
        if found.status == 404 and path == "/v1/loads":
            self._without.add(worker.id)


def attach(gateway: Gateway) -> None:
    """Keep ``worker.load``."""
    gateway.every(gateway.options.load_monitor_interval, Loads(gateway).poll)
