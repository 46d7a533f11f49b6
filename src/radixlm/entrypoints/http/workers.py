"""--tokenizer-worker-num: several HTTP processes that share one port and one engine.

The main process owns the engine and watches it and the workers; a worker that dies is replaced.
Orders travel to a worker as JSON lines on its standard input, reports come back on its standard
output. A worker whose input ends leaves: its main process is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

import uvloop

from radixlm.base.errors import ConfigError
from radixlm.base.log import set_up_logging
from radixlm.config.root import ServerConfig, flat
from radixlm.engine.launch import intake_facts
from radixlm.engine.modelinfo import ModelInfo, resolved
from radixlm.engine.recover import Supervisor, Watcher
from radixlm.entrypoints.http.server import Server
from radixlm.intake.link import ZmqLink
from radixlm.intake.manager import Intake
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import intake_codec
from radixlm.wire.replies import Failed
from radixlm.wire.requests import AbortRequest

log = logging.getLogger(__name__)

REPORT_S = 0.5
MAX_DEATHS = 5
DEATH_WINDOW_S = 60.0
BAD_START = 2  # exit status: options or checkpoint cannot be served


def serve_many(config: ServerConfig, given: frozenset[str], sock: socket.socket) -> int:
    """Serve until a signal; the exit status."""
    if config.observe.enable_metrics:
        raise ConfigError(
            "--enable-metrics counts in one process: leave --tokenizer-worker-num at 1"
        )
    if config.serve.engine_in_process:
        raise ConfigError("--engine-in-process: leave --tokenizer-worker-num at 1")
    return asyncio.run(Fleet(config, given, sock).serve())


class Fleet:
    """The main process: one engine, several workers."""

    def __init__(self, config: ServerConfig, given: frozenset[str], sock: socket.socket) -> None:
        self._config, self._given, self._sock = config, given, sock
        self._count = config.serve.tokenizer_worker_num
        self._supervisor = Supervisor(config, given, self._count)
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._facts: dict[str, Any] | None = None
        self._beat_s = 0.0
        self._deaths: deque[float] = deque()
        self._is_stopping = False
        self._status = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """Until all workers have left."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)
        watcher = Watcher(lost=self._lost, gave_up=self._gave_up, beat_s=lambda: self._beat_s)
        await self._supervisor.start(watcher)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._count):
                    group.create_task(self._keep(index))
        finally:
            await self._supervisor.stop()
        log.info("stopped")
        return self._status

    async def _keep(self, index: int) -> None:
        """Run worker ``index``, and another when it dies."""
        is_replacement = False
        while not self._is_stopping:
            process = await self._spawn(index, is_replacement)
            assert process.stdout is not None
            async for line in process.stdout:
                self._hear(json.loads(line))
            code = await process.wait()
            if self._is_stopping:
                return
            if code in (0, BAD_START):
                self._status = code
                self._stop()
                return
            log.error("HTTP worker %d ended with status %d; starting another", index, code)
            if not self._may_replace():
                log.error("too many HTTP workers have died: leaving")
                self._status = 1
                self._stop()
                return
            is_replacement = True

    async def _spawn(self, index: int, is_replacement: bool) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "radixlm.entrypoints.http.workers",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._sock.fileno(),),
            limit=1 << 20,
        )
        self._workers[index] = process
        options = flat(self._config, show_secrets=True)
        self._tell(
            process,
            {
                "options": {name: v for name, v in options.items() if v is not None},
                "given": sorted(self._given),
                "address": self._supervisor.addresses[index],
                "fd": self._sock.fileno(),
                "index": index,
                "is_replacement": is_replacement,
                "facts": self._facts,
            },
        )
        return process

    def _tell(self, process: asyncio.subprocess.Process, order: dict[str, Any]) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(order).encode() + b"\n")

    def _hear(self, report: dict[str, Any]) -> None:
        if report.get("facts") is not None:
            self._facts = report["facts"]
        self._beat_s = max(self._beat_s, report.get("beat_s", 0.0))

    def _may_replace(self) -> bool:
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while now_s - self._deaths[0] > DEATH_WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths) <= MAX_DEATHS

    def _lost(self, culprit: str | None) -> None:
        self._facts, self._beat_s = None, 0.0
        for process in self._workers.values():
            self._tell(process, {"do": "lose", "culprit": culprit})

    def _gave_up(self, message: str) -> None:
        self._status = BAD_START
        for process in self._workers.values():
            self._tell(process, {"do": "give_up", "message": message})

    def _stop(self) -> None:
        """Once: drain. Twice: leave at once."""
        self._is_stopping = True
        for process in self._workers.values():
            self._tell(process, {"do": "stop"})


# ---- one worker ----------------------------------------------------------------------------


class SharedEngine:
    """What ProcessEngine is to the face, with the engine kept by another process."""

    def __init__(self, config: ServerConfig, info: ModelInfo, order: dict[str, Any]) -> None:
        self._order = order
        channel = ZmqChannel(order["address"], intake_codec(), bind=True)
        self.intake = Intake(None, intake_facts(config, info), ZmqLink(channel))

    async def start(self) -> None:
        """Listen; what a dead predecessor had asked for is ended."""
        self.intake.start()
        if self._order["is_replacement"]:
            self.intake.link.send(AbortRequest(all=True, quiet=True))
        if self._order["facts"] is not None:
            self.intake.become_ready(self._order["facts"])

    async def stop(self) -> None:
        self.intake.link.close()


class Worker:
    """One HTTP process."""

    def __init__(self, order: dict[str, Any]) -> None:
        config = ServerConfig.from_kwargs(**order["options"])
        self._index = int(order["index"])
        level = config.observe.log_level if self._index == 0 else "warning"
        set_up_logging(f"http{self._index}", level, config.observe.log_level_http)
        config, info = resolved(config, frozenset(order["given"]))
        sock = socket.socket(fileno=int(order["fd"]))
        self._engine = SharedEngine(config, info, order)
        self._server = Server(
            config, frozenset(order["given"]), info, sock, time.monotonic(), self._engine
        )
        self._server.is_first = self._index == 0

    async def run(self) -> int:
        """Serve until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        orders = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        tasks = [asyncio.create_task(self._obey(orders)), asyncio.create_task(self._report())]
        try:
            return await self._server.serve()
        finally:
            for task in tasks:
                task.cancel()

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        intake = self._engine.intake
        async for line in orders:
            order = json.loads(line)
            if order["do"] == "lose":
                intake.lose_engine(order["culprit"])
            elif order["do"] == "give_up":
                intake.give_up(Failed("EngineError", order["message"]))
            elif order["do"] == "stop":
                self._server.on_signal(signal.SIGTERM)
        self._server.on_signal(signal.SIGTERM)
        self._server.on_signal(signal.SIGTERM)  # nobody is left to drain for

    async def _report(self) -> None:
        """Signs of the engine's life, for the process that watches it."""
        intake = self._engine.intake
        was_ready = False
        while True:
            is_ready = intake.ready.is_set()
            report: dict[str, Any] = {"beat_s": intake.beat_s if is_ready else 0.0}
            if is_ready and not was_ready:
                report["facts"] = intake.engine_facts
            was_ready = is_ready
            print(json.dumps(report), flush=True)
            await asyncio.sleep(REPORT_S)


def main() -> int:
    """``python -m radixlm.entrypoints.http.workers``: orders on standard input."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the main process decides
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as raw:
        order: dict[str, Any] = json.loads(raw.readline())  # not a byte more than the first line
    return int(uvloop.run(Worker(order).run()))


if __name__ == "__main__":
    sys.exit(main())
