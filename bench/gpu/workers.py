"""Runs work in processes of its own, in parallel, each with a time limit. A broken device affects
only its process, and compilers use all cores. A worker prints a line of JSON for each result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.session import Session

MARK = "@row "


def say(**row: Any) -> None:
    """Print a result; called in a worker."""
    print(MARK + json.dumps(row), flush=True)


def ask(s: Session, specs: Sequence[dict[str, Any]], limit_s: float) -> list[list[dict[str, Any]]]:
    """The results of each worker until its end or the limit. The last row of a failed worker has an
    `error`."""
    running = [_start(s, spec, number) for number, spec in enumerate(specs)]
    end_s = time.monotonic() + limit_s
    return [_finish(worker, output, end_s) for worker, output in running]


def _start(s: Session, spec: dict[str, Any], number: int) -> tuple[subprocess.Popen[bytes], Path]:
    output = s.out.with_name(f"worker-{os.getpid()}-{number}.log")
    given = json.dumps(spec | {"device": s.device.type, "is_smoke": s.is_smoke})
    offline = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with output.open("wb") as file:
        worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent), "--worker", given], stdout=file,
            stderr=subprocess.STDOUT, env=os.environ | offline, start_new_session=True,
        )  # fmt: skip
    return worker, output


def _finish(worker: subprocess.Popen[bytes], output: Path, end_s: float) -> list[dict[str, Any]]:
    why = ""
    try:
        if worker.wait(max(0.1, end_s - time.monotonic())):
            why = f"exit {worker.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, 9)
        worker.wait()
        why = "killed at its time limit"
    lines = output.read_text(errors="replace").splitlines()
    output.unlink()
    rows = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    if why:
        rest = [line for line in lines if not line.startswith(MARK)]
        rows.append({"error": f"{why}: {' | '.join(rest[-4:])[-600:]}"})
    return rows
