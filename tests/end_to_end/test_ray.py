"""Agents placed by a real Ray: the bits of one rank, and an actor that is killed. Without the
package ray these tests are skipped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from radixlm import Engine
from tests.end_to_end.server import RunningServer
from tests.end_to_end.test_nodes import BODIES, MODEL, ask, running, shown

pytest.importorskip("ray")
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A cluster of one machine."""
    port = 20000 + os.getpid() % 10000
    flags = f"--head --port {port} --num-cpus 4 --include-dashboard false --disable-usage-stats"
    memory = "--object-store-memory 100000000"
    subprocess.run([*RAY, "start", *flags.split(), *memory.split()], check=True)
    yield f"127.0.0.1:{port}"
    subprocess.run([*RAY, "stop", "--force"], check=True)


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    with Engine(model_path=MODEL, cpu_threads=1, max_total_tokens=4096) as engine:
        return [shown(engine.generate(**one)) for one in BODIES]


@pytest.fixture(scope="module")
def server(ray_address: str) -> Iterator[RunningServer]:
    flags = "--tp-size 3 --nnodes 3 --use-ray --max-total-tokens 4096 --dist-timeout 60"
    os.environ["RAY_ADDRESS"] = ray_address
    try:
        with RunningServer(*flags.split(), model=MODEL) as server:
            yield server
            assert server.terminate() == 0
    finally:
        del os.environ["RAY_ADDRESS"]


def actors() -> list[psutil.Process]:
    """The processes of the agents."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "AgentActor.run" in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


async def test_streams_outlive_an_actor(server: RunningServer, wanted: list[Any]) -> None:
    assert await ask(server, BODIES) == wanted
    before = actors()
    assert len(before) == 2 and all(actor.children() for actor in before)
    answers = await running(server)
    ranks = [rank for actor in before for rank in actor.children()]
    before[1].kill()
    assert await answers == wanted
    assert not psutil.wait_procs(ranks, 10)[1], "a rank has outlived its replica"
    after = {actor.pid for actor in actors()}
    assert len(after) == 2 and before[0].pid in after, "Ray has started the killed one again"
    await asyncio.to_thread(server.wait_ready)


def test_a_cluster_without_room_is_told(ray_address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "radixlm", "serve", "--port", "0", "--model-path", MODEL]
    flags = "--tp-size 4 --pp-size 2 --nnodes 8 --use-ray --dist-timeout 1".split()
    environment = {**os.environ, "RAY_ADDRESS": ray_address}
    done = subprocess.run(
        [*command, *flags], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "--nnodes 8: the Ray cluster has had no room for 8 bundles" in done.stderr
