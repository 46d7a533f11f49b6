"""The benchmark of an NVIDIA GPU: ceilings, kernels, models, decode, prefill, engine,
transformers.

    PYTHONPATH=src python bench/gpu --out results [--budget 460] [--stages 0,1,3] [--quick]
    python bench/gpu --plot results/gpu.json     a chart beside the file

0 ceilings    copy, read, products, launches, copies to the host; all shares refer to these
1 kernels     every kernel against float32 or float64 of torch, on ragged shapes
2 models      two layers of each shape against Hugging Face in float32; chunks, graphs, overlap
3 decode      steps over 1,024 cached tokens, B = 1, 8, 64, 256, against roofline and goals
4 prefill     1 x 8192, 8 x 1024, 1 x 2048 behind 6,144
5 engine      256 requests, GPU idle share, host time, overlap on and off, a shared prefix
6 hf          transformers: generate with a static cache, generate_batch on the same requests
7 flashinfer  its kernels beside ours, where it is installed
8 adapters    steps with 1 and 8 adapters of rank 16 beside steps without

Stages 1 to 5, 7 and 8 need packages of the engine: msgspec, pyzmq, psutil, safetensors, tokenizers,
tqdm. A stage starts if its estimate fits what is left of the budget; one that fails is noted and
the next goes on. ``gpu.json`` in --out is written after every result. ``--device cpu`` runs all
code that a CPU can run in tiny shapes: a test of this program, not of a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
# Python puts a script's folder first on the path, where its files would hide packages
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != FOLDER]
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parents[1] / "src")]

import torch  # noqa: E402

from gpu.roofline import Ceilings  # noqa: E402
from gpu.session import Session  # noqa: E402

_PARTS = ("triton", "transformers", "numpy", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Stage:
    """`module` has a function `run(session)`; `seconds`: estimated time on an H200."""

    name: str
    module: str
    seconds: float


STAGES = (
    Stage("ceilings", "gpu.ceilings", 15),
    Stage("kernels", "gpu.kernels", 60),
    Stage("models", "gpu.models", 45),
    Stage("decode", "gpu.decode", 70),
    Stage("prefill", "gpu.prefill", 40),
    Stage("engine", "gpu.engine", 75),
    Stage("hf", "gpu.transformers_baseline", 40),
    Stage("flashinfer", "gpu.plugins", 60),
    Stage("adapters", "gpu.adapters", 40),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for all")
    parser.add_argument("--stages", default="", help="numbers, such as 0,1,3; all if unset")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a record and exit")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """0 after all chosen stages ran."""
    args = parse(argv)
    if args.plot is not None:
        print(importlib.import_module("gpu.chart").plot(args.plot))
        return 0
    if args.worker is not None:
        given = json.loads(args.worker)
        importlib.import_module(f"gpu.{given['work']}").work(given)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU: --device cpu tries the program in tiny shapes", file=sys.stderr)
        return 2
    chosen: Sequence[int] = (
        [int(n) for n in args.stages.split(",")] if args.stages else range(len(STAGES))
    )
    s = open_session(args)
    if args.resume:
        s.record = json.loads(s.out.read_text())
        s.ceilings = Ceilings(**s.record["ceilings"])
    else:
        s.record["command"] = ["bench/gpu", *argv]
    for at, number in enumerate(chosen):
        run_stage(s, STAGES[number])
        if is_broken(s.device) and at + 1 < len(chosen):
            s.write()
            return go_on(s, chosen[at + 1 :])
    print("\n" + importlib.import_module("gpu.chart").table(s.record))
    states = [stage["state"] for stage in s.record["stages"].values()]
    return int("failed" in states)


def is_broken(device: torch.device) -> bool:
    """Whether a kernel left the device unusable for this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def go_on(s: Session, stages: Sequence[int]) -> int:
    """Run the remaining stages in a new process."""
    numbers = ",".join(map(str, stages))
    command = [sys.executable, str(FOLDER), "--resume", "--out", str(s.out.parent)]
    command += ["--budget", f"{s.left_s():.0f}", "--stages", numbers, "--device", s.device.type]
    return subprocess.run(command + ["--quick"] * s.quick, check=False).returncode


def open_session(args: argparse.Namespace) -> Session:
    """A session with facts about the machine in its record."""
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    s = Session(
        device, time.monotonic() + args.budget, args.out / "gpu.json", args.quick,
        is_smoke=args.device == "cpu",
    )  # fmt: skip
    s.record |= {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": "CPU, tiny shapes: a test of the program",
        "budget_s": args.budget,
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__} | {name: _version(name) for name in _PARTS},
        "stages": {},
    }
    if device.type == "cuda":
        torch.cuda.set_device(device)
        facts = torch.cuda.get_device_properties(device)
        s.record["device"] = facts.name
        s.record["device_facts"] = {
            "memory": facts.total_memory,
            "processors": facts.multi_processor_count,
            "capability": f"{facts.major}.{facts.minor}",
            "cuda": torch.version.cuda,
        }
    return s


def _version(name: str) -> str | None:
    """Version of a package without importing it, which takes seconds and may fail."""
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def run_stage(s: Session, stage: Stage) -> None:
    """Run the stage if the time may suffice, and record how it ended."""
    began_s = time.monotonic()
    entry: dict[str, Any] = {"state": "running", "rows": []}
    s.record["stages"][stage.name], s.rows = entry, entry["rows"]
    estimate = stage.seconds * (0.5 if s.quick else 1.0)
    if not s.is_smoke and estimate > s.left_s():
        entry |= {"state": "skipped", "why": f"needs {estimate:.0f} s, {s.left_s():.0f} are left"}
    else:
        print(f"{stage.name}:", flush=True)
        try:
            importlib.import_module(stage.module).run(s)
            entry["state"] = "done"
        except Exception as error:  # the other stages run after any error
            entry |= {"state": "failed", "why": f"{type(error).__name__}: {error}"}
            entry["trace"] = traceback.format_exc().splitlines()[-12:]
            print(traceback.format_exc(), file=sys.stderr, flush=True)
    entry["seconds"] = round(time.monotonic() - began_s, 1)
    if entry["state"] == "skipped":
        print(f"{stage.name}: skipped, {entry['why']}", flush=True)
    s.record["ceilings"] = {
        "bandwidth": s.ceilings.bandwidth,
        "flops_bf16": s.ceilings.flops_bf16,
        "flops_fp8": s.ceilings.flops_fp8,
    }
    if not is_broken(s.device):
        s.free()
    s.write()


if __name__ == "__main__":
    # read when kernels are imported; on a CPU they are interpreted
    os.environ.setdefault("TRITON_INTERPRET", str(int("cpu" in sys.argv)))
    sys.exit(main(sys.argv[1:]))
