"""Prometheus metrics under SGLang's names.

Callers report events (``Series.first_token``, ``tokens``, ``Metrics.ended``) and pass the gauges at
a scrape; this module defines names, labels and buckets.

Several HTTP processes count together (prometheus_client's multiprocess mode) where SHARED_FOLDER
names a folder before this module is imported.
"""

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from radixlm.base.record import Record
from radixlm.wire.replies import DraftTotals

SHARED_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"  # an environment variable
FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
INTER_TOKEN_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
E2E_S = (*FIRST_TOKEN_S, 600, 1200, 1800, 2400)
LOAD_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30)
MAX_ADAPTERS = 50  # that have a label of their own; all others are OTHER
QUEUE_S = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
LENGTHS = (
    *(100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000),
    *(12000, 15000, 20000, 22000, 25000, 30000, 35000, 40000, 66000, 99000, 132000, 300000),
    *(600000, 900000, 1100000),
)
MAX_LABEL_SETS = 100  # of customers' labels; each has histograms of its own
MAX_LABEL_CHARS = 64
OTHER = "other"  # what is counted together beyond these limits
GAUGES: dict[str, str] = {
    "num_running_reqs": "Requests that are computed.",
    "num_queue_reqs": "Requests that wait.",
    "num_grammar_queue_reqs": "Requests whose grammar is compiled.",
    "num_paused_reqs": "Requests that are paused.",
    "num_retracted_reqs": "Retractions since the start: requests that gave their cache back.",
    "total_retracted_reqs": "The same.",
    "avg_request_queue_latency": "Mean seconds in the queue of the last 100 requests that ended.",
    "num_grammar_total": "Requests with a grammar.",
    "num_grammar_cache_hit_total": "Those whose grammar had been compiled before.",
    "num_grammar_aborted_total": "Those whose grammar could not be compiled.",
    "num_used_tokens": "Tokens in the KV cache that are in use.",
    "token_usage": "Part of the KV cache that is in use.",
    "gen_throughput": "Tokens generated a second.",
    "cache_hit_rate": "Part of the prompt tokens found in the prefix cache.",
    "spec_accept_length": "Mean tokens of a step that verified drafts, by request.",
    "spec_accept_rate": "Part of the drafted tokens that was accepted.",
    "spec_num_steps": "Tokens of a draft where no length is chosen.",
    "spec_num_draft_tokens": "The draft and the token before it.",
    "radixlm:evicted_tokens": "Tokens that the prefix cache gave up since an engine's start.",
    "radixlm:engines_ready": "Engines that serve.",
    "radixlm:held_reqs": "Requests that wait for an engine that restarts.",
    "utilization": "Running requests over the most that may run.",
    "lora_pool_slots_used": "Adapters that are loaded.",
    "lora_pool_slots_total": "Adapters that may be loaded (--max-loaded-loras; 0: any number).",
    "lora_num_loads": "Adapters that were loaded since the start.",
    "lora_num_failed_loads": "Loads of adapters that failed.",
    "lora_num_evictions": "Adapters that were dropped to make room for others.",
    "expert_balancedness_10": "Mean over maximum of the ranks' expert tokens, last 10 steps.",
    "expert_balancedness_100": "The same, last 100 steps.",
    "expert_balancedness_1000": "The same, last 1000 steps.",
    "radixlm:rank_wait_seconds": "Seconds that the ranks have waited for each other.",
    "prefetched_tokens_total": "Prompt tokens whose KV came from storage.",
    "backuped_tokens_total": "Tokens whose KV was copied to the tiers.",
    "load_back_tokens_total": "Prompt tokens whose KV came from the host tier.",
    "hicache_dropped_tokens_total": "Tokens whose KV was not copied: too much waited.",
    "prefetch_bandwidth": "GB a second that the tiers give (a moving average).",
    "engine_startup_time": "Seconds from the start until ready.",
    "engine_load_weights_time": "Seconds that loading the weights took.",
}
PAIR_GAUGES: dict[str, str] = {
    "num_prefill_prealloc_queue_reqs": "Requests of pairs that wait or are computed here.",
    "num_prefill_inflight_queue_reqs": "Requests whose pages a decode server is fetching.",
    "num_decode_prealloc_queue_reqs": "Requests that wait for room for their pages.",
    "num_decode_transfer_queue_reqs": "Requests that wait for pages of a prefill server.",
    "num_bootstrap_failed_reqs_total": "Fetches that found no prefill server, or another model.",
    "num_transfer_failed_reqs_total": "Fetches that broke off.",
    "kv_transfer_speed_gb_s": "Gigabytes a second of reading pages.",
    "kv_transfer_latency_ms": "Mean milliseconds of reading the pages of a fetch.",
    "kv_transfer_bootstrap_ms": "Mean milliseconds of asking a bootstrap service.",
    "kv_transfer_total_mb": "Megabytes fetched, or sent.",
    "radixlm:kv_pulls_whole": "Fetches that brought all pages.",
    "radixlm:kv_pulls_part": "Fetches that brought some pages; the rest was computed.",
    "radixlm:kv_pulls_local": "Fetches that brought none; all was computed.",
    "radixlm:kv_transfer_shm_bytes": "Bytes by shared memory.",
    "radixlm:kv_transfer_tcp_bytes": "Bytes by TCP.",
    "radixlm:kv_digest_failures": "Pages whose checksum was wrong.",
}
"""Of prefill and decode servers."""
DRAFT_COUNTERS: dict[str, tuple[str, str]] = {
    "num_rounds": ("sglang:spec_verify_calls", "Verifications of a request's drafts."),
    "num_drafted": ("radixlm:spec_drafted_tokens", "Tokens drafted."),
    "num_accepted": ("radixlm:spec_accepted_tokens", "Drafted tokens that were accepted."),
    "num_steps": ("radixlm:spec_draft_steps", "Steps that verified drafts."),
    "seconds": ("radixlm:spec_draft_seconds", "Seconds of drafting on the host."),
}
"""Field of ``DraftTotals`` -> its counter."""


REQUEST_COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of ended requests.",
    "generation_tokens": "Tokens generated.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "num_requests": "Requests that ended.",
    "num_so_requests": "Requests with a grammar that ended.",
    "num_aborted_requests": "Requests that were aborted.",
}
REQUEST_TIMES: dict[str, str] = {
    "time_to_first_token_seconds": "Time to the first token.",
    "inter_token_latency_seconds": "Time between two tokens.",
    "e2e_request_latency_seconds": "Time of a whole request.",
}
LENGTH_HISTOGRAMS: dict[str, str] = {
    "prompt_tokens_histogram": "Prompt lengths.",
    "generation_tokens_histogram": "Output lengths.",
}


class Buckets(Record):
    """Upper bounds of the histograms; ``prompt`` and ``generation`` None: no such histograms."""

    first_token_s: tuple[float, ...] = FIRST_TOKEN_S
    inter_token_s: tuple[float, ...] = INTER_TOKEN_S
    e2e_s: tuple[float, ...] = E2E_S
    prompt: tuple[float, ...] | None = None
    generation: tuple[float, ...] | None = None


class Ended(Record):
    """What is counted of a request that is over."""

    seconds: float
    queue_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    has_grammar: bool
    is_aborted: bool
    adapter: str | None = None


class Series:
    """The metrics of requests with the same labels, ``metrics``: by name."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._counters = [metrics[name] for name in REQUEST_COUNTERS]
        self._first = metrics["time_to_first_token_seconds"]
        self._inter = metrics["inter_token_latency_seconds"]
        self._e2e = metrics["e2e_request_latency_seconds"]
        self._lengths = [metrics[name] for name in LENGTH_HISTOGRAMS if name in metrics]

    def first_token(self, seconds: float) -> None:
        """A request's first token came after ``seconds``."""
        self._first.observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """``count`` more tokens came ``seconds`` after those before."""
        for _ in range(count):
            self._inter.observe(seconds / count)

    def ended(self, end: Ended) -> None:
        """A request is over."""
        lengths = (end.prompt_tokens, end.output_tokens)
        counts = (*lengths, end.cached_tokens, 1, end.has_grammar, end.is_aborted)
        for counter, count in zip(self._counters, counts, strict=True):
            counter.inc(count)
        self._e2e.observe(end.seconds)
        for histogram, length in zip(self._lengths, lengths, strict=False):
            histogram.observe(length)


class Drafts:
    """Counters of drafts since the start. Every process knows them all from the engines' reports,
    so that they are no part of what processes count together."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._now = DraftTotals()
        self._before = dict.fromkeys(DRAFT_COUNTERS, 0.0)  # of engines that are gone

    def update(self, totals: DraftTotals) -> None:
        """The counts so far; those of an engine that was restarted begin again."""
        for field in DRAFT_COUNTERS:
            before = getattr(self._now, field)
            self._before[field] += before if getattr(totals, field) < before else 0
        self._now = copy(totals)

    def collect(self) -> Iterable[CounterMetricFamily]:
        for field, (name, text) in DRAFT_COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=tuple(self._labels))
            total = self._before[field] + getattr(self._now, field)
            family.add_metric(tuple(self._labels.values()), total)
            yield family


class Metrics:
    """One set of metrics with its own registry. ``labels``: name -> value, on every metric;
    ``customer_labels``: names of labels that requests may set, on the metrics of requests."""

    def __init__(
        self, labels: Mapping[str, str], buckets: Buckets, customer_labels: Sequence[str] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self._names, self._labels = tuple(labels), dict(labels)
        self._customer_names = tuple(customer_labels)
        self._gauges = {name: self._gauge(name, text) for name, text in GAUGES.items()}
        self._requests = self._request_metrics(buckets)
        self._series: dict[tuple[str, ...], Series] = {}
        self.plain = self.series({})  # of requests without labels of their own
        self._drafts = Drafts(self._labels)
        self._exposed = CollectorRegistry()
        self._exposed.register(self._drafts)
        if os.environ.get(SHARED_FOLDER):
            MultiProcessCollector(self._exposed)
        else:
            self._exposed.register(self.registry)
        self._queue = self._histogram("queue_time_s", "Time in the queue.", QUEUE_S)
        self._adapter_load = self._histogram(
            "lora_load_seconds", "Time to load an adapter.", LOAD_S
        )
        self._adapter_requests = Counter(
            "sglang:lora_requests", "Requests that ended, by adapter.",
            (*self._names, "lora_name"), registry=self.registry,
        )  # fmt: skip
        self._deaths = Counter(
            "radixlm:engine_deaths", "Engines that died while they served.", self._names,
            registry=self.registry,
        ).labels(**self._labels)  # fmt: skip
        self._adapters: set[str] = set()
        self._queue_s: deque[float] = deque(maxlen=100)  # of the last requests that ended

    def _request_metrics(self, buckets: Buckets) -> dict[str, Counter | Histogram]:
        """Those whose labels customers may set, without values of labels yet."""
        names = (*self._names, *self._customer_names)
        bounds = {
            "time_to_first_token_seconds": buckets.first_token_s,
            "inter_token_latency_seconds": buckets.inter_token_s,
            "e2e_request_latency_seconds": buckets.e2e_s,
            "prompt_tokens_histogram": buckets.prompt,
            "generation_tokens_histogram": buckets.generation,
        }
        made: dict[str, Counter | Histogram] = {
            name: Counter(f"sglang:{name}", text, names, registry=self.registry)
            for name, text in REQUEST_COUNTERS.items()
        }
        for name, text in (REQUEST_TIMES | LENGTH_HISTOGRAMS).items():
            if (found := bounds[name]) is not None:
                made[name] = Histogram(
                    f"sglang:{name}", text, names, registry=self.registry, buckets=found
                )
        return made

    def series(self, customer: Mapping[str, str]) -> Series:
        """The metrics of requests with these labels; those that are missing are empty. Beyond
        MAX_LABEL_SETS, and with a value that is too long, requests are counted as OTHER."""
        values = tuple(_label(customer.get(name, "")) for name in self._customer_names)
        if values not in self._series and len(self._series) > MAX_LABEL_SETS:
            values = (OTHER,) * len(values)
        found = self._series.get(values)
        if found is None:
            labels = self._labels | dict(zip(self._customer_names, values, strict=True))
            made = {name: metric.labels(**labels) for name, metric in self._requests.items()}
            found = self._series[values] = Series(made)
        return found

    def _gauge(self, name: str, text: str) -> Gauge:
        full_name = name if ":" in name else f"sglang:{name}"
        metric = Gauge(
            full_name, text, self._names, registry=self.registry, multiprocess_mode="mostrecent"
        )
        return metric.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"sglang:{name}", text, self._names, registry=self.registry, buckets=buckets
        )
        return metric.labels(**self._labels)

    def ended(self, end: Ended, series: Series) -> None:
        """A request is over, one of ``series``."""
        if end.adapter is not None:
            if len(self._adapters) < MAX_ADAPTERS:
                self._adapters.add(end.adapter)
            name = end.adapter if end.adapter in self._adapters else OTHER
            self._adapter_requests.labels(**self._labels, lora_name=name).inc()
        self._queue.observe(end.queue_s)
        self._queue_s.append(end.queue_s)
        series.ended(end)

    def adapter_loaded(self, seconds: float) -> None:
        """An engine has read an adapter."""
        self._adapter_load.observe(seconds)

    def engine_lost(self) -> None:
        """An engine that served has died."""
        self._deaths.inc()

    def drafts(self, totals: DraftTotals) -> None:
        """The counts of drafts so far, of the engines that run."""
        self._drafts.update(totals)

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        """The text that Prometheus reads, with ``gauges`` (of GAUGES, PAIR_GAUGES) set first."""
        mean_s = sum(self._queue_s) / max(1, len(self._queue_s))
        for name, value in {**gauges, "avg_request_queue_latency": mean_s}.items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, PAIR_GAUGES[name])
            self._gauges[name].set(value)
        text: bytes = generate_latest(self._exposed)
        return text


def _label(value: str) -> str:
    """``value`` if it can be one: short, and text that can be sent."""
    is_text = len(value) <= MAX_LABEL_CHARS and not any("\ud800" <= c <= "\udfff" for c in value)
    return value if is_text else OTHER
