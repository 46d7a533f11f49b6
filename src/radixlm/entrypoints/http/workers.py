"""--tokenizer-worker-num: several HTTP processes that share one port and one engine.

The main process owns and watches the engines and the workers. It replaces a worker that dies, or
that sends no report for --watchdog-timeout; only that worker's connections fail. Commands go to a
worker as JSON lines on its standard input, its reports come as JSON lines on its standard output. A
worker whose input ends stops: its main process has died. What else a worker prints goes to
standard error.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import uvloop

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.log import set_up_logging
from radixlm.base.stop_signals import stop_signals
from radixlm.config.server_config import ServerConfig, flat
from radixlm.engine.intake import ServerIntake
from radixlm.engine.launch import intake_facts, registry_options
from radixlm.engine.model_info import ModelInfo, resolved
from radixlm.engine.supervisor import EngineListener, EngineSupervisor
from radixlm.entrypoints.http.server import Server
from radixlm.observe.stacks import offer_stacks
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import intake_codec
from radixlm.wire.link import ZmqLink
from radixlm.wire.replies import Failed
from radixlm.wire.requests import AbortRequest

log = logging.getLogger(__name__)

REPORT_S = 0.5
CHECK_S = 1.0
JOIN_POLL_S = 0.02
LATE_CHECKS = 3  # a main process that was itself suspended reads old reports first
MAX_DEATHS = 5
DEATH_WINDOW_S = 60.0
RETRY_S = 2.0  # until a worker that could not be started is tried again
BAD_START = 2  # exit status: options or checkpoint cannot be served


def serve_many(config: ServerConfig, given: frozenset[str], sock: socket.socket) -> int:
    """Serve until a signal; the exit status."""
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
            for index in range(config.parallel.num_replicas)
        ]
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._reported_s: dict[int, float] = {}
        self._deaths: deque[float] = deque()
        self._is_stopping = False
        self._status = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """Run until all workers have ended; the exit status."""
        offer_stacks(self._replicas[0].supervisor.folder, "main")
        loop = asyncio.get_running_loop()
        for signum in stop_signals():
            loop.add_signal_handler(signum, self._stop)
        bootstrap = load("radixlm.entrypoints.http.server:start_bootstrap")(self._config)
        supervisors = [replica.supervisor for replica in self._replicas]
        for index, supervisor in enumerate(supervisors):
            await supervisor.start(self._watcher(index))
        watching = asyncio.create_task(self._watch_workers())
        watching.add_done_callback(self._end_watch)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._count):
                    group.create_task(self._run_worker(index))
        finally:
            watching.cancel()
            await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
            if bootstrap is not None:
                await bootstrap.stop()
        log.info("stopped")
        return self._status

    def _watcher(self, index: int) -> EngineListener:
        replica = self._replicas[index]
        return EngineListener(
            lost=lambda poison_rid, why: self._lost(index, poison_rid, why),
            gave_up=lambda message: self._gave_up(index, message),
            beat_s=lambda: replica.beat_s,
        )

    async def _watch_workers(self) -> None:
        """Kill workers that send no reports; ``_run_worker`` starts others."""
        limit_s = self._config.serve.watchdog_timeout
        num_late: dict[int, int] = {}
        while True:
            await asyncio.sleep(CHECK_S)
            for index, process in self._workers.items():
                reported_s = self._reported_s.get(process.pid)
                is_late = reported_s is not None and time.monotonic() - reported_s > limit_s
                num_late[process.pid] = num_late.get(process.pid, 0) + 1 if is_late else 0
                if num_late[process.pid] >= LATE_CHECKS and process.returncode is None:
                    log.error("HTTP worker %d has sent no report for %.0f s", index, limit_s)
                    process.kill()

    def _end_watch(self, task: asyncio.Task[None]) -> None:
        """Workers that nobody watches could hang for ever: stop."""
        if not task.cancelled() and task.exception() is not None:
            log.error("the watch over the HTTP workers ended", exc_info=task.exception())
            self._status = 1
            self._stop()

    async def _run_worker(self, index: int) -> None:
        """Run worker ``index``, and another when it dies."""
        while not self._is_stopping:
            try:
                process = await self._spawn(index)
            except OSError as error:  # no descriptors, processes or memory
                log.error("HTTP worker %d could not be started: %s", index, error)
                if not self._may_go_on():
                    return
                await asyncio.sleep(RETRY_S)
                continue
            if self._is_stopping:  # it started after the others got the command
                self._send(process, {"do": "stop"})
            assert process.stdout is not None
            async for line in process.stdout:
                self._reported_s[process.pid] = time.monotonic()
                self._read_report(json.loads(line))
            self._reported_s.pop(process.pid, None)
            code = await process.wait()
            if self._is_stopping:
                return
            if code in (0, BAD_START):
                self._status = code
                self._stop()
                return
            log.error("HTTP worker %d ended with status %d; starting another", index, code)
            if not self._may_go_on():
                return

    async def _spawn(self, index: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "radixlm.entrypoints.http.workers",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._sock.fileno(),),
            env=self._environment(),
            limit=1 << 20,
        )
        self._workers[index] = process
        options = flat(self._config, show_secrets=True)
        self._send(
            process,
            {
                "options": {name: v for name, v in options.items() if v is not None}
                | {"located": dict(self._config.located)},
                "given": sorted(self._given),
                "addresses": [r.supervisor.addresses[index] for r in self._replicas],
                "fd": self._sock.fileno(),
                "index": index,
                "facts": [replica.facts for replica in self._replicas],
            },
        )
        return process

    def _environment(self) -> dict[str, str]:
        """Of a worker: where --enable-metrics counts together, and keeps what dead workers
        counted."""
        if not self._config.observe.enable_metrics:
            return dict(os.environ)
        counts = self._replicas[0].supervisor.folder / "metrics"
        counts.mkdir(exist_ok=True)
        name: str = load("radixlm.observe.metrics:SHARED_FOLDER")
        return {**os.environ, name: str(counts)}

    def _send(self, process: asyncio.subprocess.Process, command: dict[str, Any]) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(command).encode() + b"\n")

    def _read_report(self, report: dict[str, Any]) -> None:
        for replica, state in zip(self._replicas, report["replicas"], strict=True):
            replica.facts = state.get("facts") or replica.facts
            replica.beat_s = max(replica.beat_s, state["beat_s"])

    def _may_go_on(self) -> bool:
        """Count a death; stop if there were too many."""
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while now_s - self._deaths[0] > DEATH_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) <= MAX_DEATHS:
            return True
        log.error("too many HTTP workers have died: stopping")
        self._status = 1
        self._stop()
        return False

    def _lost(self, index: int, poison_rid: str | None, why: str) -> None:
        self._replicas[index].facts, self._replicas[index].beat_s = None, 0.0
        for process in self._workers.values():
            command = {"do": "lose", "replica": index, "poison_rid": poison_rid, "why": why}
            self._send(process, command)

    def _gave_up(self, index: int, message: str) -> None:
        for process in self._workers.values():
            self._send(process, {"do": "give_up", "replica": index, "message": message})

    def _stop(self) -> None:
        """The first call drains, the second stops at once."""
        self._is_stopping = True
        for process in self._workers.values():
            self._send(process, {"do": "stop"})


# ---- one worker ----------------------------------------------------------------------------


class SharedEngine:
    """The engines of the main process, for one worker (``server.Engine``)."""

    def __init__(self, config: ServerConfig, info: ModelInfo, start: dict[str, Any]) -> None:
        self._start = start
        codec = intake_codec()
        links = [ZmqLink(ZmqChannel(a, codec, bind=True)) for a in start["addresses"]]
        method = config.parallel.load_balance_method
        facts, options = intake_facts(config, info), registry_options(config, info)
        self.intake = ServerIntake(None, facts, links, method=method, options=options)
        self.intake.run_folders = tuple(
            Path(address.removeprefix("ipc://")).parent for address in start["addresses"]
        )
        offer_stacks(self.intake.run_folders[0], f"http{start['index']}")
        self._joining: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen for the engines; those that served a worker that died are ready already."""
        self.intake.start()
        for index, facts in enumerate(self._start["facts"]):
            if facts is not None:
                joining = asyncio.create_task(self._join(index, facts), name="join an engine")
                self._joining.add(joining)
                joining.add_done_callback(self._joining.discard)

    async def _join(self, index: int, facts: dict[str, Any]) -> None:
        """Take over a ready engine: wait for its connection, since earlier messages are lost, and
        abort the requests of the worker that died."""
        replica = self.intake.replicas[index]
        while not replica.beat_s:
            await asyncio.sleep(JOIN_POLL_S)
        if replica.is_ready:
            return  # it has restarted and holds no requests
        replica.link.send(AbortRequest(all=True, quiet=True))
        self.intake.become_ready(facts, index)

    async def stop(self) -> None:
        for joining in tuple(self._joining):
            joining.cancel()
        self.intake.replicas.close()


class Worker:
    """One HTTP process."""

    def __init__(self, start: dict[str, Any], reports: TextIO) -> None:
        config = ServerConfig.from_kwargs(**start["options"])
        self._index, self._reports = int(start["index"]), reports
        level = config.observe.log_level if self._index == 0 else "warning"
        set_up_logging(
            f"http{self._index}",
            level,
            config.observe.log_level_http,
            log_format=config.observe.log_format,
        )
        config, info = resolved(config, frozenset(start["given"]))
        sock = socket.socket(fileno=int(start["fd"]))
        self._engine = SharedEngine(config, info, start)
        self._server = Server(
            config, frozenset(start["given"]), info, sock, time.monotonic(), self._engine
        )
        self._server.is_first = self._index == 0

    async def run(self) -> int:
        """Serve until the main process stops it; the exit status."""
        loop = asyncio.get_running_loop()
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        tasks = [
            asyncio.create_task(self._read_commands(commands)),
            asyncio.create_task(self._report()),
        ]
        try:
            return await self._server.serve()
        finally:
            for task in tasks:
                task.cancel()

    async def _read_commands(self, commands: asyncio.StreamReader) -> None:
        intake = self._engine.intake
        async for line in commands:
            command = json.loads(line)
            if command["do"] == "lose":
                intake.lose_engine(command["poison_rid"], command["replica"], command["why"])
            elif command["do"] == "give_up":
                failure = Failed("EngineError", command["message"])
                intake.give_up(failure, command["replica"])
            elif command["do"] == "stop":
                self._server.on_signal(signal.SIGTERM)
        self._server.on_signal(signal.SIGTERM)
        self._server.on_signal(signal.SIGTERM)  # the main process has died: stop at once

    async def _report(self) -> None:
        """Report the engines' heartbeats, which also shows the main process that this one runs."""
        replicas = list(self._engine.intake.replicas)
        were_ready = [False] * len(replicas)
        while True:
            states: list[dict[str, Any]] = []
            for replica, was_ready in zip(replicas, were_ready, strict=True):
                states.append({"beat_s": replica.beat_s if replica.is_ready else 0.0})
                if replica.is_ready and not was_ready:
                    states[-1]["facts"] = replica.facts
            were_ready = [replica.is_ready for replica in replicas]
            print(json.dumps({"replicas": states}), file=self._reports, flush=True)
            await asyncio.sleep(REPORT_S)


def take_stdout() -> TextIO:
    """Standard output for reports alone: a tokenizer's own code may print."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return reports


def main() -> int:
    """``python -m radixlm.entrypoints.http.workers``: commands on standard input."""
    for signum in stop_signals():
        signal.signal(signum, signal.SIG_IGN)  # the main process decides
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as raw:
        start: dict[str, Any] = json.loads(raw.readline())  # not a byte more than the first line
    return int(uvloop.run(Worker(start, take_stdout()).run()))


if __name__ == "__main__":
    sys.exit(main())
