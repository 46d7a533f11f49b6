"""Programs whose engine is killed, and programs whose own process is."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.end_to_end.server import RunningServer

import radixlm as sgl

NUM_PROGRAMS = 24


@sgl.function
def branches(s: Any, number: int) -> None:
    s += sgl.user(f"What is {number} + 4?")
    s += sgl.assistant(sgl.gen("a", max_tokens=24, ignore_eos=True))
    group = s.fork(2)
    for child in group:
        child += sgl.user("Again.") + sgl.assistant(sgl.gen("b", max_tokens=16, ignore_eos=True))
    group.join()
    s += sgl.user("Is it so?") + sgl.assistant(sgl.select("c", ["yes", "no", "maybe"]))


def read(states: Any) -> list[Any]:
    return [(s.text(), s["a"], s["b"], s["c"]) for s in states]


def test_a_killed_engine_changes_no_program() -> None:
    batch = [(number,) for number in range(NUM_PROGRAMS)]
    with RunningServer() as server:
        endpoint = sgl.RuntimeEndpoint(server.url)
        expected = read(branches.run_batch(batch, backend=endpoint, temperature=0))
        endpoint.flush_cache()
        found: list[Any] = []
        work = threading.Thread(
            target=lambda: found.append(
                read(branches.run_batch(batch, backend=endpoint, temperature=0))
            ),
            daemon=True,
        )
        work.start()
        for _ in range(2):
            server.wait_ready()
            server.wait_for(lambda: server.info().get("num_running_reqs", 0) >= 4, 60)
            server.engine().kill()
        work.join(60)
        assert found == [expected]


CLIENT = """
import os, sys
import radixlm as sgl
import radixlm.lang.cassette as cassette
from tests.lang.test_deaths import texts

count = 7  # die when so many calls are in the file
write = cassette.Cassette._write
def dying(self, record):
    global count
    write(self, record)
    count -= 1
    if count == 0:
        os.kill(os.getpid(), 9)
cassette.Cassette._write = dying
with sgl.Engine(log_level="error", cpu_threads=1) as engine:
    texts(engine, sys.argv[1])
"""


def texts(engine: sgl.Engine, kept: str) -> list[str]:
    batch = [(number,) for number in range(4)]
    return [s.text() for s in branches.run_batch(batch, backend=engine, checkpoint=kept)]


def test_a_killed_client_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Sampled at temperature 1: seeds come from the file."""
    root = Path(__file__).parents[2]
    cut, whole = tmp_path / "calls", tmp_path / "header"
    env = {"PYTHONPATH": f"{root}:{root / 'src'}", "PATH": ""}
    command = [sys.executable, "-c", CLIENT, str(cut)]
    assert subprocess.run(command, env=env, timeout=100, check=False).returncode == -9
    lines = cut.read_bytes().splitlines(keepends=True)
    assert len(lines) == 7
    whole.write_bytes(lines[0])
    found = []
    for kept in (cut, whole):
        with sgl.Engine(log_level="error", cpu_threads=1) as engine:
            found.append(texts(engine, str(kept)))
    assert found[0] == found[1]
