"""The host benchmark on a short run: a real scheduler decodes, and its figures add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.bench.scripts import bench_module

from radixlm.bench.cli import run
from radixlm.self_check.kv_cache import find_violations

host = bench_module("host")
Clock, PARTS = host.Clock, host.PARTS


def main(*args: str) -> int:
    return run("bench/host.py", host.main, args)


@pytest.mark.parametrize("depth", [0, 1])
def test_each_step_gives_every_request_one_token(depth: int) -> None:
    steps = host.Steps(num_running=5, num_steps=40, page_size=4, depth=depth)
    before = steps.watch(("whole",))
    assert [steps.step() for _ in range(20)] == [5] * 20
    clocks = steps.watch(PARTS)
    assert [steps.step() for _ in range(20)] == [5] * 20
    assert len(before["whole"].wall_s) == 20
    assert all(len(clock.cpu_s) == 20 and sum(clock.wall_s) > 0 for clock in clocks.values())
    scheduler = steps.scheduler
    assert find_violations(scheduler.kv_manager, scheduler.planner.running) == []


def test_time_of_an_inner_part_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(f"time.{clock}", lambda: now_s[0])

    def works() -> None:
        now_s[0] += 3.0

    inner, outer = Clock(), Clock()
    whole = inner.timed(works, outer)

    def with_more() -> None:
        now_s[0] += 1.0
        whole()

    outer.timed(with_more)()
    inner.lap()
    outer.lap()
    assert (inner.wall_s, outer.wall_s) == (inner.cpu_s, outer.cpu_s) == ([3.0], [1.0])


def test_parts_are_added_step_by_step() -> None:
    first, second = Clock(), Clock()
    first.wall_s, second.wall_s = [0.001, 0.002, 0.009], [0.003, 0.001, 0.001]
    first.cpu_s, second.cpu_s = [0.001] * 3, [0.002] * 3
    got = host.part("both", [first, second], goal_ms=3.5)
    assert (got.median_ms, got.min_ms) == (pytest.approx(4), pytest.approx(3))
    assert got.cpu_ms == pytest.approx(3) and got.is_met
    assert not host.Part("late", 1, 1, 1, 5, goal_ms=4).is_met
    assert host.Part("no goal", 1, 1, 1, 5).is_met is None


def test_goals_apply_to_the_sums() -> None:
    parts = host.measure(num_running=16, num_steps=30, page_size=16)
    assert [p.goal_ms for p in parts] == [*[None] * len(PARTS), 0.1, None]
    assert all(0 < p.min_ms <= p.median_ms <= p.p99_ms for p in parts)
    assert "whole step, 16 running" in host.render(parts, [])


def test_the_command_prints_json_and_writes_a_line(tmp_path: Path, capsys) -> None:
    file = tmp_path / "host.jsonl"
    flags = "--num-running 2 3 --num-steps 5 --skip-memory --json --output-file".split()
    assert main(*flags, str(file)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["scheduler"]) == 2 * (len(PARTS) + 2) and printed == json.loads(
        file.read_text()
    )


def test_strict_fails_where_a_goal_is_missed(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    flags = ["--num-running", "16", "--num-steps", "5", "--skip-memory", "--strict"]
    monkeypatch.setitem(host.GOALS_MS, 16, 1e9)
    assert main(*flags) == 0
    monkeypatch.setitem(host.GOALS_MS, 16, 1e-9)
    assert main(*flags) == 1
    assert "MISSED" in capsys.readouterr().out


def test_the_profile_names_functions(capsys) -> None:
    assert main(*"--num-running 2 --num-steps 3 --profile".split()) == 0
    assert "commit.py" in capsys.readouterr().out


def test_counts_below_one_are_refused(capsys) -> None:
    assert main("--num-running", "0") == 2
    assert "--num-running 0" in capsys.readouterr().err
