"""The experiments of docs/scale.md: goodput by layout, by number of GPUs, by the mix of prefill and
decode, by routing, and under failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from radixlm.bench import report
from simulate import svg
from simulate.cluster import Cluster, Failures, Pool
from simulate.cost import model
from simulate.experts import skew
from simulate.layout import Layout, StepTime
from simulate.machine import GPUS, Engine
from simulate.result import Result, Slo, best_rate, summarize
from simulate.traffic import MIXES, Arrival, Mix, draw, read

LIMITS = Slo(1.0, 0.04)
EXPERT_LIMITS = Slo(3.0, 0.1)
SECONDS = 20.0
GPUS_OF_LAYOUTS = 32
Row = dict[str, Any]


def _dense(**layout: int) -> StepTime:
    return StepTime(model("llama-70b"), GPUS["H100"], Engine(), Layout(**layout))


def _arrivals(mix: Mix, seconds: float, rate: float) -> Iterable[Arrival]:
    return draw(mix, rate, seconds, 1)


def _best(name: str, pools: list[Pool], mix: Mix, slo: Slo, high: float, seconds: float) -> Row:
    """The row of the largest rate that keeps the limits."""
    rate, found = best_rate(
        partial(Cluster, pools),
        partial(_arrivals, mix, seconds),
        seconds,
        slo,
        high / 16,
        high,
        1.1,
    )
    gpus = sum(pool.gpus for pool in pools)
    row = {"name": name, "gpus": gpus, "rate": rate if found else 0.0}
    return row | ({"ttft_s": found.ttft_s, "tpot_s": found.tpot_s} if found else {})


def layouts(seconds: float = SECONDS) -> list[Row]:
    """Llama 70B on 32 GPUs, cut in several ways."""
    mix, found = MIXES["plain"], []
    for name, layout in (
        ("8 x TP4", {"tp": 4}), ("4 x TP8", {"tp": 8}),
        ("8 x (TP2, PP2)", {"tp": 2, "pp": 2}), ("4 x (TP4, PP2)", {"tp": 4, "pp": 2}),
    ):  # fmt: skip
        time = _dense(**layout)
        pool = Pool(time, GPUS_OF_LAYOUTS // time.layout.gpus, step_tokens=2048)
        found.append(_best(name, [pool], mix, LIMITS, 64.0, seconds))
    for first in (5, 6):
        pools = [Pool(_dense(tp=4), first, "prefill"), Pool(_dense(tp=4), 8 - first, "decode")]
        name = f"TP4, {first} prefill, {8 - first} decode"
        found.append(_best(name, pools, mix, LIMITS, 64.0, seconds))
    return found


def experts(seconds: float = SECONDS) -> list[Row]:
    """DeepSeek-V3 on 12 nodes: how many prefill."""
    cost, found = model("deepseek-v3"), []
    engine = Engine(gemm=0.55, attention=0.55, bandwidth=0.75, overlap=0.5, layer_s=1.5e-4)

    def time(ranks: int) -> StepTime:
        layout = Layout(ranks, 1, ranks, 32 + -(cost.experts + 32) % ranks)
        return StepTime(cost, GPUS["H100"], engine, layout, skew(cost, layout, 0.8, True, 0.3))

    for nodes in (4, 6, 8):
        first, second = 8 * nodes, 8 * (12 - nodes)
        pools = [
            Pool(time(first), 1, "prefill", 4096),
            Pool(time(second), 1, "decode", max_running=256),
        ]
        name = f"EP{first} prefills, EP{second} decodes"
        found.append(_best(name, pools, MIXES["plain"], EXPERT_LIMITS, 256.0, seconds))
    return found


def growth(rate_a_gpu: float, seconds: float = 10.0) -> list[Row]:
    """The same load a GPU on more and more GPUs."""
    found = []
    for gpus in (16, 64, 256, 1024):
        cluster = Cluster([Pool(_dense(tp=4), gpus // 4, step_tokens=2048)])
        cluster.run(_arrivals(MIXES["plain"], seconds, rate_a_gpu * gpus))
        found.append({"gpus": gpus} | _row(summarize(cluster, seconds, LIMITS)))
    return found


def routing(trace: Path, seconds: float = 600.0) -> list[Row]:
    """A recorded hour of conversations on 2 to 16 replicas: what is left of its prefix hits."""
    arrivals = [arrival for arrival in read(trace) if arrival.at_s < seconds]
    found = []
    for replicas in (2, 4, 8, 16):
        for method in ("round_robin", "shortest_queue", "minimum_tokens", "sticky"):
            cluster = Cluster([Pool(_dense(tp=8), replicas)], method=method)
            cluster.run(arrivals)
            result = summarize(cluster, seconds, LIMITS)
            found.append({"replicas": replicas, "method": method} | _row(result))
    return found


def failures(seconds: float = 60.0) -> list[Row]:
    """256 GPUs that lose a node every few seconds, a thousand times more often than real ones."""
    found = []
    for name, every_s in (("none", 0.0), ("a node every 20 s", 20.0), ("every 5 s", 5.0)):
        a_day = 86_400 / every_s / 32 * 1000 if every_s else 0.0
        cluster = Cluster([Pool(_dense(tp=8), 32)], Failures(a_day, restart_s=30.0))
        cluster.run(_arrivals(MIXES["plain"], seconds, 100.0))
        found.append({"deaths": name} | _row(summarize(cluster, seconds, LIMITS)))
    return found


def _row(result: Result) -> Row:
    names = ("requests", "kept", "goodput", "hit_rate", "ttft_s", "tpot_s")
    return {n: getattr(result, n) for n in (*names, "resent", "lost_tokens")} | {
        "died": result.deaths
    }


def draw_all(folder: Path, trace: Path | None, say: Callable[[str], None] = print) -> None:
    """Run the experiments that ``scale.json`` in ``folder`` lacks; the images beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "scale.json"
    found: dict[str, list[Row]] = json.loads(store.read_text()) if store.exists() else {}
    todo: dict[str, Callable[[], list[Row]]] = {
        "layouts": layouts,
        "growth": lambda: growth(0.8 * max(r["rate"] for r in found["layouts"]) / GPUS_OF_LAYOUTS),
        "failures": failures,
        "experts": experts,
    }
    if trace is not None:
        todo["routing"] = lambda: routing(trace)
    for name, experiment in todo.items():
        if name not in found:
            found[name] = experiment()
            store.write_text(json.dumps(found) + "\n")
        say(_table(found[name]))
    images(found, folder)


def images(found: dict[str, list[Row]], folder: Path) -> None:
    """Write them from the rows of ``scale.json``."""
    for name, title in (
        ("layouts", "Llama 70B on 32 H100: requests a second within 1 s and 40 ms a token"),
        ("experts", "DeepSeek-V3 on 96 H100: requests a second within 3 s and 100 ms a token"),
    ):
        rows = [(row["name"], row["rate"], f"{row['rate']:.1f}/s") for row in found[name]]
        (folder / f"scale-{name}.svg").write_text(svg.bars(title, rows))
    rows = found["growth"]
    curve = {"goodput a GPU": [row["goodput"] / row["gpus"] for row in rows]}
    most = 1.2 * max(value for value in curve["goodput a GPU"])
    image = svg.lines(
        "Llama 70B, TP4: goodput a GPU, requests/s",
        "GPUs", [str(row["gpus"]) for row in rows], curve, round(most, 2),
    )  # fmt: skip
    (folder / "scale-growth.svg").write_text(image)
    if "routing" in found:
        methods = list(dict.fromkeys(row["method"] for row in found["routing"]))
        ticks = list(dict.fromkeys(str(row["replicas"]) for row in found["routing"]))
        hits = {
            m: [100 * row["hit_rate"] for row in found["routing"] if row["method"] == m]
            for m in methods
        }
        image = svg.lines(
            "Conversations: % of the input that was cached", "replicas", ticks, hits, 40.0
        )
        (folder / "scale-routing.svg").write_text(image)


def _table(rows: list[Row]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, tuple):
            return " / ".join(f"{1e3 * part:.0f}" for part in value)
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    names = list(rows[0])
    cells = [tuple(cell(row.get(name, "")) for name in names) for row in rows]
    return report.table(names, cells) + "\n"
