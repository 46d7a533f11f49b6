"""The control part of the gateway: registry, health, keys, and the routes that concern workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlm.router import admin, spread, workers_api
from radixlm.router.auth import Auth
from radixlm.router.health import TICK_S, Health
from radixlm.router.registry import Event, Registry
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway


def attach(gateway: Gateway) -> None:
    """Make registry, health and auth, their routes, and join the workers of the options."""
    options, registry = gateway.options, Registry(gateway.options, gateway.upstream.fetch)
    gateway.registry = registry
    gateway.health = Health(registry, gateway.metrics, gateway.upstream.num_received)
    if gateway.metrics is not None:
        registry.on_move = gateway.metrics.worker_state
    gateway.auth = Auth(options, gateway.upstream.fetch)
    gateway.every(TICK_S, gateway.health.tick)
    gateway.on_stop.append(registry.close)

    def join() -> None:
        for worker in _workers(gateway):
            registry.add(worker)

    def forget(event: Event, worker: Worker) -> None:
        if event == "left" and not registry.find(worker.url):
            gateway.upstream.forget(worker.url)

    gateway.on_start.append(join)
    registry.listen(forget)
    admin.attach(gateway)
    spread.attach(gateway)
    workers_api.attach(gateway)


def _workers(gateway: Gateway) -> list[Worker]:
    options = gateway.options
    if not options.pd_disaggregation:
        return [Worker(url) for url in options.worker_urls]
    prefill = [
        Worker(url, worker_type="prefill", bootstrap_port=port)
        for url, port in options.prefill_urls
    ]
    return prefill + [Worker(url, worker_type="decode") for url in options.decode]
