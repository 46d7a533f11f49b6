"""``radixlm doctor``: what would run how fast on this machine, why, and what would help."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.record import Record
from radixlm.base.system_memory import system_memory
from radixlm.base.units import format_bytes
from radixlm.config.verb_parser import unmarked
from radixlm.entrypoints.check_env import facts

# parameters of decoders that people know, and bytes a weight
_SIZES = {"0.6B": 0.6e9, "4B": 4e9, "8B": 8e9, "30B-A3B": 3.3e9}
_WHOLE = {"30B-A3B": 30.5e9}  # all experts, of which a token reads some
_BYTES = {"16 bit": 2.0, "8 bit": 1.0, "4 bit": 0.56}
_TEST_BYTES = 256 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Finding(Record):
    """``advice``: empty where all is well."""

    what: str
    found: str
    advice: str = ""


def read_bandwidth(num_bytes: int = _TEST_BYTES, rounds: int = 3) -> float:
    """Bytes that all threads together read from memory in a second; the best of some rounds."""
    torch = load("torch:ones")
    numbers, best = torch(num_bytes // 4), float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - started)
    return num_bytes / best


def findings(values: dict[str, Any]) -> Iterator[Finding]:
    """What is found, in the order in which it matters."""
    kernels = values["CPU kernels"]
    if kernels["available"]:
        isa = str(kernels["isa"])
        slow = "this processor has no AVX2: products are slow" if isa == "portable" else ""
        yield Finding("CPU kernels", f"{isa}, {kernels['threads']} threads", slow)
    else:
        why = "install a wheel of this platform, or a C++ compiler and install again"
        yield Finding("CPU kernels", "none: torch computes", why)
    cores, logical = psutil.cpu_count(logical=False) or 0, os.cpu_count() or 0
    own = values["cores"]
    few = 0 < own < logical
    yield Finding(
        "cores",
        f"{own} of {logical} logical, {cores} physical",
        "this process may not use all (taskset, a container's limit)" if few else "",
    )
    if _HUGE_PAGES.exists():
        setting = _HUGE_PAGES.read_text().strip()
        is_off = "[never]" in setting
        yield Finding(
            "huge pages",
            setting,
            f"echo madvise > {_HUGE_PAGES} makes reading weights faster" if is_off else "",
        )
    swap = psutil.swap_memory()
    yield Finding("memory", f"{values['memory available']} free of {values['memory']}", (
        "memory is swapped out: stop other programs" if swap.used > 1 << 30 else ""
    ))  # fmt: skip
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0
    small = "give a container --shm-size 1g: processes pass pages by it" if shm < 256 << 20 else ""
    yield Finding("/dev/shm", f"{format_bytes(shm)} free", small)
    gpus = values["gpus"]
    asked = "torch was built for CPUs: install a CUDA build to use a GPU"
    has_driver = Path("/proc/driver/nvidia/version").exists()
    yield Finding("GPUs", str(gpus or "none"), asked if has_driver and not gpus else "")
    missing = [name for name, have in values["packages"].items() if have == "not installed"]
    extras = {"transformers": "hf", "xgrammar": "grammar", "triton": "gpu"}
    names = [
        f"{name} (pip install 'radixlm[{extras[name]}]')" for name in missing if name in extras
    ]
    yield Finding("optional packages", ", ".join(names) + " missing" if names else "all there")


def estimates(bandwidth: float, memory: int) -> dict[str, dict[str, str]]:
    """Model -> bits -> tokens/s of one stream at most: a token reads each active weight once."""
    table: dict[str, dict[str, str]] = {}
    for name, count in _SIZES.items():
        table[name] = {}
        for bits, width in _BYTES.items():
            fits = _WHOLE.get(name, count) * width * 1.1 < memory
            speed = bandwidth / (count * width)
            table[name][bits] = f"{speed:.{0 if speed > 10 else 1}f}" if fits else "too large"
    return table


def main(argv: list[str]) -> int:
    """Print findings and estimates; ``--json``: one object."""
    if {"-h", "--help"} & set(argv):
        print(f"usage: radixlm doctor [--json]\n\n{unmarked(__doc__)}")
        return 0
    if unknown := [word for word in argv if word != "--json"]:
        raise ConfigError(f"doctor takes no {unknown[0]!r}, only --json")
    values = facts()
    found = list(findings(values))
    bandwidth = read_bandwidth()
    table = estimates(bandwidth, system_memory().total)
    if "--json" in argv:
        rows = [{"what": f.what, "found": f.found, "advice": f.advice} for f in found]
        print(json.dumps({"findings": rows, "bytes_per_second": bandwidth, "tokens_per_s": table}))
        return 0
    for one in found:
        print(f"{'!' if one.advice else ' '} {one.what:<18} {one.found}")
        if one.advice:
            print(f"  {'':<18} {one.advice}")
    print(f"\n{bandwidth / 1e9:.1f} GB/s are read from memory: tokens/s of one stream, at most\n")
    print("  " + f"{'':<10}" + "".join(f"{bits:>12}" for bits in _BYTES))
    for name, row in table.items():
        print("  " + f"{name:<10}" + "".join(f"{value:>12}" for value in row.values()))
    print("\nA GPU reads its own memory faster; `radixlm bench one-batch` measures a model here.")
    return 0
