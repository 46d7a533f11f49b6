"""What a run of the simulator shows, and the largest rate that keeps its promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from radixlm.base.record import Record
from simulate.cluster import Cluster
from simulate.traffic import Arrival


class Slo(Record):
    """Limits for the time to the first token and for the mean time of a later one; ``share`` of the
    requests must keep both."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05
    share: float = 0.9


class Result(Record):
    """Of all requests that arrived in the first ``seconds``. ``goodput``: requests a second that
    kept both limits. ``busy``: share of the time that replicas computed. ``lost_tokens``: output
    tokens that a request did not get, or got twice."""

    requests: int
    seconds: float
    gpus: int
    ttft_s: tuple[float, float, float]  # median, 90th and 99th percentile
    tpot_s: tuple[float, float, float]
    kept: float
    goodput: float
    input_tokens_s: float
    output_tokens_s: float
    hit_rate: float
    busy: tuple[float, ...]  # of each pool
    deaths: int
    resent: int
    lost_tokens: int


def summarize(cluster: Cluster, seconds: float, slo: Slo | None = None) -> Result:
    """The figures of a run that has ended."""
    slo, trips = slo or Slo(), cluster.trips
    ttft_s, tpot_s = (np.array([getattr(t, n) for t in trips]) for n in ("ttft_s", "tpot_s"))
    is_kept = (ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s)
    marks = (50, 90, 99)
    prompt = sum(t.arrival.prompt for t in trips)
    busy, units = [], iter(cluster.first.units + (cluster.second.units if cluster.second else []))
    for _, count in sorted((p.role == "decode", p.replicas) for p in cluster.pools):
        busy.append(sum(next(units).busy_s for _ in range(count)) / count / cluster.now_s)
    return Result(
        requests=len(trips),
        seconds=seconds,
        gpus=sum(pool.gpus for pool in cluster.pools),
        ttft_s=tuple(np.percentile(ttft_s, marks).tolist()),
        tpot_s=tuple(np.percentile(tpot_s, marks).tolist()),
        kept=float(is_kept.mean()),
        goodput=float(is_kept.sum()) / seconds,
        input_tokens_s=prompt / seconds,
        output_tokens_s=sum(t.num_emitted for t in trips) / seconds,
        hit_rate=sum(t.num_cached for t in trips) / max(prompt, 1),
        busy=tuple(busy),
        deaths=cluster.num_deaths,
        resent=sum(t.num_sent > 1 + (cluster.second is not None) for t in trips),
        lost_tokens=sum(abs(t.num_emitted - t.arrival.output) for t in trips),
    )


def best_rate(
    make: Callable[[], Cluster],
    arrivals: Callable[[float], Iterable[Arrival]],
    seconds: float,
    slo: Slo,
    low: float,
    high: float,
    precision: float = 1.05,
) -> tuple[float, Result | None]:
    """The largest rate between ``low`` and ``high`` at which the share is kept, and its result."""
    found: Result | None = None
    while high / low > precision:
        rate = (low * high) ** 0.5
        cluster = make()
        cluster.run(arrivals(rate))
        result = summarize(cluster, seconds, slo)
        if result.kept >= slo.share:
            low, found = rate, result
        else:
            high = rate
    return low, found


def render(result: Result) -> str:
    """A few lines for people."""
    ms = [" / ".join(f"{1e3 * s:.0f}" for s in each) for each in (result.ttft_s, result.tpot_s)]
    return "\n".join(
        (
            f"{result.requests} requests in {result.seconds:.0f} s on {result.gpus} GPUs",
            f"first token {ms[0]} ms, each later one {ms[1]} ms (median / 90 % / 99 %)",
            f"{100 * result.kept:.1f} % kept both limits: {result.goodput:.2f} requests/s",
            f"{result.input_tokens_s:.0f} input and {result.output_tokens_s:.0f} output tokens/s, "
            f"{100 * result.hit_rate:.1f} % of input cached",
            "busy: " + ", ".join(f"{100 * share:.0f} %" for share in result.busy),
            f"{result.deaths} replicas died, {result.resent} requests were sent again, "
            f"{result.lost_tokens} tokens lost",
        )
    )
