"""Queries of Grafana dashboards, and what a server offers to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from radixlm.entrypoints.http.admin.metrics import pair_gauges
from radixlm.observe.metrics import COUNTERS, GAUGES, Buckets, Metrics, full_name
from radixlm.router.metrics import RouterMetrics
from radixlm.router.series import Counter, Gauge

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "radixlm.json"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"instance", "job"}
_METRIC = re.compile(
    r"\b((?:sglang|radixlm|smg|sgl_router|radix_router)[:_][\w:]+)(?:\{([^}]*)\})?"
)


def queries(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and expression of each query, those of collapsed rows too."""
    for panel in dashboard["panels"]:
        yield from queries({"panels": panel.get("panels", ())})
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].strip()


def filled(expression: str, model: str = ".*", window: str = "20s") -> str:
    """``expression`` with values for Grafana's variables."""
    values = {"__rate_interval": window, "__interval": window, "model_name": model}
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ".*"), expression)


def variables(expression: str) -> set[str]:
    """Names of Grafana's variables."""
    return set(re.findall(r"\$\{?(\w+)", expression))


def metrics_of(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric of an expression with the labels that it is asked for."""
    for found in _METRIC.finditer(expression):
        yield found[1], set(re.findall(r"(\w+)\s*[=!]", found[2] or ""))


def grouped(expression: str) -> set[str]:
    """Labels of ``by (...)``."""
    return {name for part in re.findall(r"\bby\s*\(([^)]*)\)", expression)
            for name in re.findall(r"\w+", part)}  # fmt: skip


def offered() -> dict[str, set[str]]:
    """Samples of servers and gateways -> their labels."""
    found: dict[str, set[str]] = {}
    labels = dict.fromkeys(("model_name", "engine_type", "tp_rank", "pp_rank"), "x")
    metrics = Metrics(labels, Buckets(prompt=(1.0,), generation=(1.0,)))
    metrics.exposition(dict.fromkeys(GAUGES, 0.0) | pair_gauges({"peer_num_rooms": 1.0}))
    for one in metrics.registry._collector_to_names:
        for suffix in SUFFIXES[one._type]:
            extra = {"le"} if suffix == "_bucket" else set()
            found[one._name + suffix] = set(one._labelnames) | extra
    for name in COUNTERS:
        name, has_mode, _ = name.partition(" ")
        found[full_name(name)] = set(labels) | ({"mode"} if has_mode else set())
    for family in RouterMetrics()._families:
        kind = "histogram"
        if isinstance(family, Counter | Gauge):
            kind = "gauge"  # the names of counters are whole
        for view in family.views:
            names = {name.partition("=")[0] for name in view.labels}
            names |= {name for name, _ in view.fixed}
            for suffix in SUFFIXES[kind]:
                extra = {"le"} if suffix == "_bucket" else set()
                found[view.name + suffix] = names | extra
    return found


def load(path: Path = DASHBOARD) -> dict[str, Any]:
    """A dashboard."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
