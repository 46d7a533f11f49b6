"""--tokenizer-worker-num: several HTTP processes that share one port and one engine.

The main process owns the engines and watches them and the workers; a worker that dies, or gives
no sign of life for --watchdog-timeout, is replaced. Only its own connections see an error.
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
from radixlm.config.server_config import ServerConfig, flat
from radixlm.engine.launch import intake_facts
from radixlm.engine.model_info import ModelInfo, resolved
from radixlm.engine.supervisor import EngineListener, EngineSupervisor
from radixlm.entrypoints.http.server import Server
from radixlm.intake.link import ZmqLink
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import intake_codec
from radixlm.wire.replies import Failed
from radixlm.wire.requests import AbortRequest

log = logging.getLogger(__name__)

REPORT_S = 0.5
CHECK_S = 1.0
JOIN_LOOK_S = 0.02
LATE_LOOKS = 3  # a main process that stood still itself finds old reports first
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


class Replica:
    """An engine as the main process sees it."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self.supervisor = supervisor
        self.facts: dict[str, Any] | None = None
        self.beat_s = 0.0


class Fleet:
    """The main process: engines, and several workers."""

    def __init__(self, config: ServerConfig, given: frozenset[str], sock: socket.socket) -> None:
        self._config, self._given, self._sock = config, given, sock
        self._count = config.serve.tokenizer_worker_num
        self._replicas = [
            Replica(EngineSupervisor(config, given, self._count, index))
            for index in range(config.parallel.dp_size)
        ]
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._heard_s: dict[int, float] = {}
        self._deaths: deque[float] = deque()
        self._is_stopping = False
        self._status = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """Until all workers have left."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)
        supervisors = [replica.supervisor for replica in self._replicas]
        for index, supervisor in enumerate(supervisors):
            await supervisor.start(self._watcher(index))
        watching = asyncio.create_task(self._watch_workers())
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._count):
                    group.create_task(self._keep(index))
        finally:
            watching.cancel()
            await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
        log.info("stopped")
        return self._status

    def _watcher(self, index: int) -> EngineListener:
        replica = self._replicas[index]
        return EngineListener(
            lost=lambda poison_rid: self._lost(index, poison_rid),
            gave_up=lambda message: self._gave_up(index, message),
            beat_s=lambda: replica.beat_s,
        )

    async def _watch_workers(self) -> None:
        """A worker that stands still keeps its connections waiting: another takes its place."""
        limit_s = self._config.serve.watchdog_timeout
        num_late: dict[int, int] = {}
        while True:
            await asyncio.sleep(CHECK_S)
            for index, process in self._workers.items():
                heard_s = self._heard_s.get(process.pid)
                is_late = heard_s is not None and time.monotonic() - heard_s > limit_s
                num_late[process.pid] = num_late.get(process.pid, 0) + 1 if is_late else 0
                if num_late[process.pid] >= LATE_LOOKS and process.returncode is None:
                    log.error("no sign of life from HTTP worker %d for %.0f s", index, limit_s)
                    process.kill()

    async def _keep(self, index: int) -> None:
        """Run worker ``index``, and another when it dies."""
        while not self._is_stopping:
            process = await self._spawn(index)
            if self._is_stopping:  # it was not there yet when all were told
                self._tell(process, {"do": "stop"})
            assert process.stdout is not None
            async for line in process.stdout:
                self._heard_s[process.pid] = time.monotonic()
                self._hear(json.loads(line))
            self._heard_s.pop(process.pid, None)
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

    async def _spawn(self, index: int) -> asyncio.subprocess.Process:
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
                "addresses": [r.supervisor.addresses[index] for r in self._replicas],
                "fd": self._sock.fileno(),
                "index": index,
                "facts": [replica.facts for replica in self._replicas],
            },
        )
        return process

    def _tell(self, process: asyncio.subprocess.Process, order: dict[str, Any]) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(order).encode() + b"\n")

    def _hear(self, report: dict[str, Any]) -> None:
        for replica, told in zip(self._replicas, report["replicas"], strict=True):
            replica.facts = told.get("facts") or replica.facts
            replica.beat_s = max(replica.beat_s, told["beat_s"])

    def _may_replace(self) -> bool:
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while now_s - self._deaths[0] > DEATH_WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths) <= MAX_DEATHS

    def _lost(self, index: int, poison_rid: str | None) -> None:
        self._replicas[index].facts, self._replicas[index].beat_s = None, 0.0
        for process in self._workers.values():
            self._tell(process, {"do": "lose", "replica": index, "poison_rid": poison_rid})

    def _gave_up(self, index: int, message: str) -> None:
        for process in self._workers.values():
            self._tell(process, {"do": "give_up", "replica": index, "message": message})

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
        codec = intake_codec()
        links = [ZmqLink(ZmqChannel(a, codec, bind=True)) for a in order["addresses"]]
        method = config.parallel.load_balance_method
        self.intake = TokenizerManager(None, intake_facts(config, info), links, method=method)
        self._joining: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; an engine that served a dead predecessor is joined when it is heard."""
        self.intake.start()
        for index, facts in enumerate(self._order["facts"]):
            if facts is not None:
                joining = asyncio.create_task(self._join(index, facts), name="join an engine")
                self._joining.add(joining)
                joining.add_done_callback(self._joining.discard)

    async def _join(self, index: int, facts: dict[str, Any]) -> None:
        """Its socket has to find ours first: what is sent to nobody is lost. What the predecessor
        had asked for is ended."""
        replica = self.intake.replicas[index]
        while not replica.beat_s:
            await asyncio.sleep(JOIN_LOOK_S)
        if replica.is_ready:
            return  # it started again meanwhile: it knows of nobody
        replica.link.send(AbortRequest(all=True, quiet=True))
        self.intake.become_ready(facts, index)

    async def stop(self) -> None:
        for joining in tuple(self._joining):
            joining.cancel()
        self.intake.replicas.close()


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
                intake.lose_engine(order["poison_rid"], order["replica"])
            elif order["do"] == "give_up":
                failure = Failed("EngineError", order["message"])
                intake.give_up(failure, order["replica"])
            elif order["do"] == "stop":
                self._server.on_signal(signal.SIGTERM)
        self._server.on_signal(signal.SIGTERM)
        self._server.on_signal(signal.SIGTERM)  # nobody is left to drain for

    async def _report(self) -> None:
        """Signs of life, the engines' and one's own, for the process that watches."""
        replicas = list(self._engine.intake.replicas)
        were_ready = [False] * len(replicas)
        while True:
            told: list[dict[str, Any]] = []
            for replica, was_ready in zip(replicas, were_ready, strict=True):
                told.append({"beat_s": replica.beat_s if replica.is_ready else 0.0})
                if replica.is_ready and not was_ready:
                    told[-1]["facts"] = replica.facts
            were_ready = [replica.is_ready for replica in replicas]
            print(json.dumps({"replicas": told}), flush=True)
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
