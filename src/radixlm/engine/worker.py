"""The engine process: scheduler and executor, or one of the ranks that follow it. ``python -m
radixlm.engine.worker`` reads its options as JSON from standard input, forks the other ranks, and
talks to its intakes over the addresses given there."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any

from radixlm.base.deferred import TORCH_SHAPES, defer
from radixlm.engine.startup import StartupReader, check_parent, die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before torch is imported, which takes seconds
    gc.disable()  # until it serves: imports and weights leave hardly any garbage
    defer(TORCH_SHAPES)
    # reads and prefaults in a thread while torch is imported, which no engine without server awaits
    early = StartupReader(partial(os._exit, 0))

# torch before anything else that links OpenMP, so that the process has one OpenMP runtime
import msgspec
import torch  # noqa: F401

from radixlm.base.errors import CheckpointError, ConfigError, RadixError, RankLost
from radixlm.base.log import set_up_logging
from radixlm.base.stop_signals import stop_signals
from radixlm.config.server_config import ServerConfig
from radixlm.engine.affinity import placed
from radixlm.engine.assemble import assemble, assemble_rank
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.engine.kept import Boot
from radixlm.engine.model_info import resolved
from radixlm.engine.multi_channel import MultiChannel
from radixlm.engine.rank_processes import REFUSED, RankProcesses
from radixlm.engine.ranks import NO_PEERS, Followers, LeaderLink, Peers, start_nodes
from radixlm.engine.scheduler_supervisor import SchedulerSupervisor
from radixlm.engine.supervisor import STOP_SIGNAL
from radixlm.kernels.cpu.extension import available, native
from radixlm.observe.gcwatch import GcWatch
from radixlm.observe.log_tail import LogTail
from radixlm.observe.ring import StepRing
from radixlm.observe.stacks import offer_stacks
from radixlm.parallel.rank import RankLoop
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import scheduler_codec
from radixlm.wire.replies import Failed, Ready
from radixlm.wire.weights import WeightsSource

log = logging.getLogger(__name__)
COLLAPSE_S = 10.0  # after the start: the first requests come first


@contextmanager
def prefaulted_memory(early: StartupReader | None) -> Iterator[None]:
    """Within it, weights are packed into the prefaulted memory while there is some left."""
    if early is None or early.pages is None or not available:
        if early is not None:
            early.drop()
        yield
        return
    early.finish()
    native().lend_memory(early.pages.address, early.pages.num_bytes)
    try:
        yield
    finally:
        native().end_lending()
    later = Timer(COLLAPSE_S, early.pages.collapse)
    later.daemon = True
    later.start()


def _prepare_process(startup: dict[str, Any], config: ServerConfig, folder: Path) -> str:
    """Set up signals, stacks on request and logging; the process's name in logs."""
    # these signals reach the whole process group; the server decides when its engine ends
    for signum in stop_signals():
        signal.signal(signum, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    index = str(startup["index"]) if config.parallel.num_replicas > 1 else ""
    role = f"rank{index}.{startup['rank']}" if "rank" in startup else f"engine{index}"
    offer_stacks(folder, role)
    set_up_logging(role, config.observe.log_level, log_format=config.observe.log_format)
    return role


def main(early: StartupReader) -> int:
    """0 after an orderly end, 2 if the model or the options cannot be served."""
    startup = early.wait()
    if startup is None:  # started early by a server that then did not start
        return 0
    if "rank" in startup:
        return run_rank(startup, early)
    check_parent(int(startup["parent"]))
    ranks = None
    if startup["local_ranks"] is not None:
        ranks = RankProcesses(startup, run_rank)  # before there are sockets and signal handlers
    config = ServerConfig.from_kwargs(**startup["options"])
    flight_path = Path(startup["inflight_log_path"])
    role = _prepare_process(startup, config, flight_path.parent)
    codec = scheduler_codec()
    channel = MultiChannel([ZmqChannel(a, codec, bind=False) for a in startup["addresses"]])
    channel.log_tail = log_tail(config, role)
    try:
        config, info = resolved(config, frozenset(startup["given"]), tells=False)
        config = placed(config, frozenset(startup["given"]), startup)
        channel.vocab, channel.embed_dim = info.decoder.vocab, info.decoder.dim
        flight = InflightLog(flight_path)
        with prefaulted_memory(early):
            peers: Peers = NO_PEERS
            if ranks is not None:
                hub = start_nodes(startup, config, info.folder, ranks)
                peers = Followers(ranks, config, hub)
            peers.replica = int(startup["index"])
            boot = boot_of(startup)
            replica = assemble(
                config, info, channel, (flight,), peers, boot, step_ring(config, flight_path.parent)
            )
    except RankLost as error:
        return end_replica(ranks, error)
    except RadixError as error:
        return refuse(channel, error, is_restart=bool(startup["boot"]))
    serving = SchedulerSupervisor(replica.scheduler, replica.renew, channel, replica.facts, flight)
    _prepare_to_serve(serving, config)
    channel.send(Ready(replica.facts))
    try:
        serving.run()
    except RankLost as error:
        return end_replica(ranks, error)
    replica.close()
    channel.close()
    peers.stop()
    return 0


def _prepare_to_serve(serving: SchedulerSupervisor, config: ServerConfig) -> None:
    """Stop at the signal; from now on the collector looks at new objects only."""

    def stop(signum: int, frame: FrameType | None) -> None:
        serving.stop()

    signal.signal(STOP_SIGNAL, stop)
    GcWatch(config.observe.gc_warning_threshold_secs).install()
    gc.freeze()
    gc.enable()


def log_tail(config: ServerConfig, role: str) -> LogTail | None:
    """What keeps the last log lines for the page; None with --disable-ui."""
    tail = None if config.serve.disable_ui else LogTail(role)
    if tail is not None:
        tail.install()
    return tail


def step_ring(config: ServerConfig, folder: Path) -> StepRing | None:
    """The ring of this engine and those before it; None with --disable-ui, unless
    requests are traced, or without room."""
    if config.serve.disable_ui and not config.observe.enable_trace:
        return None
    try:
        return StepRing.open(folder)
    except OSError as error:
        log.warning("steps are not recorded: %s", error)
        return None


def boot_of(startup: dict[str, Any]) -> Boot:
    """Which start this is, and what it is to serve."""
    given = startup.get("weights")
    weights = None if given is None else msgspec.convert(given, WeightsSource)
    memory = tuple(startup.get("memory", ()))
    return Boot(startup["index"], startup.get("boot", 0), memory, weights)


def refuse(channel: MultiChannel, error: RadixError, *, is_restart: bool) -> int:
    """Tell why this process cannot serve; its status. Of one that follows another only the log
    tells, as a third may start."""
    if is_restart:
        log.error("the engine cannot start again: %s", error)
        return REFUSED
    channel.send(Failed(type(error).__name__, str(error)))
    time.sleep(0.2)  # zmq sends in the background; LINGER is 0
    return REFUSED


def end_replica(ranks: RankProcesses | None, error: RankLost) -> int:
    """All ranks end with this one. Status 1, not 2: another replica may have all of its ranks."""
    if ranks is not None:
        ranks.end(str(error))
    log.error("the engine ends: %s", error)
    return 1


def run_rank(startup: dict[str, Any], early: StartupReader | None = None) -> int:
    """Serve as a rank without a scheduler, in a process for it alone; the exit status."""
    die_with_parent()
    check_parent(int(startup["parent"]))
    config, given = ServerConfig.from_kwargs(**startup["options"]), frozenset(startup["given"])
    _prepare_process(startup, config, Path(startup["inflight_log_path"]).parent)
    leader = LeaderLink(startup, config)
    leader.replica = int(startup["index"])
    try:
        config, info = resolved(config, given, tells=False)
        config = placed(config, given, startup)
        with prefaulted_memory(early):
            make = assemble_rank(config, info, leader, boot_of(startup))
            loop = RankLoop(leader.rank, leader, make)
        leader.agree(())  # all ranks are ready
        GcWatch(config.observe.gc_warning_threshold_secs).install()
        gc.freeze()
        gc.enable()
        loop.run()
        leader.stop()
    except RankLost as error:
        log.warning("this rank ends: %s", error)
        return 1
    except RadixError as error:
        leader.fail(error)
        return REFUSED if isinstance(error, (ConfigError, CheckpointError)) else 1
    return 0


if __name__ == "__main__":
    code = main(early)
    logging.shutdown()
    if sys.stdout is not None:  # it was closed before the start
        sys.stdout.flush()
    # skips torch's teardown, which takes a while; nothing is left to save
    os._exit(code)
