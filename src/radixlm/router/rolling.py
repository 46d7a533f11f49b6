"""Rolling restart: one worker after the other is drained, restarted and awaited. ``--rolling
COMMAND`` restarts it, or the gateway itself, where it has started the server. POST /rolling_restart
or SIGHUP starts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from radixlm.base.errors import RequestError, TransferError
from radixlm.router.answer import Answer, json_answer
from radixlm.router.call import Call
from radixlm.router.worker import State, Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

log = logging.getLogger(__name__)

POLL_S = 0.1
NOTICE_S = 5.0  # a command may return before the server that it stops has noticed


class Conflict(RequestError):
    """409."""

    status = 409
    code = "conflict"


class Roller:
    """At most one rolling restart at a time. ``report``: of the running one or the last one."""

    def __init__(self, gateway: Gateway, command: str) -> None:
        self._gateway, self._command = gateway, command
        self._task: asyncio.Task[None] | None = None
        self.report: dict[str, object] = {"status": "idle", "done": [], "todo": []}

    def start(self) -> None:
        """Begin; Conflict where one is under way, or where a worker has no other beside it."""
        if self._task is not None and not self._task.done():
            raise Conflict("a rolling restart is under way: GET /rolling_restart tells how far")
        workers = {one.url: one for one in self._gateway.registry if one.is_available}
        for worker in workers.values():
            if not self._gateway.registry.stand_ins(worker):
                raise Conflict(
                    f"worker {worker.url} is the only one of its kind that is ready: its requests "
                    "would have nowhere to go; start a second one and add it by POST /workers"
                )
        if not workers:
            raise Conflict("no worker is ready: add one by POST /workers")
        self._task = self._gateway.spawn(self._roll(list(workers.values())))

    async def _roll(self, workers: list[Worker]) -> None:
        done: list[str] = []
        todo = [one.url for one in workers]
        self.report = {"status": "running", "done": done, "todo": todo}
        for worker in workers:
            try:
                await self._restart(worker)
            except (RestartFailed, OSError, ValueError) as error:
                log.error("rolling restart: stopped at %s: %s", todo[0], error)
                self.report |= {"status": "failed", "reason": str(error)}
                await self._take_back(worker)
                return
            done.append(todo.pop(0))
        self.report["status"] = "done"
        log.info("rolling restart: %d workers were restarted", len(done))

    async def _restart(self, worker: Worker) -> None:
        """One worker, from its drain until it is ready again."""
        if worker.state is State.GONE:
            return
        gateway, options = self._gateway, self._gateway.options
        if not gateway.registry.stand_ins(worker):
            raise RestartFailed("no other worker of its kind is ready")
        drained = await gateway.drainer.drain(
            worker,
            options.drain_deadline_secs,
            float(options.request_timeout_secs),
            why="rolling restart",
        )
        if drained.left:
            raise RestartFailed(f"{drained.left} requests still run there")
        await (self._run_command if self._command else self._restart_own)(worker)
        await self._back(worker)

    async def _restart_own(self, worker: Worker) -> None:
        """Restart a server that the gateway has started."""
        limit_s = self._gateway.options.worker_startup_timeout_secs
        try:
            is_own = await asyncio.wait_for(self._gateway.servers.restart(worker.url), limit_s)
        except TimeoutError:
            raise RestartFailed(f"it did not end within {limit_s} s") from None
        if not is_own:
            raise RestartFailed("this gateway has not started it, and --rolling is not set")

    async def _run_command(self, worker: Worker) -> None:
        place = urlsplit(worker.url)
        told = {
            "WORKER_URL": worker.url,
            "WORKER_ID": worker.id,
            "WORKER_HOST": place.hostname or "",
            "WORKER_PORT": str(place.port or 80),
        }
        process = await asyncio.create_subprocess_shell(
            self._command, env=os.environ | told, start_new_session=True
        )
        limit_s = self._gateway.options.worker_startup_timeout_secs
        try:
            status = await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise RestartFailed(f"--rolling did not end within {limit_s} s") from None
        if status:
            raise RestartFailed(f"--rolling {self._command!r} ended with status {status}")

    async def _back(self, worker: Worker) -> None:
        """Until the worker is ready again. One that never went away, as after new weights in
        place, is taken back after a while."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        limit_s = self._gateway.options.worker_startup_timeout_secs
        while worker.state is not State.READY:
            if worker.state is State.GONE:
                return  # discovery has another in its place
            if loop.time() - began_s > limit_s:
                raise RestartFailed(f"it is not ready {limit_s} s after it was restarted")
            await asyncio.sleep(POLL_S)
            if loop.time() - began_s > NOTICE_S and not self._gateway.drainer.has_ended(worker):
                await self._take_back(worker)

    async def _take_back(self, worker: Worker) -> None:
        """Give a worker requests again that was not restarted, if it is well."""
        try:
            await self._gateway.registry.check(worker)
            await self._gateway.registry.learn(worker)
        except (TransferError, OSError):
            return
        self._gateway.drainer.cancel(worker)


class RestartFailed(Exception):
    """A worker is not back; the others are left as they are."""


def attach(gateway: Gateway) -> None:
    """Serve the routes; where nothing can restart workers they tell how to set --rolling."""
    command = gateway.options.rolling
    roller = Roller(gateway, command or "")

    async def start(call: Call) -> Answer:
        if not command and gateway.servers is None:
            message = "start the gateway with --rolling 'systemctl restart model@$WORKER_PORT'"
            raise Conflict(message)
        roller.start()
        return json_answer(roller.report | {"status": "accepted"}, 202)

    async def report(call: Call) -> Answer:
        return json_answer(roller.report)

    def on_hangup() -> None:
        try:
            roller.start()
        except Conflict as error:
            log.error("SIGHUP: %s", error)

    def listen() -> None:
        if command or gateway.servers is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)

    gateway.routes.add("POST", "/rolling_restart", start)
    gateway.routes.add("GET", "/rolling_restart", report)
    gateway.on_start.append(listen)
