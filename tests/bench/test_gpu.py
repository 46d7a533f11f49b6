"""The GPU benchmark: its roofline against published arithmetic, its records and charts, and a smoke
test of its stages on a CPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.bench.scripts import FOLDER, bench_module

TIMES = ("gpu_ms", "roofline_ms", "share", "tok_s")


def part(name: str) -> ModuleType:
    return bench_module(f"gpu.{name}")


roofline, chart, scheduler_run, session = map(
    part, ("roofline", "chart", "scheduler_run", "session")
)


@pytest.mark.parametrize(
    ("name", "sizes", "decode_ms", "prefill_ms"),
    [
        ("0.6B", (2, 2), (0.305, 0.496, 2.03, 7.38), 18.9),
        ("0.6B", (1, 2), (0.202, 0.393, 1.92, 7.24), 14.3),
        ("0.6B", (1, 1), (0.188, 0.284, 1.05, 3.74), 14.3),
        ("8B", (2, 2), (3.52, 3.74, 5.49, 12.9), 167),
        ("8B", (1, 2), (1.90, 2.12, 3.87, 10.6), 94.6),
        ("8B", (1, 1), (1.88, 1.99, 2.87, 6.60), 94.6),
        ("30B-A3B", (2, 2), (1.44, 6.20, 15.3, 20.0), 90),
        ("30B-A3B", (1, 2), (0.81, 3.27, 8.49, 13.1), 61.7),
    ],
)
def test_rooflines_of_an_h200(
    name: str, sizes: tuple[int, int], decode_ms: tuple[float, ...], prefill_ms: float
) -> None:
    shape, ceilings = roofline.SHAPES[name], roofline.Ceilings()
    got = [1e3 * roofline.decode_s(shape, b, 1024, ceilings, *sizes) for b in (1, 8, 64, 256)]
    assert got == pytest.approx(decode_ms, rel=0.006)
    got_ms = 1e3 * roofline.prefill_s(shape, 1, 8192, 0, ceilings, sizes[0])
    assert got_ms == pytest.approx(prefill_ms, rel=0.006)


def test_a_cached_prefix_costs_attention_only() -> None:
    shape, ceilings = roofline.SHAPES["8B"], roofline.Ceilings()
    whole, first, rest = (
        roofline.prefill_s(shape, 1, *part, ceilings)
        for part in ((8192, 0), (6144, 0), (2048, 6144))
    )
    assert first + rest == pytest.approx(whole)


def test_goals_are_met_or_missed() -> None:
    large, mixture = roofline.SHAPES["8B"], roofline.SHAPES["30B-A3B"]
    assert roofline.verdict(large, "bf16", 1, 0.76) == "must"  # 4.7 ms of an H200 are 75 %
    assert roofline.verdict(large, "bf16", 1, 0.85) == "stretch"
    assert roofline.verdict(mixture, "fp8", "prefill", 0.40) == "missed"
    assert roofline.verdict(large, "bf16", 7, 1.0) == ""


def test_idle_time_between_spans() -> None:
    assert scheduler_run.uncovered([(0, 4), (1, 2), (6, 7), (7, 10)]) == pytest.approx(0.2)
    assert scheduler_run.uncovered([]) is None


def test_the_error_of_nan_is_infinite() -> None:
    assert session.relative(torch.tensor([torch.nan]), torch.ones(1)) == float("inf")
    assert session.relative(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(
        0.08
    )


def test_failed_and_skipped_stages_are_recorded(tmp_path: Path, monkeypatch: Any) -> None:
    main = part("__main__")
    s = session.Session(torch.device("cpu"), time.monotonic() + 40, tmp_path / "gpu.json")
    s.record["stages"] = {}
    failing = ModuleType("gpu.failing")
    failing.run = lambda s: s.add(what=float("inf")) and 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpu.failing", failing)
    main.run_stage(s, main.Stage("a", "gpu.failing", 1))
    main.run_stage(s, main.Stage("b", "gpu.absent", 1))
    main.run_stage(s, main.Stage("c", "gpu.failing", 60))
    stages = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert [stage["state"] for stage in stages.values()] == ["failed", "failed", "skipped"]
    assert stages["a"]["rows"] == [{"what": "inf"}] and "ZeroDivisionError" in stages["a"]["why"]
    assert "gpu.absent" in stages["b"]["why"] and "60 s" in stages["c"]["why"]


def test_later_stages_run_in_a_new_process_after_a_broken_device(
    tmp_path: Path, monkeypatch: Any
) -> None:
    main, broken = part("__main__"), []
    for name, run in {"gpu.one": lambda s: broken.append(1), "gpu.two": lambda s: None}.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].run = run  # type: ignore[attr-defined]
    monkeypatch.setattr(
        main, "STAGES", (main.Stage("a", "gpu.one", 1), main.Stage("b", "gpu.two", 1))
    )
    monkeypatch.setattr(main, "is_broken", lambda device: bool(broken))

    def again(command: list[str], check: bool) -> Any:
        broken.clear()
        return SimpleNamespace(returncode=main.main(command[2:]))

    monkeypatch.setattr(main.subprocess, "run", again)
    assert main.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {n: stage["state"] for n, stage in record["stages"].items()} == {
        "a": "done",
        "b": "done",
    }
    assert record["command"] == ["bench/gpu", "--device", "cpu", "--out", str(tmp_path)]


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    workers = part("workers")
    s = session.Session(torch.device("cpu"), 0.0, tmp_path / "gpu.json", is_smoke=True)
    (rows,) = workers.ask(s, [{"work": "absent"}], 60)
    assert len(rows) == 1 and rows[0]["error"].startswith("exit 1")
    assert "No module named 'gpu.absent'" in rows[0]["error"]
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_frees_its_tensors(tmp_path: Path) -> None:
    random_engine = part("random_engine")
    s = session.Session(torch.device("cpu"), time.monotonic() + 60, tmp_path / "x", is_smoke=True)
    threads = torch.get_num_threads()
    try:
        with random_engine.opened(s, roofline.TINY["0.6B"]) as engine:
            kept = [
                weakref.ref(x) for x in (engine.runner, engine.runner.model, engine.runner.attn)
            ]
            assert not engine.takes(1, 1 << 20) and engine.takes(2, 50)
        gc.collect()
        assert [ref() for ref in kept] == [None] * 3
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(FOLDER / "gpu"), "--device", "cpu", "--quick"]
    done = subprocess.run(
        [*command, "--stages", "0,1,2,3,4,5,8", "--out", str(out)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    found["printed"], found["path"] = done.stdout, str(out / "gpu.json")
    return found


def rows(record: dict[str, Any], stage: str, key: str) -> list[dict[str, Any]]:
    return [row for row in record["stages"][stage]["rows"] if key in row]


def test_every_stage_runs_on_a_cpu(record: dict[str, Any]) -> None:
    names = ["ceilings", "kernels", "models", "decode", "prefill", "engine", "adapters"]
    assert list(record["stages"]) == names
    assert {stage["state"] for stage in record["stages"].values()} == {"done"}
    assert all(f"{name}: done" in record["printed"] for name in names)
    assert "checks are good" in record["printed"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["command"][:3] == ["bench/gpu", "--device", "cpu"]
    whats = {row["what"] for row in rows(record, "ceilings", "what")}
    assert {"copy", "read", "gemm bf16", "empty kernel", "pinned copy"} <= whats
    assert rows(record, "ceilings", "failed")[0]["failed"] == {}


def test_kernels_and_models_are_near_their_references(record: dict[str, Any]) -> None:
    kernels = rows(record, "kernels", "kernel")
    assert all(row["ok"] and row["error"] <= row["bound"] for row in kernels)
    kinds = ("attention, decode", "attention, extend", "store", "rms_norm", "norm + rope", "gate",
             "draws outside", "linear fp8", "experts")  # fmt: skip
    assert all(any(row["kernel"].startswith(kind) for row in kernels) for kind in kinds)
    errors = rows(record, "models", "error")
    assert {row["what"] for row in errors} >= {"prefill", "prefill in chunks", "forced decodes"}
    assert all(row["error"] < 1e-5 for row in errors)
    same = rows(record, "models", "same")
    assert len(same) == 3 and all(row["same"] == row["of"] for row in same)


def test_steps_and_engines_are_timed(record: dict[str, Any]) -> None:
    for stage in ("decode", "prefill"):
        timed = rows(record, stage, "gpu_ms")
        assert {row["model"] for row in timed} == {"0.6B", "8B"}
        assert all(row[name] > 0 for row in timed for name in TIMES)
        assert rows(record, stage, "kernels")[0]["kernels"][0]["us"] > 0
    loads = {(row["model"], row["way"]): row for row in rows(record, "engine", "out_tok_s")}
    assert len(loads) == 3 and loads["0.6B", "overlap"]["out"] == loads["0.6B", "no overlap"]["out"]
    shared = {row["way"]: row["cached_tokens"] for row in rows(record, "engine", "cached_tokens")}
    assert shared == {"cache": 2 * 48, "no cache": 0}


def test_a_record_becomes_a_chart(record: dict[str, Any], tmp_path: Path) -> None:
    found = list(chart.points(record))
    assert len(found) == 11 and found[0][0] == "0.6B bf16 decode 1 x 48"
    drawn = ElementTree.fromstring(chart.svg([("a < b", 0.5, "must")], "title"))
    assert [bar.get("width") for bar in drawn if bar.tag.endswith("rect")] == ["210.0"]
    assert chart.plot(Path(record["path"])).stat().st_size > 500
