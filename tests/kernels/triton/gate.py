"""Compiles variants of kernels without a GPU, in a pool of processes; a JSON line for each, or with
``--table`` a line for each kernel. Run as a program; see README.md."""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from tests.kernels.triton.compiler import Variant, compiled

ARCHS = (90, 80)
ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {
    "TRITON_INTERPRET": "0",
    "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", str(ROOT), os.environ.get("PYTHONPATH", "")]),
}
"""Of a process that compiles kernels."""
RECORD = Path(__file__).with_name("compiled.csv")
COLUMNS = ("key", "name", "kernel", "arch", "registers", "spills", "shared_bytes", "has_wgmma",
           "wants_wgmma")  # fmt: skip
MODULES = sorted(file.stem for file in Path(__file__).with_name("variants").glob("*.py"))
Job = tuple[str, int, int]  # module, which of its variants, architecture
Row = dict[str, Any]


@lru_cache
def variants_of(module: str) -> tuple[Variant, ...]:
    return tuple(importlib.import_module(f"tests.kernels.triton.variants.{module}").variants())


def key_of(variant: Variant, arch: int) -> str:
    """A hash of everything that decides the result: compiler, source of the kernel and of the
    functions it calls, types, constants."""
    parts = (variant.signature, variant.constants, variant.options)
    texts = [triton.__version__, arch, variant.num_warps, variant.num_stages]
    texts += [sorted(part.items()) for part in parts]
    texts += source_of(variant.kernel)
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


@lru_cache
def source_of(function: Any) -> tuple[str, ...]:
    """A function's text, the constants that it names, and the same of the functions it calls."""
    known = function.fn.__globals__
    found = [function.src]
    for name in sorted(set(function.fn.__code__.co_names)):
        value = known.get(name)
        if hasattr(value, "src"):
            found += source_of(value)
        elif name in known and not hasattr(value, "__name__"):
            found.append(f"{name} = {value!r}")
    return tuple(found)


def read_record() -> dict[str, Row]:
    """Earlier results, by key."""
    if not RECORD.exists():
        return {}
    with RECORD.open(newline="") as file:
        return {line["key"]: as_row(line) for line in csv.DictReader(file)}


def as_row(line: dict[str, str]) -> Row:
    numbers = {name: int(line[name]) for name in COLUMNS[3:]}
    return {"key": line["key"], "name": line["name"], "kernel": line["kernel"], **numbers}


def write_record(rows: Iterable[Row]) -> None:
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda row: (row["kernel"], row["name"], row["arch"])):
            writer.writerow({name: int(v) if isinstance(v, bool) else v for name, v in row.items()})


def is_chosen(variant: Variant, arch: int) -> bool:
    """Whether the product uses the variant on such a GPU."""
    return variant.min_arch <= arch <= variant.max_arch


def representative(module: str) -> list[Job]:
    """The first and the last variant of each kernel for sm_90, the first that sm_80 runs for it."""
    by_kernel: dict[int, list[int]] = {}
    variants = variants_of(module)
    for index, variant in enumerate(variants):
        by_kernel.setdefault(id(variant.kernel), []).append(index)
    picked = []
    for own in by_kernel.values():
        for arch, count in ((90, 2), (80, 1)):
            fit = [index for index in own if is_chosen(variants[index], arch)]
            picked += [
                (module, index, arch) for index in dict.fromkeys((fit[:1] + fit[-1:])[:count])
            ]
    return picked


def every(module: str) -> list[Job]:
    """All variants for sm_90 and sm_80, without duplicates that compile to the same code."""
    seen, jobs = set(), []
    for index, variant in enumerate(variants_of(module)):
        parts = (variant.signature, variant.constants, variant.options)
        archs = (variant.min_arch, variant.max_arch)
        size = (variant.num_warps, variant.num_stages, variant.wgmma, archs)
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
    except Exception as error:  # the other variants still compile; the row fails the test
        reason = str(error).strip().splitlines() or [""]
        return {
            "name": variant.name,
            "arch": arch,
            "error": f"{type(error).__name__}: {reason[-1]}",
        }
    return {
        "key": key_of(variant, arch),
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
    """Rows in the order in which they finish."""
    if num_processes == 1:
        yield from map(compile_one, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context) as pool:
        for future in as_completed([pool.submit(compile_one, job) for job in jobs]):
            yield future.result()


def table(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each kernel and architecture with its worst numbers."""
    kinds: dict[tuple[Any, int], list[Row]] = {}
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
    parser.add_argument("--only", default="", help="variants whose name has this pattern")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"what {RECORD.name} lacks, into it")
    parser.add_argument("--missing", action="store_true", help=f"only what {RECORD.name} lacks")
    parser.add_argument("--list", action="store_true", help="names only, nothing is compiled")
    parser.add_argument(
        "--sample",
        type=int,
        help="so many of them, from all over; with --all also the representative ones",
    )
    options = parser.parse_args()
    check_names(options.modules)
    jobs = asked(options, every if options.all else representative)
    if options.sample:
        jobs = jobs[:: max(1, -(-len(jobs) // options.sample))]
    if options.sample and options.all:
        jobs = list(dict.fromkeys([*asked(options, representative), *jobs]))
    if options.list:
        print("".join(f"{variants_of(m)[i].name} sm_{arch}\n" for m, i, arch in jobs), end="")
        return
    rows = []
    for row in compile_all(jobs, max(1, min(options.jobs, len(jobs) // 4))):
        rows.append(row)
        if options.record and "error" not in row:
            write_record((read_record() | {row["key"]: row}).values())
        if not options.table:
            print(json.dumps(row), flush=True)
    if options.table:
        print("\n".join(table(rows)))
        sys.exit(any("error" in row for row in rows))


def check_names(modules: list[str]) -> None:
    counts = Counter(variant.name for module in modules for variant in variants_of(module))
    if twice := [name for name, count in counts.items() if count > 1]:
        sys.exit(f"names of several variants: {twice}")


def asked(options: argparse.Namespace, choose: Callable[[str], list[Job]]) -> list[Job]:
    """The jobs of all modules that the options name."""
    jobs = [
        (module, index, arch)
        for name in options.modules
        for module, index, arch in choose(name)
        if arch in (options.arch or arch,)
        and is_chosen(variants_of(module)[index], arch)
        and re.search(options.only, variants_of(module)[index].name)
    ]
    if options.record or options.missing:
        return unrecorded(jobs, options.record and len(options.modules) == len(MODULES))
    return jobs


def unrecorded(jobs: list[Job], forgets: bool) -> list[Job]:
    """Jobs without a record. `forgets`: drop records of variants that no longer exist."""
    known = read_record()
    keys = {job: key_of(variants_of(job[0])[job[1]], job[2]) for job in jobs}
    if forgets:
        write_record(row for key, row in known.items() if key in keys.values())
    return [job for job, key in keys.items() if key not in known]


if __name__ == "__main__":
    main()
