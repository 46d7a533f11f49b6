"""Compiles variants of kernels without a GPU, in a pool of processes; a JSON line for each, or with
``--table`` a line for each kernel. Run as a program; see README.md."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from typing import Any

import radixlm.kernels.triton
from radixlm.kernels.triton.variant import Variant, compiled

ARCHS = (90, 80)
MODULES = sorted(m.name for m in pkgutil.iter_modules(radixlm.kernels.triton.__path__))
Job = tuple[str, int, int]  # module, which of its variants, architecture
Row = dict[str, Any]


@lru_cache
def variants_of(module: str) -> tuple[Variant, ...]:
    announce = getattr(
        importlib.import_module(f"radixlm.kernels.triton.{module}"), "variants", None
    )
    return tuple(announce()) if announce is not None else ()


def representative(module: str) -> list[Job]:
    """The first and the last variant of each kernel for sm_90, the first that sm_80 runs for it."""
    by_kernel: dict[int, list[int]] = {}
    variants = variants_of(module)
    for index, variant in enumerate(variants):
        by_kernel.setdefault(id(variant.kernel), []).append(index)
    picked = []
    for own in by_kernel.values():
        picked += [(module, own[0], 90)]
        picked += [(module, index, 80) for index in own if variants[index].min_arch <= 80][:1]
        picked += [(module, own[-1], 90)] if len(own) > 1 else []
    return picked


def every(module: str) -> list[Job]:
    """All variants, for sm_90 and for sm_80; of those that compile to the same, one."""
    seen, jobs = set(), []
    for index, variant in enumerate(variants_of(module)):
        parts = (variant.signature, variant.constants, variant.options)
        size = (variant.num_warps, variant.num_stages, variant.wgmma, variant.min_arch)
        key = (id(variant.kernel), size, *(str(sorted(part.items())) for part in parts))
        if key not in seen:
            seen.add(key)
            jobs += [(module, index, arch) for arch in ARCHS]
    return jobs


def compile_one(job: Job) -> Row:
    module, index, arch = job
    variant = variants_of(module)[index]
    start = time.monotonic()
    try:
        result = compiled(variant, arch)
    except Exception as error:  # the other variants go on; the row fails the test
        reason = str(error).strip().splitlines() or [""]
        return {
            "name": variant.name,
            "arch": arch,
            "error": f"{type(error).__name__}: {reason[-1]}",
        }
    return {
        "name": variant.name,
        "kernel": f"{module}.{variant.kernel.fn.__name__}",
        "arch": arch,
        "registers": result.registers,
        "spills": result.spills,
        "shared_bytes": result.shared_bytes,
        "has_wgmma": "wgmma.mma_async" in result.ptx,
        "wants_wgmma": variant.wgmma and arch == 90,
        "seconds": round(time.monotonic() - start, 2),
    }


def compile_all(jobs: list[Job], num_processes: int) -> Iterator[Row]:
    """Rows as they come."""
    if num_processes == 1:
        yield from map(compile_one, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context) as pool:
        for future in as_completed([pool.submit(compile_one, job) for job in jobs]):
            yield future.result()


def table(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each kernel and architecture: its worst numbers."""
    kinds: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.get("kernel", row["name"]), row["arch"]), []).append(row)
    head = ("variants", "registers", "spills", "shared", "wgmma", "seconds")
    yield f"{'kernel':<40} {'sm':>3}" + "".join(f"{name:>10}" for name in head)
    for (kernel, arch), own in sorted(kinds.items()):
        if any("error" in row for row in own):
            yield f"{kernel:<40} {arch:>3} {own[0]['error']}"
            continue
        worst = [max(row[name] for row in own) for name in ("registers", "spills", "shared_bytes")]
        wgmma = sum(row["has_wgmma"] for row in own)
        numbers = (len(own), *worst, wgmma, round(sum(row["seconds"] for row in own)))
        yield f"{kernel:<40} {arch:>3}" + "".join(f"{number:>10}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--arch", type=int, choices=ARCHS, help="this one only")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    choose = every if options.all else representative
    jobs = [
        (module, index, arch)
        for name in options.modules
        for module, index, arch in choose(name)
        if arch in (options.arch or arch,)
        and arch >= variants_of(module)[index].min_arch
        and options.only in variants_of(module)[index].name
    ]
    rows = []
    for row in compile_all(jobs, min(options.jobs, max(1, len(jobs) // 4))):
        rows.append(row)
        if not options.table:
            print(json.dumps(row), flush=True)
    if options.table:
        print("\n".join(table(rows)))
        sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
