"""Published measurements against simulated ones.

Constants of an engine (`ENGINES`) are fitted to the points that say so; the others are predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from radixlm.base.record import Record, replace
from radixlm.bench import report
from simulate.cluster import Cluster, Pool
from simulate.cost import model
from simulate.experts import skew
from simulate.layout import Layout, StepTime
from simulate.machine import GPUS, Engine
from simulate.result import Slo, best_rate, summarize
from simulate.traffic import BLOCK, Mix, draw, read

WITHIN = 0.2

ENGINES = {
    # SGLang of May 2025: one choice of plausible shares for all of its points
    "sglang": Engine(gemm=0.55, attention=0.55, bandwidth=0.75, overlap=0.5, layer_s=1.5e-4),
    # DistServe's own engine: `gemm` from its prefill point, the host's times from its decode point
    "distserve": Engine(gemm=0.4, attention=0.3, step_s=3e-3, row_s=3.5e-4, layer_s=5e-5),
    # vLLM of January 2024, which computes prompts first: the host's time from its one point
    "vllm": Engine(
        gemm=0.4, attention=0.3, step_s=9e-3, row_s=2e-4, layer_s=5e-5, is_prefill_first=True
    ),
}


class Point(Record):
    """A published value and ours. ``is_prediction``: no constant was fitted to it."""

    name: str
    unit: str
    published: float
    simulated: float
    is_prediction: bool = True

    @property
    def is_met(self) -> bool:
        return abs(self.simulated / self.published - 1) <= WITHIN


def points(traces: Path | None = None) -> list[Point]:
    """All of them; those of Mooncake's traces if their folder is given."""
    return [*deepseek(), *distserve(), *(mooncake(traces) if traces else ())]


def deepseek() -> Iterator[Point]:
    """DeepSeek-V3 on H100: lmsys.org, May 5, 2025 (4 nodes that prefill, 9 that decode), and
    DeepSeek's own profile of 16 nodes with balanced experts."""
    for prompt, published in ((1024, 57674), (2048, 54543), (4096, 50302)):
        yield Point(
            f"DeepSeek-V3, EP32, prompts of {prompt}", "input tokens/s a node", published,
            _prefill(prompt, 0.8),
        )  # fmt: skip
    yield Point(
        "the same, experts balanced perfectly", "input tokens/s a node", 59337, _prefill(4096, 0.0)
    )
    yield Point(
        "DeepSeek-V3, EP72, 256 rows a GPU, 2,048 cached", "output tokens/s a node", 22282,
        _decode(72, 256, 2048, 0.8, 32),
    )  # fmt: skip
    yield Point(
        "DeepSeek-V3, EP128, 128 rows a GPU, 4,096 cached, balanced", "output tokens/s a node",
        18598, _decode(128, 128, 4096, 0.0, 0),
    )  # fmt: skip


def _deepseek(ranks: int, spread: float, redundant: int) -> StepTime:
    cost, layout = model("deepseek-v3"), Layout(ranks, 1, ranks, redundant)
    load = skew(cost, layout, spread, True, drift=0.3 if spread else 0.0)
    return StepTime(cost, GPUS["H100"], ENGINES["sglang"], layout, load, sigma=0.03)


def _prefill(prompt: int, spread: float) -> float:
    """Input tokens a second and node of 4 nodes that have always enough prompts."""
    pool = Pool(_deepseek(32, spread, 32), 1, "prefill", 16384, kv_tokens=1 << 20)
    count = 8 * 32 * 16384 // prompt
    cluster = Cluster([pool, replace(pool, role="decode", max_running=1 << 14)])
    cluster.run(draw(Mix(prompt, 1, 0), count / 1e-3, 1e-3, 0))
    [unit] = cluster.first.units
    return unit.num_prompt_tokens / unit.busy_s / 4


def _decode(ranks: int, rows: int, cached: int, spread: float, redundant: int) -> float:
    """Output tokens a second and node while each GPU decodes so many rows."""
    output = 100
    first = Pool(_deepseek(32, 0.0, 32), 1, "prefill", 1 << 20, kv_tokens=1 << 26, max_running=4096)
    second = Pool(
        _deepseek(ranks, spread, redundant), 1, "decode", max_running=rows,
        kv_tokens=rows * (cached + output + 128),
    )  # fmt: skip
    cluster = Cluster([first, second])
    cluster.run(draw(Mix(cached - output // 2, output, 0), rows * ranks / 1e-3, 1e-3, 0))
    [unit] = cluster.units[1:]
    full = [trip for trip in cluster.trips if trip.end_s > 0]
    tpot_s = sum(trip.tpot_s for trip in full) / len(full)
    assert unit.num_row_steps
    return 8 * rows / tpot_s


def distserve() -> Iterator[Point]:
    """OPT-13B, 512 tokens in and 64 out, on A100s: figure 1 of DistServe (OSDI 2024)."""
    engine, limits = ENGINES["distserve"], Slo(0.4, 0.04)
    only_first, only_second = Slo(0.4, 9.0), Slo(9.0, 0.04)
    cost = model("opt-13b")

    def pool(engine: Engine, number: int, role: str) -> Pool:
        time = StepTime(cost, GPUS["A100"], engine, Layout(), sigma=0.02)
        return Pool(time, number, role, 2048, page_size=16)

    for name, published, pools, slo, gpus, is_prediction in (
        ("a GPU that prefills", 5.6, (("prefill", 1), ("decode", 4)), only_first, 1, False),
        ("a GPU that decodes", 10.0, (("prefill", 8), ("decode", 1)), only_second, 1, False),
        ("2 that prefill, 1 that decodes", 3.3, (("prefill", 2), ("decode", 1)), limits, 3, True),
        ("vLLM, one GPU for both", 1.6, (("both", 1),), limits, 1, False),
    ):
        used = ENGINES["vllm"] if len(pools) == 1 else engine
        make = partial(_cluster, [pool(used, number, role) for role, number in pools])
        rate, _ = best_rate(
            make, lambda rate: draw(Mix(512, 64, 0), rate, 60.0, 1), 60.0, slo, 1.0, 16.0
        )
        yield Point(
            f"OPT-13B on A100, {name}", "requests/s a GPU", published, rate / gpus, is_prediction
        )


def _cluster(pools: list[Pool]) -> Cluster:
    return Cluster(pools, has_cache=False)


def mooncake(folder: Path) -> Iterator[Point]:
    """The share of prompts that a cache without limit holds: table 2 of Mooncake (FAST 2025)."""
    for name, published in (("conversation", 40.0), ("toolagent", 59.0), ("synthetic", 66.0)):
        path = folder / f"{name}_trace.jsonl"
        if not path.exists():
            continue
        arrivals = read(path)
        tokens = BLOCK * sum(len(arrival.blocks) for arrival in arrivals)
        time = StepTime(model("llama-8b"), GPUS["H200"], Engine(), Layout(8))
        cluster = Cluster([Pool(time, 1, step_tokens=65536, page_size=BLOCK, kv_tokens=tokens)])
        cluster.run(arrivals)
        hits = summarize(cluster, arrivals[-1].at_s + 1).hit_rate
        yield Point(f"Mooncake's {name} trace, cached", "% of input", published, 100 * hits)


def table(found: list[Point]) -> str:
    """One line each."""
    rows = [
        (
            point.name,
            point.unit,
            f"{point.published:g}",
            f"{point.simulated:.4g}",
            f"{100 * (point.simulated / point.published - 1):+.0f} %",
            "" if point.is_prediction else "fitted",
        )
        for point in found
    ]
    return report.table(["point", "unit", "published", "simulated", "off", ""], rows)
