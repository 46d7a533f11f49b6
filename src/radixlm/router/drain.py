"""Drain: a worker gets nothing new, and what it has ends or goes on at others.

A worker that begins to stop is seen at once: the gateway always has one request ``GET
/ready?wait_s=`` open at each server, which a RadixLM server answers when it starts to drain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from radixlm.base.errors import InvalidRequest, TransferError
from radixlm.base.record import Record
from radixlm.router.answer import Answer, json_answer
from radixlm.router.call import Call
from radixlm.router.registry import Event
from radixlm.router.worker import State, Worker
from radixlm.router.workers_api import Workers

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

log = logging.getLogger(__name__)

WAIT_S = 20.0  # how long a server holds GET /ready?wait_s=
POLL_S = 0.02
RETRY_S = 1.0  # after a broken connection
RETURN_POLL_S = 0.5  # between two looks whether a drained worker is back


class Drained(Record):
    """What became of a drain. ``moved``: streams that went on at others; ``left``: requests that
    still run there, because its time was over."""

    moved: int
    left: int
    seconds: float


class Drainer:
    """Drains workers, and takes them back when they were restarted."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._registry = gateway, gateway.registry
        self._ended: set[str] = set()  # urls of drained servers whose process has ended
        self._returning: set[str] = set()

    async def drain(
        self,
        worker: Worker,
        deadline_s: float,
        timeout_s: float,
        *,
        can_move: bool = True,
        why: str = "drained",
    ) -> Drained:
        """Give a server, with all its ranks, nothing new; after ``deadline_s`` move its streams;
        return when nothing runs there, or after ``timeout_s``."""
        ranks = self._registry.find(worker.url)
        for one in ranks:
            self._registry.move(one, State.DRAINING, why)
        if worker.url not in self._returning:
            self._returning.add(worker.url)
            self._gateway.spawn(self._return(worker))
        loop, num_moved = asyncio.get_running_loop(), 0
        began_s = loop.time()
        while (left := sum(one.num_inflight for one in ranks)) and (
            loop.time() - began_s < timeout_s
        ):
            if can_move and loop.time() - began_s >= deadline_s:
                num_moved += sum(map(self._move, ranks))
            await asyncio.sleep(POLL_S)
        result = Drained(num_moved, left, round(loop.time() - began_s, 3))
        log.info("worker %s: %d streams moved, %d requests left", worker.url, num_moved, left)
        return result

    def _move(self, worker: Worker) -> int:
        """Move the streams that another worker can go on with; how many."""
        others = self._registry.stand_ins(worker)
        moved = [
            stream
            for stream in list(worker.streams)
            if not stream.is_moving and any(map(stream.journal.can_resume, others))
        ]
        for stream in moved:
            stream.move()
        return len(moved)

    def cancel(self, worker: Worker) -> None:
        """Give a draining server requests again."""
        for one in self._registry.find(worker.url):
            if one.state is State.DRAINING:
                self._registry.move(one, State.READY, "no longer drained")

    def has_ended(self, worker: Worker) -> bool:
        """Whether the process of a draining server was seen to end."""
        return worker.url in self._ended

    async def _return(self, worker: Worker) -> None:
        """Wait for the restart of a draining server, then take it back."""
        self._ended.discard(worker.url)
        began_s = time.monotonic()
        try:
            while worker.state is State.DRAINING:
                await asyncio.sleep(RETURN_POLL_S)
                try:
                    await self._registry.check(worker)
                except (TransferError, OSError):
                    self._ended.add(worker.url)
                    continue
                if worker.url in self._ended and await self._is_new(worker, began_s):
                    for one in self._registry.find(worker.url):
                        self._registry.move(one, State.READY, "restarted")
        finally:
            self._returning.discard(worker.url)

    async def _is_new(self, worker: Worker, since_s: float) -> bool:
        """Whether the process that answers was started after ``since_s``; a server that does not
        tell is believed to be new. A broken connection alone is no restart."""
        await self._registry.learn(worker)
        uptime_s = worker.facts.get("uptime_s")
        if not isinstance(uptime_s, int | float):
            return True
        is_new = worker.learned_s - uptime_s > since_s
        if not is_new and worker.learned_s > since_s:
            self._ended.discard(worker.url)
        return is_new

    # signs of an end

    def on_worker(self, event: Event, worker: Worker) -> None:
        """Watch each server that joins."""
        if event == "joined" and not worker.dp_rank:
            self._gateway.spawn(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        """Keep a request open that a server answers when it begins to drain; the end of the
        connection tells that the process has ended. Servers without it are asked once."""
        loop = asyncio.get_running_loop()
        while worker.state is not State.GONE:
            began_s = loop.time()
            try:
                response = await self._gateway.upstream.fetch(
                    worker.url,
                    "GET",
                    f"/ready?wait_s={WAIT_S:g}",
                    timeout_s=WAIT_S + 10,
                    api_key=worker.api_key,
                )
            except TransferError:
                self._ended.add(worker.url)
                if worker.state is State.READY:
                    self._gateway.health.reported(worker, "unreachable")
                await asyncio.sleep(RETRY_S)
                continue
            if response.status == 503 and b'"draining"' in response.body:
                if worker.state is not State.DRAINING:
                    self._gateway.spawn(self._leave(worker))
            elif response.status == 200 and loop.time() - began_s < WAIT_S / 2:
                return  # it does not hold the request
            elif response.status not in (200, 503):
                return
            if response.status == 503:
                await asyncio.sleep(RETURN_POLL_S)

    async def _leave(self, worker: Worker) -> None:
        """A server has begun to drain by itself: move its streams at once."""
        timeout_s = float(self._gateway.options.request_timeout_secs)
        await self.drain(worker, 0.0, timeout_s, why="it is shutting down")


class DrainRoutes:
    """POST and DELETE /workers/{id}/drain."""

    def __init__(self, gateway: Gateway, drainer: Drainer) -> None:
        self._gateway, self._drainer = gateway, drainer
        self._workers = Workers(gateway.registry)

    async def start(self, call: Call) -> Answer:
        """Drain; the answer comes when nothing runs there, or when ``timeout_s`` is over. The drain
        goes on when the client leaves."""
        options = self._gateway.options
        found, refusal = self._workers.find(call)
        deadline_s = _seconds(call, "deadline_s", options.drain_deadline_secs)
        timeout_s = _seconds(call, "timeout_s", options.request_timeout_secs)
        can_move = call.fields.get("move", True)
        if not isinstance(can_move, bool):
            raise InvalidRequest(f"move is {can_move!r}: true or false works", "move")
        if not found:
            return refusal
        worker = found[0]
        if worker.state is State.JOINING:
            message = f"{worker.url} has not joined yet: DELETE /workers/{worker.id} removes it"
            raise InvalidRequest(message, "id")
        draining = self._drainer.drain(
            worker, deadline_s, timeout_s, can_move=can_move, why="drained by an operator"
        )
        task: asyncio.Future[Drained] = asyncio.ensure_future(draining)
        result = await asyncio.shield(task)
        status = "draining" if result.left else "drained"
        told = {"moved": result.moved, "left": result.left, "seconds": result.seconds}
        return json_answer({"status": status, "worker_id": worker.id, "url": worker.url} | told)

    async def stop(self, call: Call) -> Answer:
        """Give the worker requests again."""
        found, refusal = self._workers.find(call)
        for worker in found:
            self._drainer.cancel(worker)
        return json_answer({"status": found[0].state}) if found else refusal


def _seconds(call: Call, name: str, default: float) -> float:
    value = call.fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise InvalidRequest(f"{name} is {value!r}: seconds, such as 30, work", name)
    return float(value)


def attach(gateway: Gateway) -> None:
    """Watch all workers, and serve the routes."""
    drainer = gateway.drainer = Drainer(gateway)
    routes = DrainRoutes(gateway, drainer)
    gateway.registry.listen(drainer.on_worker)
    gateway.routes.add("POST", "/workers/{id}/drain", routes.start)
    gateway.routes.add("DELETE", "/workers/{id}/drain", routes.stop)
