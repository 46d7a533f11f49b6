"""Goodput, the search for the highest rate, ramps and trace times, comparison of results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from radixlm.base.errors import ConfigError
from radixlm.bench import compare
from radixlm.bench.backends import Outcome
from radixlm.bench.datasets import Row
from radixlm.bench.load import Traffic, run_load
from radixlm.bench.progress import Progress
from radixlm.bench.slo import goodput, limits_ms
from radixlm.bench.sweep import Search, highest_rate
from radixlm.bench.sweep import main as sweep


def outcome(ttft_s: float, latency_s: float, num_output: int, is_ok: bool = True) -> Outcome:
    return Outcome(is_ok, ttft_s=ttft_s, latency_s=latency_s, num_output=num_output)


def test_goodput_counts_who_keeps_all_limits() -> None:
    limits = limits_ms(["ttft:200", "tpot:50"])
    outcomes = [
        outcome(0.2, 0.6, 9),  # 50 ms a token
        outcome(0.3, 0.4, 9),
        outcome(0.1, 1.0, 3),
        outcome(0.1, 0.1, 1),
        outcome(0.1, 0.2, 9, is_ok=False),
    ]
    found = goodput(outcomes, limits, 4.0)
    assert found["request_goodput"] == 0.5 and found["slo_attainment"] == 0.4
    for word in ("ttft", "ttft:x", "ttft:0", "itl:5"):
        with pytest.raises(ConfigError, match="--goodput ttft:500"):
            limits_ms([word])


@pytest.mark.parametrize(("capacity", "start"), [(37.0, 1.0), (0.3, 4.0), (5.0, 5.0)])
async def test_the_search_brackets_the_capacity(capacity: float, start: float) -> None:
    tried: list[float] = []

    async def attained(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= capacity else 0.5

    best = await highest_rate(Search(start, precision=0.05, max_runs=30), attained)
    assert best is not None and best <= capacity < best * 1.05 and len(tried) < 20


async def test_the_search_ends_at_its_limits() -> None:
    async def always(rate: float) -> float:
        return 1.0

    async def never(rate: float) -> float:
        return 0.0

    assert await highest_rate(Search(1.0, 6.0), always) == 6.0
    assert await highest_rate(Search(max_runs=5), never) is None
    with pytest.raises(ConfigError, match="--start-rate"):
        Search(8.0, 4.0)
    with pytest.raises(ConfigError, match="such as --goodput"):
        sweep([])
    with pytest.raises(ConfigError, match="the sweep chooses the rates"):
        sweep(["--goodput", "ttft:9", "--request-rate", "3"])


def test_ramps_change_the_rate() -> None:
    linear = Traffic(ramp="linear", ramp_start=2.0, ramp_end=10.0)
    assert linear.rates(5).tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    factors = Traffic(ramp="exponential", ramp_start=1.0, ramp_end=16.0).rates(5)
    assert factors == pytest.approx([1, 2, 4, 8, 16])
    at_s = linear.arrivals_s(2001)
    halves = np.searchsorted(at_s, at_s[-1] / 2)
    assert halves / 2001 == pytest.approx(0.36, abs=0.05)  # fewer in the slow half
    for values in ({"ramp": "linear"}, {"ramp_start": 1.0}, {"ramp": "linear", "ramp_start": 1.0,
                   "ramp_end": 2.0, "rate": 3.0}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"--ramp-up|--request-rate"):
            Traffic(**values)


async def test_rows_of_a_trace_are_sent_at_their_times() -> None:
    rows = [Row("a", None, 1, 1, at_s=0.0), Row("b", None, 1, 1, at_s=0.05)]

    async def ask(row: Row) -> Outcome:
        return Outcome(is_ok=True)

    _, seconds = await run_load(rows, ask, Traffic(), Progress(2, False))
    assert seconds >= 0.05


def test_compare_says_which_medians_differ(tmp_path: Path, capsys) -> None:
    slow = {"median_ttft_ms": 200.0, "ttfts": [0.2 + i / 1000 for i in range(40)],
            "errors": [""] * 40, "completed": 40, "output_throughput": 10.0}  # fmt: skip
    fast = slow | {"median_ttft_ms": 100.0, "ttfts": [x / 2 for x in slow["ttfts"]]}
    for name, one in (("slow", slow), ("fast", fast)):
        (tmp_path / name).write_text(json.dumps({"tag": "old"}) + "\n" + json.dumps(one) + "\n")
    paths = [str(tmp_path / "slow"), str(tmp_path / "fast")]
    assert compare.main([*paths, "--json"]) == 0
    rows = {row["figure"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["median_ttft_ms"]["ratio"] == 0.5 and rows["median_ttft_ms"]["verdict"] == "better"
    assert rows["completed"]["ratio"] == 1.0 and rows["completed"]["verdict"] == ""
    assert compare.compared(fast, slow)[-1]["verdict"] == "worse"
    assert compare.compared(slow, slow)[-1]["verdict"] == "same"
    assert compare.main(paths) == 0
    assert "0.500" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no figure is in both"):
        compare.main([*paths, "--tag", "old"])
    with pytest.raises(ConfigError, match="no result of tag 'new'"):
        compare.main([*paths, "--tag", "new"])
    (tmp_path / "none").write_text("x")
    with pytest.raises(ConfigError, match="not a result"):
        compare.main([paths[0], str(tmp_path / "none")])
