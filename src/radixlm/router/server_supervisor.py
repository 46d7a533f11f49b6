"""Supervisor of the servers that a gateway has started: one that ends is started again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from radixlm.router.registry import Event
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

logger = logging.getLogger(__name__)

POLL_S = 0.2
STEADY_S = 60.0  # a server that lived so long is started again at once
LONGEST_WAIT_S = 60.0


def send_signal(process: Any, number: int) -> None:
    """Send SIGTERM or SIGKILL to a server's process and all its children."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # it has ended, or has no group of its own yet
        process.kill() if number == signal.SIGKILL else process.terminate()


class Server:
    """A server of this machine. ``start``: starts its process."""

    def __init__(self, url: str, start: Callable[[], Any]) -> None:
        self.url, self._start = url, start
        self.num_short = 0  # lives in a row that were shorter than STEADY_S
        self.has_served = False
        self.is_leaving = False  # it was told to end, to be started again
        self.due_s: float | None = None  # when it is started again
        self.begin()

    def begin(self) -> None:
        """Start the process. OSError: the system has no room for one."""
        self.began_s = time.monotonic()
        self.process = self._start()
        self.due_s, self.is_leaving = None, False

    def wait_s(self) -> float:
        """How long to wait before the next start, now that the process has ended, or has not
        started."""
        if self.due_s is None and (self.is_leaving or time.monotonic() - self.began_s >= STEADY_S):
            self.num_short = 0
            return 0.0
        self.num_short += 1
        return min(2.0 ** (self.num_short - 1), LONGEST_WAIT_S)


class Supervisor:
    """Starts servers again that end: at once, and after 1, 2, 4 to 60 s where they end soon after
    their start. One that ends with a failure before it has served is not started again."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self.status = 0  # exit status, where no server could start
        self._gateway: Gateway
        self._stop: Callable[[], None]

    def launch(self, url: str, start: Callable[[], Any]) -> None:
        """Start a server, which will listen at ``url``."""
        self.servers.append(Server(url, start))

    def attach(self, gateway: Gateway, stop: Callable[[], None]) -> None:
        """Watch the servers while ``gateway`` runs; ``stop`` ends it."""
        self._gateway, self._stop = gateway, stop
        gateway.servers = self
        gateway.registry.listen(self._on_worker)
        gateway.every(POLL_S, self.tick)

    async def restart(self, url: str) -> bool:
        """End a server and wait until it was started again; False: it is none of these."""
        found = [one for one in self.servers if one.url == url]
        for server in found:
            server.is_leaving = True
            if server.due_s is None:
                send_signal(server.process, signal.SIGTERM)
        while any(server.is_leaving for server in found):
            await asyncio.sleep(POLL_S)
        return bool(found)

    def tick(self) -> None:
        """Look after all servers."""
        if self._gateway.is_draining:
            return
        for server in list(self.servers):
            if server.due_s is not None:
                if time.monotonic() >= server.due_s:
                    self._begin(server)
            elif not server.process.is_alive():
                self._has_ended(server)

    def _begin(self, server: Server) -> None:
        try:
            server.begin()
        except OSError as error:
            wait_s = server.wait_s()
            server.due_s = time.monotonic() + wait_s
            logger.error("server %s: %s: tried again in %g s", server.url, error, wait_s)
            return
        logger.info("server %s: started again, process %d", server.url, server.process.pid)
        self._gateway.registry.add(Worker(server.url))  # unless it is known still

    def _has_ended(self, server: Server) -> None:
        send_signal(server.process, signal.SIGKILL)  # what it has left behind
        status = server.process.exitcode or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if status > 0 and not server.has_served:
            logger.error("server %s %s before it had served: not started again", server.url, how)
            self._give_up(server, status)
            return
        wait_s = server.wait_s()
        server.due_s = time.monotonic() + wait_s
        level = logging.INFO if server.is_leaving else logging.ERROR
        logger.log(level, "server %s %s: started again in %g s", server.url, how, wait_s)

    def _give_up(self, server: Server, status: int) -> None:
        self.servers.remove(server)
        for worker in self._gateway.registry.find(server.url):
            self._gateway.registry.remove(worker, "its process could not start")
        if not self.servers:
            self.status = status
            self._stop()

    def _on_worker(self, event: Event, worker: Worker) -> None:
        if event == "joined":
            for server in self.servers:
                server.has_served |= server.url == worker.url
