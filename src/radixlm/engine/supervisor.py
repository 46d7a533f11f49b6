"""EngineSupervisor: starts an engine process, watches it, and restarts it when it dies.

Intake holds every unfinished request (``intake/request_state.py``). When the new process is ready,
intake sends the requests again, each from where it was. After a death prompts are computed one by
one; a request that was computed alone when the engine died twice is failed alone.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixlm.base.record import Record
from radixlm.config.server_config import ServerConfig, engine_values
from radixlm.engine.features.inflight_log import read_inflight_rid
from radixlm.engine.kept_pool import KeptPool
from radixlm.engine.prefault import prefault_bytes
from radixlm.engine.process import EngineProcess, take_engine_process
from radixlm.engine.rank_processes import REFUSED, topology_of
from radixlm.engine.restart_reserve import RestartReserve
from radixlm.engine.run_folder import IPC, RunFolder

log = logging.getLogger(__name__)

INFLIGHT_LOG = "flight"  # the file in the server's folder
CHECK_S = 0.5
TERM_WAIT_S = 3.0
# checks in a row that must find the heartbeat late: after this process itself stood still, the
# first check finds an old one
MAX_LATE_CHECKS = 3
# how long the last message of a process that ended with status 2 may take to arrive
LAST_MESSAGE_S = 2.0
# pauses after a process could not be started, or refused to start where another has served: the
# system lacks descriptors, processes or memory, or a disk is not there
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
# how long a restart may load: this often the longest load so far, and this much more
LOAD_FACTOR = 5.0
LOAD_MARGIN_S = 30.0
# ends the engine in order. Not SIGTERM: a service manager sends that to all processes at once,
# while the server still drains
STOP_SIGNAL = signal.SIGUSR2
# after these its memory is as it was left; a process that broke down may have written anywhere
TRUSTED_ENDS = (0, 1, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -STOP_SIGNAL)
OUT_OF_MEMORY = (
    " (the kernel sends it when memory runs out: see its log, lower --max-total-tokens or "
    "--mem-fraction-static, or give the machine more memory)"
)


class EngineListener(Record):
    """Callbacks: the engine was lost (with the request that it was computing alone, and how it
    ended), it is given up, and when its last heartbeat came (monotonic seconds, 0 = none yet)."""

    lost: Callable[[str | None, str], None]
    gave_up: Callable[[str], None]
    beat_s: Callable[[], float]


class EngineSupervisor:
    """Owns one engine process and the folder of its sockets (mode 0700). With --dp-size there is
    one supervisor for each replica ``index``."""

    def __init__(
        self,
        config: ServerConfig,
        given: frozenset[str],
        num_intakes: int = 1,
        index: int = 0,
        checkpoint: Path | None = None,
    ) -> None:
        """``checkpoint``: the model's folder, for the memory to prefault."""
        self.config, self.given, self.index = config, given, index
        self.checkpoint = checkpoint
        self.weights: Callable[[], dict[str, Any] | None] = _as_at_the_start
        self._run_folder = RunFolder()
        self.folder = self._run_folder.path
        self.addresses = [f"{IPC}{self.folder}/intake{i}" for i in range(num_intakes)]
        self.inflight_log_path = self.folder / INFLIGHT_LOG
        self._told_suspect: str | None = None  # where that file cannot be deleted
        self.process: EngineProcess | None = None
        self.num_restarts = 0
        self.name = f"engine {index}" if config.parallel.num_replicas > 1 else "the engine"
        self._deaths: deque[float] = deque()
        self._has_served = self._has_beaten = False  # any process so far, the last one
        self._hung_loading = False
        self._killed_rid: str | None = None  # computed alone at the last SIGKILL
        self._is_stopping = False
        self._stop_asked = asyncio.Event()
        self._has_given_up = False
        self._reserve = RestartReserve()
        topology = topology_of(config)
        ranks = topology.ranks_of(0) if config.memory.warm_restart else ()
        self._kept = KeptPool(ranks, topology.world)
        self._spawned_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._longest_load_s = 0.0  # of the processes that became ready
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: EngineListener) -> None:
        """Start the engine and watch it in the background."""
        failure = self._try_spawn()
        self._task = asyncio.create_task(self._watch(listener, failure), name="engine supervisor")
        self._task.add_done_callback(lambda task: self._end_watch(listener, task))

    def _try_spawn(self) -> str | None:
        """Start a process, with what is reserved for it. The reason if there could be none."""
        self._reserve.release()
        try:
            self._spawn()
        except (OSError, MemoryError) as error:
            return str(error) or type(error).__name__
        finally:
            self._reserve.fill()
        self._spawned_s = time.monotonic()
        return None

    async def _spawn_again(self, listener: EngineListener, failure: str | None) -> bool:
        """Start a process; after a ``failure`` try again, with pauses. Each counts as a death.
        False: the server stops, or there were too many."""
        while failure is not None and not self._is_stopping:
            log.error("%s: no process could be started: %s", self.name, failure)
            if not self._may_restart():
                self._give_up(listener, self._why_given_up(f"it could not be started: {failure}"))
                return False
            log.warning("%s: trying again in %g s", self.name, self._pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), self._pause_s)
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            if not self._is_stopping:
                failure = self._try_spawn()
        return not self._is_stopping

    def _give_up(self, listener: EngineListener, reason: str) -> None:
        self._has_given_up = True
        listener.gave_up(reason)

    def _end_watch(self, listener: EngineListener, task: asyncio.Task[None]) -> None:
        """An engine that nobody watches must not look alive: end the server with the reason."""
        if self._is_stopping or self._has_given_up:
            return
        error = None if task.cancelled() else task.exception()
        reason = f"{type(error).__name__}: {error}" if error else "it was cancelled"
        log.error("%s: its supervisor ended: %s", self.name, reason, exc_info=error)
        self._give_up(listener, f"{self.name}: its supervisor ended ({reason})")

    def _spawn(self) -> None:
        startup = startup_of(self.config, self.given, self.folder, self.index) | {
            "boot": self.num_restarts,
            "memory": self._kept.paths,
            "weights": self.weights(),
            "addresses": [self._run_folder.reachable(one) for one in self.addresses],
            "prefault_bytes": prefault_bytes(self.config, self.checkpoint)
            // self.config.parallel.world_size
            if self.checkpoint
            else 0,
        }
        self.process = take_engine_process()
        self.process.send_config(startup)

    async def _watch(self, listener: EngineListener, failure: str | None = None) -> None:
        """Watch one process after the other. ``failure``: why the first could not be started."""
        while await self._spawn_again(listener, failure):
            assert self.process is not None
            code = await self._until_dead(self.process, listener)
            if self._is_stopping:
                return
            if code == REFUSED and self._has_served:
                self.num_restarts += 1
                failure = "it refused to start again; its log says why"
                continue
            if code == REFUSED:  # a bad option or checkpoint: it has sent the reason
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop_asked.wait(), LAST_MESSAGE_S)
                reason = f"{self.name}: the process refused to start; its log says why"
                self._give_up(listener, reason)
                return
            if (code > 0 or self._hung_loading) and not (self.num_restarts or self._has_served):
                self._give_up(listener, self._why_not_started(code))
                return
            self._reserve.release()  # for the file that tells which request was being computed
            suspect = self._take_suspect()
            listener.lost(self._poison_rid(code, suspect), f"{self.name}: {_reason(code)}")
            if code not in TRUSTED_ENDS or not self._has_beaten:
                self._kept.empty()
            if not self._may_restart():
                hint = OUT_OF_MEMORY if code == -signal.SIGKILL and not self._hung_loading else ""
                self._give_up(listener, self._why_given_up(_reason(code) + hint))
                return
            log.warning("%s: process ended with %s; starting another", self.name, _reason(code))
            self.num_restarts += 1
            failure = self._try_spawn()

    async def _until_dead(self, process: EngineProcess, listener: EngineListener) -> int:
        """Wait for the end of the process; kill it if its heartbeats stop."""
        limit_s, load_s = self.config.serve.watchdog_timeout, self._load_limit_s()
        self._hung_loading = self._has_beaten = False
        waiting = asyncio.create_task(process.wait())
        num_late = 0
        has_loaded = False
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=CHECK_S)
            self._reserve.fill()
            self._run_folder.hold(self.addresses)
            beat_s, now_s = listener.beat_s(), time.monotonic()
            if beat_s and not has_loaded:
                has_loaded = self._has_served = self._has_beaten = True
                self._pause_s = FIRST_PAUSE_S
                self._longest_load_s = max(self._longest_load_s, now_s - self._spawned_s)
            is_late = now_s - beat_s > limit_s if beat_s else now_s - self._spawned_s > load_s
            num_late = num_late + 1 if is_late else 0
            if waiting.done() or num_late < MAX_LATE_CHECKS:
                continue
            self._hung_loading = not beat_s
            if beat_s:
                log.error("no heartbeat from %s for %.0f s; its stacks:", self.name, limit_s)
            else:
                log.error("%s has not loaded within %.0f s; its stacks:", self.name, load_s)
            process.send_signal(signal.SIGUSR1)
            await asyncio.wait({waiting}, timeout=1.0)
            if not waiting.done():
                process.kill()
        return await waiting

    def _load_limit_s(self) -> float:
        """How long the process may load. Once one has loaded, the next may not take much longer:
        --load-timeout-s leaves room for the largest models."""
        limit_s = self.config.serve.load_timeout_s
        if self._longest_load_s:
            limit_s = min(limit_s, LOAD_FACTOR * self._longest_load_s + LOAD_MARGIN_S)
        return limit_s

    def _take_suspect(self) -> str | None:
        """The request that was being computed alone when the engine died, told once: the next
        engine may die before it writes its own."""
        found = read_inflight_rid(self.inflight_log_path)
        suspect = None if found == self._told_suspect else found
        self._told_suspect = None
        try:
            self.inflight_log_path.unlink(missing_ok=True)
        except OSError as error:  # a disk that fails, where no engine can write another
            log.warning("%s: %s", self.inflight_log_path, error.strerror)
            self._told_suspect = found
        return suspect

    def _poison_rid(self, code: int, suspect: str | None) -> str | None:
        """The request to count the death against. SIGKILL usually comes from outside: it counts
        only if the same request was computed alone at the SIGKILL before."""
        if code != -signal.SIGKILL or suspect is None:
            return suspect
        last, self._killed_rid = self._killed_rid, suspect
        return suspect if suspect == last else None

    def _may_restart(self) -> bool:
        now_s = time.monotonic()
        serve = self.config.serve
        self._deaths.append(now_s)
        while self._deaths and now_s - self._deaths[0] > serve.restart_window_s:
            self._deaths.popleft()
        return len(self._deaths) <= serve.max_engine_restarts

    def _why_not_started(self, code: int) -> str:
        if self._hung_loading:
            limit_s = self.config.serve.load_timeout_s
            return (
                f"{self.name} had not loaded its model after {limit_s:g} s; the log shows where it "
                "stood; raise --load-timeout-s if the model takes longer"
            )
        return f"{self.name}: the process could not start ({_reason(code)}); its log says why"

    def _why_given_up(self, last: str) -> str:
        serve = self.config.serve
        return (
            f"{self.name}: the process died {len(self._deaths)} times within "
            f"{serve.restart_window_s:.0f} s (last: {last}); "
            f"--max-engine-restarts is {serve.max_engine_restarts}"
        )

    async def stop(self) -> None:
        """End the engine in order, or by force if it does not end."""
        self._is_stopping = True
        self._stop_asked.set()
        process = self.process
        if process is not None and process.returncode is None:
            process.send_signal(STOP_SIGNAL)
            try:
                await asyncio.wait_for(process.wait(), TERM_WAIT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=TERM_WAIT_S)
        self._reserve.release()
        self._kept.close()
        self._run_folder.remove()


def startup_of(
    config: ServerConfig, given: frozenset[str], folder: Path, index: int = 0
) -> dict[str, Any]:
    """What each process of replica ``index`` must know. ``folder``: the server's own."""
    topology = topology_of(config)
    return {
        "options": _sendable(config, given, index),
        "index": index,
        "local_ranks": list(topology.ranks_of(0)[1:]) if topology.world > 1 else None,
        "given": sorted(given),
        "inflight_log_path": str(folder / INFLIGHT_LOG),
        "parent": os.getpid(),
    }


def _sendable(config: ServerConfig, given: frozenset[str], index: int = 0) -> dict[str, Any]:
    """The options for replica ``index``, see ``engine_values``. Its ranks and the other
    replicas share the cores; each replica has GPUs of its own."""
    options, parallel = engine_values(config), config.parallel
    options["base_gpu_id"] += index * parallel.world_size * parallel.gpu_id_step
    threads = options.get("cpu_threads")
    if threads and "cpu_threads" not in given:
        options["cpu_threads"] = max(1, threads // config.parallel.num_processes)
    return options | {"located": dict(config.located)}


def _as_at_the_start() -> None:
    """A ``WeightsSource`` as a dict of what a new engine serves: None for the checkpoint."""


def _reason(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
