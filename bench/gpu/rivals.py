"""Stage 6: transformers on the same work, each case in a process of its own with a time limit: it
compiles, and what has come when its time is over is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.session import Session

# case -> seconds that it may take
CASES = {"static 0.6B": 60.0, "static 8B": 60.0, "batch 0.6B": 75.0, "eager 0.6B": 30.0}
ORDER = ("batch 0.6B", "static 0.6B", "eager 0.6B", "static 8B")
LEAST_S = 20.0  # a process that has less need not begin


def run(s: Session) -> None:
    """generate with a static cache and without, generate_batch beside our engine."""
    for case in ORDER[: 2 if s.quick else 4]:
        limit_s = CASES[case] if s.is_smoke else min(CASES[case], s.left_s() - 5)
        if limit_s < LEAST_S:
            s.add(case=case, skipped="no time is left")
            continue
        for row in _ask(s, case, limit_s):
            s.add(case=case, **_beside(s, row))


def _ask(s: Session, case: str, limit_s: float) -> list[dict[str, Any]]:
    """What the process has printed by the end or its limit, with what went wrong."""
    spec = json.dumps({"case": case, "device": s.device.type, "is_smoke": s.is_smoke})
    output = s.out.with_name(f"hf-{case.replace(' ', '-')}.log")
    folder = str(Path(__file__).parent)
    with output.open("w") as file:
        worker = subprocess.Popen(
            [sys.executable, folder, "--worker", spec], stdout=file, stderr=subprocess.STDOUT,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )  # fmt: skip
        try:
            code = worker.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, 9)
            worker.wait()
            code = -9
    lines = output.read_text(errors="replace").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{"hf":')]
    if code:
        why = f"killed after {limit_s:.0f} s" if code == -9 else f"exit {code}"
        rows.append({"hf": case, "error": f"{why}: {' | '.join(lines[-4:])[-600:]}"})
    return rows


def _beside(s: Session, row: dict[str, Any]) -> dict[str, Any]:
    """With how many times faster we were in the same run, where we did the same work."""
    stages = s.record["stages"]
    mine = None
    if row.get("what") == "generate_batch":
        for entry in stages.get("engine", {}).get("rows", ()):
            if entry.get("what") == "requests" and entry.get("way") == "overlap":
                mine = entry["out_tok_s"] / row["out_tok_s"]
    elif "ms" in row:
        for entry in stages.get("decode", {}).get("rows", ()):
            same = entry.get("model") == row["model"] and entry.get("batch") == row["batch"]
            if same and entry.get("context") == row["context"] and entry["weights"] == "bf16":
                mine = row["ms"] / entry["period_ms"] if "period_ms" in entry else None
    return row if mine is None else row | {"we_are_times_faster": mine}
