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
import sys
import radixlm as sgl
from tests.lang.test_deaths import branches

count = int(sys.argv[3])
if count:  # die when so many calls are in the file
    import radixlm.lang.cassette as cassette, os
    write = cassette.Cassette._write
    def dying(self, record):
        global count
        write(self, record)
        count -= 1
        if count == 0:
            os.kill(os.getpid(), 9)
    cassette.Cassette._write = dying
with sgl.Engine(log_level="error", cpu_threads=1) as engine:
    states = branches.run_batch([(n,) for n in range(4)], backend=engine, checkpoint=sys.argv[1])
    open(sys.argv[2], "w").write(repr([s.text() for s in states]))
"""


def test_a_killed_client_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Sampled at temperature 1: seeds come from the file."""
    root = Path(__file__).parents[2]

    def run(name: str, kept: Path, die_after: int) -> int:
        arguments = [str(kept), str(tmp_path / name), str(die_after)]
        command = [sys.executable, "-c", CLIENT, *arguments]
        env = {"PYTHONPATH": f"{root}:{root / 'src'}", "PATH": ""}
        return subprocess.run(command, env=env, timeout=100, check=False).returncode

    cut = tmp_path / "calls"
    assert run("none", cut, 7) == -9
    num_kept = len(cut.read_bytes().splitlines())
    assert num_kept == 7
    whole = tmp_path / "header"
    whole.write_bytes(cut.read_bytes().splitlines(keepends=True)[0])
    assert run("resumed", cut, 0) == 0 and run("undisturbed", whole, 0) == 0
    assert (tmp_path / "resumed").read_text() == (tmp_path / "undisturbed").read_text()
