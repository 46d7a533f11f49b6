"""Counters and histograms for one thread: a dict's entry each, 0.2 us an event.

prometheus_client's own take a lock and search their buckets in Python (1.5 us for a pair); here it
only writes the exposition. A family may be shown under several names, each with some of its labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from radixlm.base.lazy import load
from radixlm.base.record import Record

Labels = tuple[str | int, ...]


class View(Record):
    """A name of a family, its labels, and ``fixed`` labels that the family does not keep."""

    name: str
    labels: tuple[str, ...]
    fixed: tuple[tuple[str, str], ...] = ()


class Family:
    """What counters and histograms share. ``labels``: names of the values of an event, in order."""

    kind = ""

    def __init__(self, help_: str, labels: tuple[str, ...], views: Sequence[View]) -> None:
        self.help, self.labels, self.views = help_, labels, tuple(views)
        for view in views:
            assert set(view.labels) <= set(labels), view

    def forget(self, label: str, value: str) -> None:
        """Drop the series of a worker that has left, so that memory stays bounded."""
        if label in self.labels:
            place, rows = self.labels.index(label), self._rows()
            for key in [key for key in rows if key[place] == value]:
                del rows[key]

    def _rows(self) -> dict[Labels, Any]:
        raise NotImplementedError

    def summed(self, view: View) -> dict[Labels, Any]:
        """The rows by the labels of ``view``."""
        places = [self.labels.index(name) for name in view.labels]
        found: dict[Labels, Any] = {}
        for key, row in self._rows().items():
            short = tuple(key[place] for place in places)
            found[short] = self._added(found[short], row) if short in found else row
        return found

    @staticmethod
    def _added(one: Any, other: Any) -> Any:
        return one + other

    def samples(self, view: View) -> Iterator[tuple[str, dict[str, str], float]]:
        """(name, labels, value) of the exposition."""
        for key, value in self.summed(view).items():
            yield view.name, self._shown(view, key), value

    @staticmethod
    def _shown(view: View, key: Labels) -> dict[str, str]:
        return dict(view.fixed) | dict(zip(view.labels, map(str, key), strict=True))


class Counter(Family):
    """Events by their labels."""

    kind = "counter"

    def __init__(self, help_: str, labels: tuple[str, ...], views: Sequence[View]) -> None:
        super().__init__(help_, labels, views)
        self.values: dict[Labels, float] = {}

    def _rows(self) -> dict[Labels, float]:
        return self.values

    def inc(self, *labels: str | int, by: float = 1) -> None:
        """One more event, or ``by``."""
        try:
            self.values[labels] += by
        except KeyError:
            self.values[labels] = by


class Histogram(Family):
    """Values by their labels, in buckets."""

    kind = "histogram"

    def __init__(
        self, help_: str, labels: tuple[str, ...], views: Sequence[View], bounds: Sequence[float]
    ) -> None:
        """``bounds``: upper ends of the buckets, ascending, without infinity."""
        super().__init__(help_, labels, views)
        self.bounds = tuple(bounds)
        self._series: dict[Labels, list[float]] = {}  # counts of the buckets, and the sum

    def _rows(self) -> dict[Labels, list[float]]:
        return self._series

    @staticmethod
    def _added(one: list[float], other: list[float]) -> list[float]:
        return [a + b for a, b in zip(one, other, strict=True)]

    def observe(self, value: float, *labels: str | int) -> None:
        """One more value."""
        row = self._series.get(labels)
        if row is None:
            row = self._series[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value

    def samples(self, view: View) -> Iterator[tuple[str, dict[str, str], float]]:
        ends = [f"{float(bound)}" for bound in self.bounds] + ["+Inf"]
        for key, row in self.summed(view).items():
            shown, counts = self._shown(view, key), list(accumulate(row[:-1]))
            for end, count in zip(ends, counts, strict=True):
                yield f"{view.name}_bucket", shown | {"le": end}, count
            yield f"{view.name}_count", shown, counts[-1]
            yield f"{view.name}_sum", shown, row[-1]


class Gauge(Family):
    """Values that are asked for at a scrape; names in "_total" are those of counters."""

    def __init__(
        self,
        help_: str,
        labels: tuple[str, ...],
        views: Sequence[View],
        read: Callable[[], Mapping[Labels, float]],
    ) -> None:
        super().__init__(help_, labels, views)
        self.kind = "counter" if views[0].name.endswith("_total") else "gauge"
        self._read = read

    def _rows(self) -> dict[Labels, float]:
        return dict(self._read())


class Exposition:
    """A collector of prometheus_client over families."""

    def __init__(self, families: Callable[[], Sequence[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        """One metric for each name."""
        metric = load("prometheus_client.core:Metric")
        for family in self._families():
            for view in family.views:
                shown = metric(view.name.removesuffix("_total"), family.help, family.kind)
                for name, labels, value in family.samples(view):
                    shown.add_sample(name, labels, value)
                yield shown

    def text(self) -> bytes:
        """What Prometheus reads, in its text form 0.0.4."""
        registry = load("prometheus_client:CollectorRegistry")(auto_describe=False)
        registry.register(self)
        text: bytes = load("prometheus_client:generate_latest")(registry)
        return text
