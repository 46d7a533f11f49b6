"""The checks of the soak and overload runs, and the server that they start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.scripts import bench_module

from radixlm.base.errors import TransferError
from radixlm.bench.backends import Outcome
from radixlm.bench.client import HttpClient

slo, server_process = bench_module("slo"), bench_module("server_process")
soak, overload = bench_module("soak"), bench_module("overload")
Sample = server_process.Sample
FLAT = [Sample(float(i), 400 << 20, 50, 9, 2) for i in range(16)]
END = {"num_reqs": 0, "num_breaches": 0, "is_flushed": True}


def broken(checks: list[Any]) -> list[str]:
    return [check.claim for check in checks if not check.is_kept]


def soaked(samples: list[Any], end: dict[str, object] = END, problem: str = "") -> list[str]:
    load = soak.Load(HttpClient("http://127.0.0.1:1"), "m", 1)
    load.counts["stream"] = 10
    if problem:
        load.problems[problem] += 1
    return broken(soak.judge(samples, load, end))


def test_growth_leaves_out_the_start_and_bursts() -> None:
    assert slo.growth([1, 1, 5, 5, 5, 5, 5, 90]) == (5, 90)
    assert slo.growth([0.0] * 4 + [5.0] * 8 + [5, 99, 5, 5]) == (5, 5)
    assert slo.growth([3.0]) == (3, 3)


def test_a_soak_without_growth_passes() -> None:
    assert soaked(FLAT) == []


@pytest.mark.parametrize(
    ("field", "step", "claim"),
    [
        ("rss_bytes", 10 << 20, "memory does not grow"),
        ("num_fds", 2, "descriptors do not grow"),
        ("num_threads", 1, "threads do not grow"),
        ("num_shared", 1, "shared memory does not grow"),
        ("num_processes", 1, "no process died or was added"),
    ],
)
def test_growth_is_named(field: str, step: int, claim: str) -> None:
    rising = [
        replace(sample, **{field: getattr(sample, field) + i * step})
        for i, sample in enumerate(FLAT)
    ]
    assert soaked(rising) == [claim]


def test_leaks_and_failures_are_named() -> None:
    assert soaked(FLAT, problem="status 500") == ["no request failed"]
    assert soaked(FLAT, END | {"num_reqs": 1}) == ["nothing runs at the end"]
    assert soaked(FLAT, END | {"num_breaches": 2}) == ["the KV accounting balances"]
    assert soaked(FLAT, END | {"is_flushed": False}) == ["the cache can be emptied"]


def overloaded(changes: dict[str, object], samples: list[Any] = FLAT) -> list[str]:
    fine = [Outcome(True, status=200, queue_s=0.5) for _ in range(9)]
    refused = Outcome(False, "full", status=429, retry_after="1")
    odd = replace(refused, **changes)
    return broken(overload.judge([*fine, refused, odd], samples, 1.0, True))


def test_refusals_with_retry_after_pass() -> None:
    assert overloaded({}) == []
    assert overloaded({"status": 503}) == []


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"retry_after": None}, "refusals say Retry-After"),
        ({"status": 500}, "no other status"),
        ({"status": 0, "error": "closed"}, "no other status"),
        ({"status": 200}, "accepted requests are answered"),
        ({"status": 200, "is_ok": True, "queue_s": 90.0}, "p99 time in the queue"),
    ],
)
def test_overload_failures_are_named(changes: dict[str, object], claim: str) -> None:
    assert overloaded(changes) == [claim]


def test_overload_without_refusals_fails() -> None:
    fine = [Outcome(True, status=200, queue_s=0.1)]
    judged = overload.judge(fine, FLAT, 1.0, True)
    assert broken(judged) == ["some are answered, some refused"]


def test_the_table_counts_what_is_broken() -> None:
    shown = slo.render([slo.SloCheck("a", "1", "0", False), slo.SloCheck("b", "0", "0", True)])
    assert shown.splitlines()[-1] == "1 of 2 BROKEN" and "kept" in shown


async def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    server = server_process.ServerProcess(["--model-path", "/nowhere"], tmp_path / "log")
    with pytest.raises(TransferError, match="/nowhere"):
        async with server:
            pytest.fail("it started")
