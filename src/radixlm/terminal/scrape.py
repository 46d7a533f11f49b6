"""Scrape: the text of /metrics as numbers, and percentiles of its histograms
(https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from radixlm.base.record import Record


class Histogram(Record):
    """``bounds``: ascending upper bounds of the buckets, the last is inf. ``counts``: how many
    values were at most as large as each bound."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def count(self) -> float:
        """How many values there were."""
        return self.counts[-1]

    def since(self, before: Histogram) -> Histogram:
        """What came after ``before``; everything if the counts began again."""
        pairs = [(now, then) for now, then in zip(self.counts, before.counts, strict=False)]
        if self.bounds != before.bounds or any(now < then for now, then in pairs):
            return self
        return Histogram(self.bounds, tuple(now - then for now, then in pairs))

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` (0 to 1) of the values lie, by a straight line within its
        bucket as PromQL's histogram_quantile; the last finite bound for values above that. None
        without values."""
        if not self.count > 0:
            return None
        rank, low, below = share * self.count, 0.0, 0.0
        for bound, upto in zip(self.bounds, self.counts, strict=True):
            if upto >= rank and upto > below:
                if math.isinf(bound):
                    return low
                low = min(low, bound)
                return low + (bound - low) * max(0.0, rank - below) / (upto - below)
            low, below = (low if math.isinf(bound) else bound), upto
        return low


class Scrape:
    """Samples by name, with ":" in names as "_": gateways rename their workers' metrics so."""

    def __init__(self, text: str) -> None:
        """ValueError for what is not Prometheus' text."""
        self.samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isnan(sample.value):
                    name = sample.name.replace(":", "_")
                    self.samples.setdefault(name, []).append((sample.labels, sample.value))

    def values(self, *names: str) -> list[float]:
        """All values of the first name that is there."""
        found = next((self.samples[name] for name in names if name in self.samples), [])
        return [value for _, value in found]

    def total(self, *names: str) -> float | None:
        """Their sum; None without any."""
        found = self.values(*names)
        return sum(found) if found else None

    def mean(self, *names: str) -> float | None:
        """Their mean; None without any."""
        found = self.values(*names)
        return sum(found) / len(found) if found else None

    def by_label(self, label: str, *names: str) -> dict[str, float]:
        """The sums of the first name that is there, by the values of ``label``."""
        sums: dict[str, float] = {}
        for labels, value in next((self.samples[n] for n in names if n in self.samples), []):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def histogram(self, *names: str) -> Histogram | None:
        """The first histogram that is there, of all its labels together. Where their bounds differ,
        those that all have."""
        name = next((name for name in names if f"{name}_bucket" in self.samples), None)
        if name is None:
            return None
        series: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
        for labels, value in self.samples[f"{name}_bucket"]:
            key = tuple(sorted((k, v) for k, v in labels.items() if k != "le"))
            series.setdefault(key, {})[float(labels.get("le", "inf"))] = value
        bounds = sorted(set.intersection(*(set(one) for one in series.values())))
        if not bounds or bounds[-1] != math.inf:
            return None
        counts = (sum(one[bound] for one in series.values()) for bound in bounds)
        return Histogram(tuple(bounds), tuple(counts))
