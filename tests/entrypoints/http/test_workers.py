"""A worker that replaces a dead one, between the real sockets of intake and engine."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixlm.config.server_config import ServerConfig
from radixlm.engine.intake import RegistryOptions
from radixlm.engine.multi_channel import MultiChannel
from radixlm.entrypoints.http import workers
from radixlm.entrypoints.http.workers import Fleet
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import scheduler_codec
from radixlm.wire.replies import Finish, Heartbeat, LoadReport, StepReply, TokenDelta
from radixlm.wire.requests import AbortRequest, TokenizedRequest
from radixlm.wire.sampling_params import SamplingParams

FACTS = {"max_total_num_tokens": 4096, "context_len": 64}


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their file is open as long as the process runs."""
    monkeypatch.setattr(workers, "offer_stacks", lambda *args: None)


async def test_requests_before_the_engines_first_message_are_not_lost(
    tmp_path: Path, monkeypatch: Any
) -> None:
    facts = IntakeFacts(vocab=1000, context_len=64)
    monkeypatch.setattr(workers, "intake_facts", lambda config, info: facts)
    monkeypatch.setattr(workers, "registry_options", lambda config, info: RegistryOptions())
    address = f"ipc://{tmp_path}/s"
    order = {"addresses": [address], "facts": [FACTS], "index": 0}
    info: Any = None
    engine = workers.SharedEngine(ServerConfig.from_kwargs(model_path="x"), info, order)
    await engine.start()
    sampling = SamplingParams(max_new_tokens=4)
    request = GenerateRequest(sampling, input_ids=[5], rid="early")
    (state,) = engine.intake.submit(request)
    await asyncio.sleep(0)
    assert not engine.intake.ready.is_set(), "there is nobody at the other end"

    there = MultiChannel([ZmqChannel(address, scheduler_codec(), bind=False)])
    there.send(Heartbeat(LoadReport()))
    await until(engine.intake.ready.is_set)
    heard: list[Any] = []
    while len(heard) < 2:
        got = there.receive(30.0)
        assert got, "nothing came within 30 s"
        heard += got
    abort, asked = heard
    assert isinstance(abort, AbortRequest) and abort.all and abort.quiet
    assert isinstance(asked, TokenizedRequest) and asked.rid == "early"
    there.send(StepReply([TokenDelta("early", [7], Finish("length"))]))
    output = await asyncio.wait_for(state.next(), 60)
    assert output.token_ids == [7]
    there.close()
    await engine.stop()


async def test_an_engine_that_restarts_meanwhile_gets_no_request(
    tmp_path: Path, monkeypatch: Any
) -> None:
    facts = IntakeFacts(vocab=1000, context_len=64)
    monkeypatch.setattr(workers, "intake_facts", lambda config, info: facts)
    monkeypatch.setattr(workers, "registry_options", lambda config, info: RegistryOptions())
    order = {"addresses": [f"ipc://{tmp_path}/s"], "facts": [FACTS], "index": 0}
    info: Any = None
    engine = workers.SharedEngine(ServerConfig.from_kwargs(model_path="x"), info, order)
    sent: list[Any] = []
    (replica,) = engine.intake.replicas
    monkeypatch.setattr(replica.link, "send", sent.append)
    await engine.start()
    engine.intake.become_ready(FACTS | {"context_len": 32})
    await until(lambda: not engine._joining)
    assert not sent and engine.intake.facts.context_len == 32
    await engine.stop()


async def _fleet_that_cannot_start_workers(
    monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> tuple[Fleet, int]:
    """A fleet after its only worker's task has ended, and how often a start was tried. The start
    after the failures stops the fleet."""
    fleet = Fleet(ServerConfig.from_kwargs(model_path="x"), frozenset(), socket.socket())
    monkeypatch.setattr(workers, "RETRY_S", 0.0)
    tries = 0

    async def spawn(index: int) -> Any:
        nonlocal tries
        tries += 1
        if tries > num_failures:
            fleet._stop()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(fleet, "_spawn", spawn)
    await asyncio.wait_for(fleet._run_worker(0), 60)
    fleet._sock.close()
    for replica in fleet._replicas:
        await replica.supervisor.stop()
    return fleet, tries


async def test_a_worker_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, tries = await _fleet_that_cannot_start_workers(monkeypatch, 2)
    assert tries == 3 and fleet._status == 0
    assert "could not be started: [Errno 24] Too many open files" in caplog.text


async def test_workers_that_cannot_be_started_end_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, tries = await _fleet_that_cannot_start_workers(monkeypatch, 99)
    assert tries == workers.MAX_DEATHS + 1 and fleet._status == 1 and fleet._is_stopping


def test_only_reports_go_to_standard_output() -> None:
    """Of a worker: a tokenizer's code that prints would break what the main process reads."""
    code = (
        "from radixlm.entrypoints.http.workers import take_stdout; reports = take_stdout(); "
        "print('noise', flush=True); print('report', file=reports, flush=True)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr.splitlines()[-1]) == ("report\n", "noise")
