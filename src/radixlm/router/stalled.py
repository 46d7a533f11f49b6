"""Calls at a worker that no longer answers its health checks: a process that hangs, a machine that
is gone without a word. They go elsewhere, where somebody can take them."""

from __future__ import annotations

from typing import Any

from radixlm.router.registry import Event
from radixlm.router.worker import State, Worker


def attach(gateway: Any) -> None:
    """Listen for workers that become unhealthy."""

    def on_worker(event: Event, worker: Worker) -> None:
        if worker.state is State.UNHEALTHY:
            abandon(gateway, worker)
        elif worker.state is State.READY:  # for calls that nobody could take before
            for other in gateway.registry:
                if other.state is State.UNHEALTHY:
                    abandon(gateway, other)

    gateway.registry.listen(on_worker)


def abandon(gateway: Any, worker: Worker) -> None:
    """Move the streams of ``worker`` that can move; try calls again that have no answer yet.
    What has begun and cannot move is left: it may still be alive."""
    pool = gateway.registry.stand_ins(worker)
    for stream in list(worker.streams):
        if any(stream.journal.can_resume(other) for other in pool):
            stream.move()
    if pool:
        gateway.upstream.abandon(worker.url)
