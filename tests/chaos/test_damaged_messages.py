"""Thousands of damaged messages on the sockets between the processes, in both directions. They are
dropped and counted, no process dies, and good messages are still answered.

The short form talks to a scheduler and an intake in this process, the long form (slow) also to a
real engine process. `CHAOS_MESSAGES` is the number of messages for each socket in the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from radixlm.config.server_config import flat
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.engine.intake import ServerIntake
from radixlm.engine.launch import ServerConfig
from radixlm.engine.model_info import resolved
from radixlm.engine.multi_channel import MultiChannel
from radixlm.engine.scheduler_supervisor import SchedulerSupervisor
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest
from radixlm.scheduler.loop import Scheduler
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import intake_codec, scheduler_codec
from radixlm.wire.link import ZmqLink
from radixlm.wire.replies import Finish, Heartbeat, LoadReport, Ready, StepReply, TokenDelta
from radixlm.wire.requests import AbortRequest, Control, TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams
from tests.chaos.damaged_messages import TO_ENGINE, TO_INTAKE, Fuzzer
from tests.fakes.executor import VOCAB, reference
from tests.fakes.scheduler_harness import SchedulerHarness
from tests.fakes.tiny_checkpoint import cached_tiny

QUICK = 300
MANY = int(os.environ.get("CHAOS_MESSAGES", "10000"))
COUNTS = (QUICK, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]))


@contextmanager
def raw_socket(address: str, bind: bool) -> Iterator[zmq.Socket[bytes]]:
    peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.SNDHWM, 0)
    (peer.bind if bind else peer.connect)(address)
    try:
        yield peer
    finally:
        peer.close(0)


def request(rid: str, ids: list[int]) -> TokenizedRequest:
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    return TokenizedRequest(rid, pack_ids(ids), sampling)


def tokens_of(
    peer: zmq.Socket[bytes],
    rid: str,
    work: Callable[[], None] = lambda: None,
    most_s: float = 60.0,
) -> list[int]:
    """The engine's tokens for a good request, read from the raw socket.

    `work` lets an engine of this thread run. The socket delivers asynchronously, so no fixed number
    of ticks suffices.
    """
    codec, found = intake_codec(), []
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s:
        work()
        if not peer.poll(10):
            continue
        message = codec.decode(peer.recv())
        if not isinstance(message, StepReply):
            continue
        ones = zip(message.rids, message.tokens, strict=True)
        found += [token for name, token in ones if name == rid]
        for delta in message.deltas:
            if delta.rid == rid:
                found += delta.tokens
                if delta.finish is not None:
                    assert delta.finish.kind == "length", delta.finish
                    return found
    raise AssertionError(f"no end of {rid} within {most_s} s")


@pytest.mark.parametrize("count", COUNTS)
def test_a_scheduler_drops_damaged_messages(count: int, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    flight = InflightLog()
    with raw_socket(address, bind=True) as peer:
        fan = MultiChannel([ZmqChannel(address, scheduler_codec(), bind=False)])
        fan.vocab = VOCAB
        ticks = 0

        def make() -> Scheduler:
            scheduler = SchedulerHarness(features=(flight,)).scheduler
            scheduler.channel = fan
            tick = scheduler.tick

            def once(wait: bool = True) -> None:
                nonlocal ticks
                tick(wait=False)
                ticks -= 1
                scheduler.is_stopped = ticks <= 0

            scheduler.tick = once  # type: ignore[method-assign]
            return scheduler

        serving = SchedulerSupervisor(make(), make, fan, {"context_len": 512}, flight)

        def turn(number: int) -> None:
            nonlocal ticks
            ticks, serving.scheduler.is_stopped = number, False
            serving.run()

        fan.send(Heartbeat(LoadReport()))
        assert peer.poll(10_000)
        fuzzer, encode = Fuzzer(TO_ENGINE, seed=1), scheduler_codec().encode
        for number in range(count):
            peer.send(fuzzer.make())
            if number % 50 == 49:
                turn(20)
                peer.send(encode(AbortRequest(all=True, quiet=True)))
        peer.send(encode(Control("z", "continue")))
        turn(50)
        peer.send(encode(request("sound", [3, 4])))
        while peer.poll(0):
            peer.recv()
        assert tokens_of(peer, "sound", lambda: turn(20)) == reference([3, 4], 6, True)
        print(f"{fan.num_dropped} of {count} messages to the scheduler dropped")
        assert count // 2 < fan.num_dropped < count
        fan.close()


@pytest.mark.parametrize("count", COUNTS)
async def test_an_intake_drops_damaged_messages(count: int, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    channel = ZmqChannel(address, intake_codec(), bind=True)
    intake = ServerIntake(None, IntakeFacts(vocab=1000, context_len=64), ZmqLink(channel))
    intake.start()
    encode = intake_codec().encode
    with raw_socket(address, bind=False) as peer:
        fuzzer = Fuzzer(TO_INTAKE, seed=2)
        peer.send(encode(Ready({"max_total_num_tokens": 4096, "context_len": 64})))
        await asyncio.wait_for(intake.ready.wait(), 30)
        for number in range(count):
            if "live" not in intake.requests:
                sampling = SamplingParams(max_new_tokens=9)
                intake.submit(GenerateRequest(sampling, input_ids=[1], rid="live"))
            peer.send(fuzzer.make())
            if number % 20 == 0:
                await asyncio.sleep(0)
        intake.abort_all()
        for rid in tuple(intake.requests):
            intake.leave([intake.requests[rid]])
        sampling = SamplingParams(max_new_tokens=9)
        (state,) = intake.submit(GenerateRequest(sampling, input_ids=[1], rid="sound"))
        peer.send(encode(Ready({"max_total_num_tokens": 4096, "context_len": 64})))
        peer.send(encode(StepReply([TokenDelta("sound", [5, 6], Finish("length"))])))
        output = await asyncio.wait_for(state.next(), 60)
        assert output.token_ids == [5, 6] and intake.failure is None
        print(f"{channel.num_dropped} of {count} messages to intake dropped")
        assert count // 4 < channel.num_dropped < count
    intake.replicas.close()


@contextmanager
def engine_process(address: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real engine with a tiny model, started as the supervisor starts it."""
    given = {
        "model_path": str(cached_tiny("Qwen3ForCausalLM")),
        "cpu_threads": 1,
        "max_total_tokens": 2048,
    }
    config, _ = resolved(ServerConfig.from_kwargs(**given), frozenset(given))
    options = {k: v for k, v in flat(config).items() if v is not None}
    order = {
        "options": options, "given": sorted(given), "addresses": [address], "index": 0,
        "inflight_log_path": str(folder / "flight"), "parent": os.getpid(), "local_ranks": None,
    }  # fmt: skip
    command = [sys.executable, "-m", "radixlm.engine.worker"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode())
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_engine_process_lives_on(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    encode = scheduler_codec().encode
    with raw_socket(address, bind=True) as peer, engine_process(address, tmp_path) as process:
        assert peer.poll(120_000), "the engine did not start"
        peer.send(encode(request("before", [30, 40])))
        want = tokens_of(peer, "before")
        fuzzer = Fuzzer(TO_ENGINE, seed=3)
        for number in range(MANY):
            peer.send(fuzzer.make())
            if number % 50 == 49:
                peer.send(encode(AbortRequest(all=True, quiet=True)))
                peer.send(encode(Control("s", "slow_down", {"forward_sleep_time": 0})))
            while peer.poll(0):
                peer.recv()
        peer.send(encode(AbortRequest(all=True, quiet=True)))
        peer.send(encode(Control("z", "continue")))
        peer.send(encode(request("after", [30, 40])))
        assert tokens_of(peer, "after", most_s=300.0) == want
        assert process.poll() is None
        dropped: Any = 0
        until_s = time.monotonic() + 30
        while not dropped and time.monotonic() < until_s:
            message = intake_codec().decode(peer.recv()) if peer.poll(1000) else None
            dropped = message.load.num_dropped if isinstance(message, Heartbeat) else 0
        print(f"{dropped} of {MANY} messages to the engine process dropped")
        assert dropped > MANY // 2
        process.send_signal(signal.SIGUSR2)
        assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "log").read_text(), (tmp_path / "log").read_text()[-3000:]
