"""A gateway in the test's loop, with the parts that answer data routes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from radixlm.base.record import replace
from radixlm.router import dispatch, stalled
from radixlm.router.app import Gateway
from radixlm.router.health import Health
from radixlm.router.launch import bind
from radixlm.router.metrics import RouterMetrics
from radixlm.router.options import Options
from radixlm.router.registry import Registry
from radixlm.router.worker import State, Worker
from tests.router.client import Response, ask
from tests.router.mock_worker import MockWorker


class Ticket:
    """Lets all in, and counts who has left."""

    def __init__(self) -> None:
        self.num_out = 0

    async def enter(self, call: Any) -> Ticket:
        self.num_out += 1
        return self

    def candidates(self, workers: Any) -> Any:
        return workers

    def sent(self, worker: Worker) -> None: ...

    def used(self, **_: Any) -> None: ...

    def leave(self) -> None:
        self.num_out -= 1


class Front:
    """``async with Front(workers, policy="random") as front``: workers are members at once, without
    health checks. ``front.reports``: (url, outcome) of all tries."""

    def __init__(self, workers: list[MockWorker], **options: Any) -> None:
        options = {"policy": "round_robin", "retry_initial_backoff_ms": 1} | options
        self.gateway = Gateway(replace(Options(), **options), parts=())
        gateway = self.gateway
        gateway.registry = Registry(gateway.options, gateway.upstream.fetch)
        gateway.metrics = RouterMetrics(gateway.registry)
        gateway.health = Health(gateway.registry, gateway.metrics)
        gateway.admission = self.ticket = Ticket()
        dispatch.attach(gateway)
        stalled.attach(gateway)
        self.workers = [self.join(Worker(worker.url)) for worker in workers]
        self.reports: list[tuple[str, str]] = []
        reported = gateway.health.reported

        def keep(worker: Worker, outcome: Any) -> None:
            self.reports.append((worker.url, outcome))
            reported(worker, outcome)

        gateway.health = SimpleNamespace(reported=keep)

    def join(self, worker: Worker, **facts: Any) -> Worker:
        """Make a worker a member that is ready."""
        worker.facts = {"resume_digest": "same"} | facts
        registry = self.gateway.registry
        registry._workers[worker.id] = worker
        registry.move(worker, State.READY)
        return worker

    async def __aenter__(self) -> Front:
        sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await self.gateway.start(sock)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.gateway.stop(), 5)
        self.gateway.registry.close()

    async def chat(self, **fields: Any) -> Response:
        """One chat."""
        headers = fields.pop("headers", [])
        body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]} | fields
        return await ask(self.url, "POST", "/v1/chat/completions", body, headers)

    def outcomes(self, worker: MockWorker) -> list[str]:
        """What was reported of a worker."""
        return [outcome for url, outcome in self.reports if url == worker.url]

    @property
    def is_idle(self) -> bool:
        """Whether all loads and tickets were given back."""
        free = all(not (w.num_inflight or w.num_tokens or w.streams) for w in self.workers)
        return free and not self.ticket.num_out and not self.gateway.dispatcher.memory.used
