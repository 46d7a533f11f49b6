"""The gateway's limits, from its options: concurrency, queue, rates, tenants."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from radixlm.base.errors import ConfigError
from radixlm.router.admission import Admission, QueueConfig, slots_of, timeout_s
from radixlm.router.call import Call
from radixlm.router.tenants import TenantFile, Tenants, read_tenants
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

log = logging.getLogger(__name__)

LEAST_WAIT_S = 0.01  # a shorter wait is not taken from a request's own time


def attach(gateway: Gateway) -> None:
    """Set ``gateway.admission``. ConfigError: the file of --tenants cannot be read."""
    options = gateway.options
    path = options.tenants
    file = read_tenants(path) if path else TenantFile()
    limit = max(0, options.max_concurrent_requests) or None
    config = QueueConfig(
        limit,
        options.rate_limit_tokens_per_second or None,
        options.queue_size,
        float(options.queue_timeout_secs),
        options.fair_share or bool(path),
    )
    admission = Admission(config, Tenants(file, options.fair_share_header))
    gateway.admission, admission.metrics = admission, gateway.metrics
    gateway.metrics.gauge(
        "radix_router_waiting_requests",
        "Requests that wait, by tenant where these share.",
        lambda: {(one.name,): float(one.num_waiting) for one in admission.waiting_tenants()},
        ("tenant",),
    )
    if not admission.is_open:
        gateway.on_start.append(lambda: gateway.dispatcher.splices.append(rest_of_time))
    if path:
        gateway.every(5.0, _Reload(admission.tenants, path).tick)
    if not config.is_fair:
        return
    gateway.on_start.append(lambda: admission.rank_by_prefix(partial(cached_tokens, gateway)))
    if limit is None:
        gateway.registry.listen(lambda *_: _fit(admission, gateway.registry))
        log.info("fair shares: as many requests run as the workers tell (max_running_requests)")


def _fit(admission: Admission, workers: Iterable[Worker]) -> None:
    """Let as many run as the workers can; without any the limit stays, and requests wait."""
    able = [one for one in workers if one.is_available and one.worker_type != "prefill"]
    if able:
        told = [slots_of(one) for one in able]
        admission.resize(sum(told) if all(told) else None)


def cached_tokens(gateway: Gateway, call: Call) -> int:
    """Tokens of a prompt that some worker holds; 0 where the policy does not ask for prompts."""
    if call.prompt is None:
        return 0
    held: Mapping[str, int] = gateway.tokens.holdings.of(call.prompt)
    return max(held.values(), default=0)


def rest_of_time(call: Call, worker: Worker) -> dict[str, float]:
    """The field ``timeout`` for a worker, without the time that the request has waited here."""
    given_s, waited_s = timeout_s(call), time.monotonic() - call.arrival_s
    if given_s is None or waited_s < LEAST_WAIT_S:
        return {}
    return {"timeout": max(LEAST_WAIT_S, round(given_s - waited_s, 3))}


class _Reload:
    """Reads the file of tenants again when it changes."""

    def __init__(self, tenants: Tenants, path: str) -> None:
        self._tenants, self._path = tenants, Path(path)
        self._changed = self._path.stat().st_mtime_ns

    def tick(self) -> None:
        """Look at the file."""
        try:
            changed = self._path.stat().st_mtime_ns
            if changed == self._changed:
                return
            self._changed = changed
            file = read_tenants(str(self._path))
        except (ConfigError, OSError) as error:
            log.error("the limits of tenants stay as they are: %s", error)
            return
        self._tenants.reload(file, asyncio.get_running_loop().time())
        log.info("read %s: %d tenants", self._path, len(file.tenants))
