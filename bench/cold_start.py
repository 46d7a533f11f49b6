"""Time from the command to the first token, with warm and with cold page caches, in turn.

    PYTHONPATH=src python bench/cold_start.py --home FOLDER [--peers radixlm,llama.cpp,openvino]
        [--bits 16] [--rounds 3] [--packed-cache-dir DIR] [--out FILE]

FOLDER is that of cpu_peers.py. Each engine is started once without being measured. The files that
it has mapped then, those of its model and of its Python's packages are what a cold start does not
find: posix_fadvise(DONTNEED) drops them from the page cache. Pages that another process maps stay;
the column "kept" has the MB of large files that were in memory when the cold starts began.
--packed-cache-dir adds starts of RadixLM from a packed file, which its unmeasured start writes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from peers import machine
from peers.drive import Running
from peers.engines import PEERS, Engine, Setup, find

from radixlm.base.errors import ConfigError, TransferError
from radixlm.pools.memory import resident_bytes

TIMEOUT_S = 120.0  # of a start, and of writing a packed file


@dataclass(frozen=True, slots=True)
class Start:
    """One start. `kept_mb`: of its files, in memory when a cold one began; `foreign`: cores that
    other processes used meanwhile."""

    engine: str
    bits: int
    is_cold: bool
    seconds: float
    kept_mb: float
    foreign: float


def mapped_files(pid: int) -> set[Path]:
    """The files that a process and its descendants have mapped."""
    found = set()
    for process in machine.tree(pid):
        try:
            found |= {Path(each.path) for each in process.memory_maps()}
        except psutil.Error:
            continue
    return found


def installed_files(command: Sequence[str]) -> set[Path]:
    """The files of the packages of the Python that the command runs; of ours, all on its path."""
    folders = set(Path(command[0]).parent.parent.glob("lib/python*/site-packages"))
    if command[0] == sys.executable:
        folders |= {Path(part) for part in sys.path if part.endswith(("site-packages", "src"))}
    return {path for folder in folders for path in folder.rglob("*.*")}


def drop(files: set[Path]) -> float:
    """Drop the files from the page cache; the MB of those of a MB and more that stayed."""
    kept = 0
    os.sync()  # pages that are not written yet are not dropped
    for path in filter(Path.is_file, files):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if (size := path.stat().st_size) >= 1 << 20:
            kept += resident_bytes(torch.from_file(str(path), size=size, dtype=torch.uint8))
    return kept / 2**20


async def start(engine: Engine, threads: int, log: Path, packed: Path | None) -> set[Path]:
    """Start an engine without measuring it; the files that it maps. With ``packed`` wait until it
    has written its packed file there."""
    async with Running(engine, threads, log, TIMEOUT_S) as running:
        deadline_s = time.monotonic() + TIMEOUT_S
        while packed and not any(packed.glob("*.packed")) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.5)
        return mapped_files(running.pid)


async def measure(engine: Engine, bits: int, threads: int, log: Path, files: set[Path] | None
                  ) -> Start:  # fmt: skip
    """One start, cold if ``files`` are given. TransferError if it fails."""
    kept_mb = drop(files) if files is not None else 0.0
    before = machine.cpu_use(None)
    async with Running(engine, threads, log, TIMEOUT_S) as running:
        noise = machine.disturbance(before, machine.cpu_use(running.pid))
        seconds = running.start_s
    made = Start(engine.name, bits, files is not None, seconds, kept_mb, noise.foreign)
    print(made, flush=True)
    return made


def engines_of(args: argparse.Namespace, bits: int) -> list[tuple[Engine, Path | None]]:
    """Engines, and the folders of their packed files."""
    setup = Setup(args.home / "models" / "q3-0.6b", args.home, args.threads)
    found, missing = find(args.peers.split(","), (), setup, bits)
    for line in missing:
        print(f"left out: {line}", file=sys.stderr)
    pairs: list[tuple[Engine, Path | None]] = []
    for engine in found:
        if engine.name != "radixlm":
            pairs.append((engine, None))
            continue
        plain = replace(engine, command=(*engine.command, "--disable-packed-cache"))
        pairs.append((plain, None))
        if folder := args.packed_cache_dir:
            own = folder / str(bits)
            command = (*engine.command, "--packed-cache-dir", str(own))
            pairs.append((replace(engine, name="radixlm, packed file", command=command), own))
    return pairs


async def run(args: argparse.Namespace) -> list[Start]:
    """All starts; engines that fail are reported, and the others go on."""
    starts = []
    log = Path(tempfile.mkstemp(prefix="radixlm-start-", suffix=".log")[1])
    model = set((args.home / "models").rglob("*"))
    for bits in (int(text) for text in args.bits.split(",")):
        for engine, packed in engines_of(args, bits):
            try:
                mapped = await start(engine, args.threads, log, packed)
                files = mapped | model | installed_files(engine.command)
                for _ in range(args.rounds):
                    for cold in (None, files):
                        starts.append(await measure(engine, bits, args.threads, log, cold))
            except TransferError as error:
                print(f"FAILED {engine.name}, {bits} bit: {error}", file=sys.stderr)
    return starts


def table(starts: Sequence[Start]) -> str:
    """Medians in Markdown."""
    lines = [
        "| engine | bits | warm, s | cold, s | kept, MB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, bits in dict.fromkeys((one.engine, one.bits) for one in starts):
        mine = [one for one in starts if (one.engine, one.bits) == (name, bits)]
        warm, cold = (
            statistics.median(one.seconds for one in mine if one.is_cold is is_cold)
            for is_cold in (False, True)
        )
        kept = max(one.kept_mb for one in mine)
        lines.append(f"| {name} | {bits} | {warm:.2f} | {cold:.2f} | {kept:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """1 if nothing was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--home", type=Path, default=os.environ.get("PEERS_HOME"), help="default: PEERS_HOME")
    add("--peers", default=",".join(PEERS), help="comma-separated, of " + ", ".join(PEERS))
    add("--bits", default="16", help="comma-separated widths of the weights: 16, 8, 4")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--packed-cache-dir", type=Path, help="for packed files of our own")
    add("--out", type=Path, help="a file for all samples, as JSON")
    args = parser.parse_args()
    if args.home is None:
        raise ConfigError("--home (or PEERS_HOME) is needed: the folder of models and peers")
    starts = asyncio.run(run(args))
    if not starts:
        return 1
    print(table(starts))
    if args.out:
        args.out.write_text(json.dumps([asdict(one) for one in starts], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
