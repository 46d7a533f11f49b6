"""Each engine process of a host gets its cores and the memory next to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.affinity import Place, find_place, is_placed, placed, read_cores

USABLE = frozenset(range(8))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for node, cores in enumerate(("0-1,4", "2-3,5-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    return tmp_path


def config_of(**options: Any) -> ServerConfig:
    return ServerConfig.from_kwargs(model_path="x", **options)


def test_lists_of_cores() -> None:
    assert read_cores("0-3,8,10-10\n") == {0, 1, 2, 3, 8, 10}
    for bad in ("", "a", "0-", "1,,2"):
        with pytest.raises(ConfigError, match="0-31,64 is one"):
            read_cores(bad)


def test_the_ith_process_goes_to_the_ith_node(sysfs: Path) -> None:
    config = config_of(numa_node=(1, 0), tp_size=2)
    assert find_place(config, 0, USABLE, sysfs) == Place(frozenset({2, 3, 5, 6, 7}), 1)
    assert find_place(config, 1, USABLE - {0}, sysfs) == Place(frozenset({1, 4}), 0)
    with pytest.raises(ConfigError, match="places 2 processes, but this host runs at least 3"):
        find_place(config, 2, USABLE, sysfs)
    with pytest.raises(ConfigError, match="--numa-node 0: this process may use none"):
        find_place(config, 1, frozenset({2}), sysfs)
    with pytest.raises(ConfigError, match=r"--numa-node 7: this machine has the nodes \[0, 1\]"):
        find_place(config_of(numa_node=(7,)), 0, USABLE, sysfs)


def test_the_variable_of_sglang_gives_each_process_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of()
    assert not is_placed(config)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0-1|2,5")
    assert is_placed(config)
    assert find_place(config, 1, USABLE) == Place(frozenset({2, 5}))
    with pytest.raises(ConfigError, match=r"SGLANG_CPU_OMP_THREADS_BIND=0-1\|2,5: .*not \[5\]"):
        find_place(config, 1, USABLE - {5})
    with pytest.raises(ConfigError, match="places 2 processes"):
        find_place(config, 2, USABLE)


def test_a_process_is_bound_with_its_threads_and_computes_with_as_many() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, threading\n"
        "from radixlm.config.server_config import ServerConfig\n"
        "from radixlm.engine.affinity import placed\n"
        "stop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait)\n"
        "thread.start()\n"
        "config = ServerConfig.from_kwargs(model_path='x', cpu_threads=9, dp_size=2)\n"
        "config = placed(config, frozenset(), {'index': 1})\n"
        "cores = {tuple(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}\n"
        "stop.set()\n"
        "print(cores, config.execute.cpu_threads)"
    )
    environment = {**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": f"{core}|{core}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == f"{{({core},)}} 1"
    own = config_of(cpu_threads=3)
    assert placed(own, frozenset(), {"index": 0}) is own, "nothing places it"
