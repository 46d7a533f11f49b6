"""The simulator of clusters: skipped steps change nothing, no token is lost, times are physical."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.bench.scripts import bench_module

from radixlm.base.errors import ConfigError
from radixlm.bench.cli import run
from radixlm.self_check.kv_cache import find_violations

cluster_, cost_ = bench_module("simulate.cluster"), bench_module("simulate.cost")
layout_, machine_ = bench_module("simulate.layout"), bench_module("simulate.machine")
traffic, worker_ = bench_module("simulate.traffic"), bench_module("simulate.worker")
result_, experts_ = bench_module("simulate.result"), bench_module("simulate.experts")
Cluster, Pool, Failures = cluster_.Cluster, cluster_.Pool, cluster_.Failures
Layout, StepTime, Engine, GPUS = layout_.Layout, layout_.StepTime, machine_.Engine, machine_.GPUS


def times(sigma: float = 0.0, **layout: int) -> Any:
    return StepTime(cost_.model("llama-8b"), GPUS["H100"], Engine(), Layout(**layout), sigma=sigma)


def simulate(*pools: Any, mix: str = "chat", rate: float = 8.0, **settings: Any) -> Any:
    cluster = Cluster(pools, **settings)
    cluster.run(traffic.draw(traffic.MIXES[mix], rate, 8.0, seed=3))
    assert cluster.trips
    for unit in cluster.units:
        for worker in unit.workers:
            assert not worker.requests and worker.items is None
            assert find_violations(worker.kv_manager) == []
    return cluster


def all_tokens_came(cluster: Any) -> bool:
    return all(t.end_s > 0 and t.num_emitted == t.arrival.output for t in cluster.trips)


@pytest.mark.parametrize(
    ("layout", "kv_tokens"),
    [
        ({}, None),
        ({"tp": 4}, None),
        ({"pp": 2}, None),
        ({"tp": 4, "attn_dp": 4}, None),
        ({}, 20_000),
        pytest.param({"tp": 4}, 20_000, marks=pytest.mark.slow),  # one pool, as above
        pytest.param({"pp": 2}, 20_000, marks=pytest.mark.slow),
        ({"tp": 4, "attn_dp": 4}, 20_000),
    ],
)
def test_steps_at_once_end_when_single_steps_do(
    layout: dict[str, int], kv_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(times(**layout), 2, kv_tokens=kv_tokens)
    fast = simulate(pool)
    monkeypatch.setattr(worker_, "MAX_STEPS", 1)
    monkeypatch.setattr(worker_.LongSteps, "plan", lambda *args: None)
    slow = simulate(pool)
    assert all_tokens_came(fast) and all_tokens_came(slow)
    if kv_tokens is None:  # with too few pages, rows hold pages of steps to come
        for name in ("first_s", "end_s"):
            ours, single = ([getattr(t, name) for t in c.trips] for c in (fast, slow))
            assert np.allclose(ours, single, rtol=0, atol=1e-9)


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    time = times()
    cluster = Cluster([Pool(time, 1)])
    cluster.run([traffic.Arrival(1.0, 1000, 40, (0, 1))])
    [trip] = cluster.trips

    def step(rows: int, chunk: int, cached: float) -> float:
        def one(value: float, kind: type = int) -> Any:
            return np.array([value], kind)

        pairs = one(chunk * 0.5 * chunk, float)
        work = layout_.Work(
            one(rows), one(chunk), pairs, one(chunk > 0), one(cached, float)[:, None]
        )
        return float(time.seconds(work)[0])

    assert trip.ttft_s == pytest.approx(step(0, 1000, 0))
    decodes = sum(step(1, 0, 1000 + i) for i in range(1, 40))
    assert trip.end_s - trip.first_s == pytest.approx(decodes)


def test_prefill_and_decode_apart_wait_for_the_transfer() -> None:
    first, second = Pool(times(), 1, "prefill"), Pool(times(), 1, "decode")
    arrival = traffic.Arrival(0.0, 4096, 20, tuple(range(8)))
    both, apart = Cluster([Pool(times(), 1)]), Cluster([first, second])
    for cluster in (both, apart):
        cluster.run([arrival])
        assert all_tokens_came(cluster)
    [alone], [sent] = both.trips, apart.trips
    num_bytes = 4097 * cost_.model("llama-8b").kv_bytes
    assert sent.first_s == pytest.approx(alone.first_s)
    waited = machine_.transfer_s(num_bytes, GPUS["H100"], 1)
    assert sent.end_s - alone.end_s == pytest.approx(waited, rel=0.05)
    assert all_tokens_came(simulate(first, second, rate=20.0))


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
def test_no_token_is_lost_when_replicas_die(roles: tuple[str, ...]) -> None:
    pools = [Pool(times(sigma=0.05), 2, role) for role in roles]
    failures = Failures(a_day=86_400 * 1000 / 4, restart_s=1.5)  # each node dies every 4 s
    cluster = simulate(*pools, rate=20.0, failures=failures)
    found = result_.summarize(cluster, 8.0)
    assert found.deaths >= 3 and found.resent > 0
    assert found.lost_tokens == 0 and all_tokens_came(cluster)


def test_hits_are_the_shared_blocks_of_the_trace(tmp_path: Path) -> None:
    rows = [(0, [0, 1, 2, 3]), (60_000, [0, 1, 4, 5]), (120_000, [0, 1, 4, 6]), (180_000, [7, 8])]
    lines = (
        {"timestamp": at, "input_length": 512 * len(b), "output_length": 2, "hash_ids": b}
        for at, b in rows
    )
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    cluster = Cluster([Pool(times(), 1)])
    cluster.run(traffic.read(path))
    assert [trip.num_cached for trip in cluster.trips] == [0, 1024, 1536, 0]
    assert [a.at_s for a in traffic.read(path, most=2, speed=2.0)] == [0.0, 30.0]
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1]}')
    with pytest.raises(ConfigError, match=r"trace.jsonl:1: 1 blocks for 600 tokens"):
        traffic.read(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"trace.jsonl:1: KeyError"):
        traffic.read(path)


def test_costs_are_those_of_the_published_models() -> None:
    assert cost_.model("llama-8b").weights == pytest.approx(8.03e9, rel=0.001)
    deepseek = cost_.model("deepseek-v3")
    assert deepseek.weights == pytest.approx(671e9, rel=0.001)
    assert deepseek.kv_bytes == 61 * 576 * 2
    active = deepseek.attention + deepseek.dense + deepseek.routed * 8 / 256
    assert active == pytest.approx(36e9, rel=0.03)  # 37e9 with the token table
    mamba = {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 64,
        "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no model of the time of Mamba1"):
        cost_.cost_of(mamba)


def test_the_balancer_evens_out_what_experts_cost() -> None:
    cost, layout = cost_.model("deepseek-v3"), Layout(tp=32, attn_dp=32, redundant=32)
    trivial = experts_.skew(cost, layout, 0.8, is_balanced=False)
    balanced = experts_.skew(cost, layout, 0.8, is_balanced=True)
    for tokens in (1 << 12, 1 << 19):
        assert 1.0 < balanced(tokens) < trivial(tokens)
    assert balanced(1 << 19) < 1.1 < 1.5 < trivial(1 << 19)
    assert balanced(64) > balanced(1 << 19), "few tokens are drawn unevenly"


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="attn_dp 3 must divide tp 4"):
        Layout(tp=4, attn_dp=3)
    with pytest.raises(ConfigError, match="pp and attn_dp"):
        Layout(tp=4, attn_dp=4, pp=2)
    with pytest.raises(ConfigError, match=r"266 slots .* 12 ranks: set redundant to 8"):
        experts_.skew(
            cost_.model("deepseek-v3"), Layout(tp=12, attn_dp=12, redundant=10), 0.8, True
        )
    large = StepTime(cost_.model("llama-70b"), GPUS["H100"], Engine(), Layout())
    with pytest.raises(ConfigError, match="do not fit H100: raise tp"):
        large.kv_tokens()


def test_the_largest_rate_keeps_the_limits() -> None:
    slo, pools = result_.Slo(0.5, 0.02), [Pool(times(), 1)]

    def arrivals(rate: float) -> Any:
        return traffic.draw(traffic.Mix(1000, 20, 0), rate, 10.0, 0)

    def kept(rate: float) -> float:
        cluster = Cluster(pools)
        cluster.run(arrivals(rate))
        return float(result_.summarize(cluster, 10.0, slo).kept)

    rate, found = result_.best_rate(lambda: Cluster(pools), arrivals, 10.0, slo, 8, 60, 1.4)
    assert found is not None and found.kept >= 0.9 and kept(rate) == found.kept
    assert kept(1.5 * rate) < 0.9


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (("--rate", "4", "--seconds", "3", "--pool", "1:tp=4"), 0, "0 tokens lost"),
        (("--pool", "1:tq=4"), 2, "no key tq"),
        (("--pool", "one:tp=4"), 2, "write it like"),
        (("--pool", "1:role=server"), 2, "role both, prefill or decode"),
        (("--seconds", "0"), 2, "no request arrives"),
    ],
)
def test_command_line(
    args: tuple[str, ...], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = bench_module("simulate.__main__").main
    assert run("bench/simulate", main, ("run", *args)) == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


@pytest.mark.slow
def test_published_points_of_deepseek_are_met() -> None:
    validate = bench_module("simulate.validate")
    found = list(validate.deepseek())
    assert len(found) == 6
    assert [p.name for p in found if not p.is_met] == []
    assert validate.table(found).count("tokens/s a node") == 6


def test_pictures_of_the_experiments(tmp_path: Path) -> None:
    scale = bench_module("simulate.scale")
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 900, "output_length": 9, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps(row | {"timestamp": 50 * i}) for i in range(40)))
    rows = scale.routing(trace, 2.0)
    hits = {row["method"]: row["hit_rate"] for row in rows if row["replicas"] == 16}
    assert hits["sticky"] > hits["round_robin"], "15 replicas compute the prompt again"
    bars = [{"name": "a & b", "rate": 2.0}, {"name": "c", "rate": 0.0}]
    growth = [{"gpus": 8, "goodput": 4.0}, {"gpus": 16, "goodput": 7.0}]
    scale.images({"layouts": bars, "experts": bars, "growth": growth, "routing": rows}, tmp_path)
    images = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert images == [f"scale-{n}.svg" for n in ("experts", "growth", "layouts", "routing")]
    for name in images:
        root = ElementTree.parse(tmp_path / name).getroot()
        assert root.tag.endswith("svg")
    assert "a &amp; b" in (tmp_path / "scale-layouts.svg").read_text()
