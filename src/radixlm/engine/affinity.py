"""The cores and the memory that each process of a host uses: --numa-node and
SGLANG_CPU_OMP_THREADS_BIND. Processes are counted over replicas, and within one by rank."""

import ctypes
import os
import platform
from collections.abc import Set
from pathlib import Path
from typing import Any

from radixlm.base import env
from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.config.server_config import ServerConfig

SYSFS = Path("/sys/devices/system/node")
MPOL_PREFERRED = 1  # another node serves when this one's memory is full
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


class Place(Record):
    """``node``: the NUMA node whose memory is preferred; None leaves it to the system."""

    cores: frozenset[int]
    node: int | None = None


def is_placed(config: ServerConfig) -> bool:
    """Whether the options place processes."""
    return bool(config.execute.numa_node is not None or env.CPU_THREADS_BIND.get())


def read_cores(text: str) -> frozenset[int]:
    """The cores of a list such as "0-31,64"; ConfigError if it is none."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
        return frozenset(core for one in ends for core in range(one[0], one[-1] + 1))
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of cores; 0-31,64 is one") from error


def find_place(config: ServerConfig, number: int, usable: Set[int], sysfs: Path = SYSFS) -> Place:
    """Where process ``number`` of this host runs. ConfigError names a place that there is not."""
    bind, nodes = env.CPU_THREADS_BIND.get(), config.execute.numa_node
    if bind:
        parts = bind.split("|")
        _check_count(env.CPU_THREADS_BIND.aliases[0], bind, len(parts), number)
        cores = read_cores(parts[number])
        if not cores <= usable:
            raise ConfigError(
                f"{env.CPU_THREADS_BIND.aliases[0]}={bind}: this process may use cores "
                f"{sorted(usable)}, not {sorted(cores - usable)}"
            )
        return Place(cores)
    if nodes is None:
        return Place(frozenset(usable))
    _check_count("--numa-node", " ".join(map(str, nodes)), len(nodes), number)
    file = sysfs / f"node{nodes[number]}" / "cpulist"
    if not file.exists():
        there = sorted(int(path.name[4:]) for path in sysfs.glob("node[0-9]*"))
        raise ConfigError(f"--numa-node {nodes[number]}: this machine has the nodes {there}")
    cores = read_cores(file.read_text()) & usable
    if not cores:
        raise ConfigError(f"--numa-node {nodes[number]}: this process may use none of its cores")
    return Place(cores, nodes[number])


def _check_count(flag: str, value: str, count: int, number: int) -> None:
    if number >= count:
        raise ConfigError(
            f"{flag} {value}: places {count} processes, but this host runs at least {number + 1} "
            "(one for each rank of each replica)"
        )


def placed(config: ServerConfig, given: frozenset[str], startup: dict[str, Any]) -> ServerConfig:
    """Bind this process to its place; the options with a thread for each of its cores."""
    if not is_placed(config):
        return config
    here = list(startup.get("ranks", ())) or [0]
    each = config.parallel.num_processes // config.parallel.num_replicas
    number = startup["index"] * each + here.index(startup.get("rank", 0))
    place = find_place(config, number, os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), place.cores)
    if place.node is not None:
        _prefer_memory(place.node)
    return (
        config if "cpu_threads" in given else config.with_values({"cpu_threads": len(place.cores)})
    )


def _prefer_memory(node: int) -> None:
    """Have this thread, and those that it starts, take memory of ``node``."""
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is not None:
        # a kernel without NUMA refuses, and has one memory
        ctypes.CDLL(None, use_errno=True).syscall(call, MPOL_PREFERRED, mask, 64 * len(mask))
