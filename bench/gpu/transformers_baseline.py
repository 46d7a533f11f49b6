"""Stage 6: transformers on the same work. Each case runs in its own process with a time limit,
because it compiles; its results up to the limit are kept."""

from __future__ import annotations

from typing import Any

from gpu.session import Session
from gpu.workers import ask

# case -> time limit in seconds
CASES = {"static 0.6B": 60.0, "static 8B": 60.0, "batch 0.6B": 75.0, "eager 0.6B": 30.0}
ORDER = ("batch 0.6B", "static 0.6B", "eager 0.6B", "static 8B")
LEAST_S = 20.0  # not worth a start with less time


def run(s: Session) -> None:
    """generate with and without a static cache, generate_batch next to our engine."""
    for case in ORDER[: 2 if s.quick else 4]:
        limit_s = CASES[case] if s.is_smoke else min(CASES[case], s.left_s() - 5)
        if limit_s < LEAST_S:
            s.add(case=case, skipped="no time is left")
            continue
        (rows,) = ask(s, [{"work": "transformers_worker", "case": case}], limit_s)
        for row in rows:
            s.add(case=case, **_beside(s, row))


def _beside(s: Session, row: dict[str, Any]) -> dict[str, Any]:
    """The row with our speed relative to it, if the same run did the same work."""
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
