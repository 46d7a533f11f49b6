"""Prometheus metrics under SGLang's names.

Callers report events (``Series.first_token``, ``tokens``, ``Metrics.ended``) and pass the gauges at
a scrape; this module defines names, labels and buckets.

Several HTTP processes count together (prometheus_client's multiprocess mode) where SHARED_FOLDER
names a folder before this module is imported.
"""

import math
import os
from collections import Counter as Counts
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from radixlm.base.record import Record
from radixlm.observe import metric_files
from radixlm.wire.replies import KEY_BOUNDS, DraftTotals

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
    "prefetch_bandwidth": "GB a second that the tiers give (a moving average).",
    "max_total_num_tokens": "Tokens that the KV cache holds at most.",
    "page_size": "Tokens of a page of the KV cache.",
    "num_pages": "Pages of the KV cache.",
    "context_len": "Tokens of prompt and output at most.",
    "kv_available_tokens": "Tokens for which pages are free.",
    "kv_evictable_tokens": "Tokens of cached prefixes that no request uses.",
    "kv_used_tokens": "Tokens of pages that requests use.",
    "full_token_usage": "Part of the KV cache of full attention that is in use.",
    "swa_token_usage": "Part of the pages of sliding windows that is in use.",
    "swa_used_tokens": "Tokens of pages of sliding windows that are in use.",
    "swa_available_tokens": "Tokens for which pages of sliding windows are free.",
    "mamba_usage": "Part of the recurrent states that is in use.",
    "mamba_used_tokens": "Recurrent states that are in use.",
    "mamba_available_tokens": "Recurrent states that are free.",
    "weight_memory_usage_gb": "GiB of weights.",
    "kv_cache_memory_usage_gb": "GiB of the KV cache.",
    "lora_pool_utilization": "Adapters that are loaded over those that may be; 0: any number.",
    "num_streaming_sessions": "Streaming sessions that are open.",
    "num_unique_running_routing_keys": "Routing keys of the requests that are computed.",
    "engine_startup_time": "Seconds from the start until ready.",
    "engine_load_weights_time": "Seconds that loading the weights took.",
}
STARTUP = {
    "startup_time_seconds": "Seconds of parts of the start.",
    "startup_cuda_graph_time_seconds": "Seconds that recording graphs took, by kind of step.",
}
PAIR_GAUGES: dict[str, str] = {
    "num_prefill_prealloc_queue_reqs": "Requests of pairs that wait or are computed here.",
    "num_prefill_inflight_queue_reqs": "Requests whose pages a decode server is fetching.",
    "num_decode_prealloc_queue_reqs": "Requests that wait for room for their pages.",
    "num_decode_transfer_queue_reqs": "Requests that wait for pages of a prefill server.",
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
KEY_COUNTS: dict[str, str] = {
    "running": "Routing keys by their requests that are computed: more than gt, at most le.",
    "all": "The same, with those that wait.",
}
REALTIME = "Tokens while they are computed: of prompts, found in the prefix cache, generated."
FORWARD = "Seconds of steps: of prompts, of tokens after them, of both."
CPU = "CPU seconds of processes, by what they do."
COUNTERS: dict[str, str] = {
    "num_retracted_requests_total": "Retractions: requests that gave their cache back.",
    "evicted_tokens_total": "Tokens that the prefix cache gave up.",
    "realtime_tokens_total mode=prefill_compute": REALTIME,
    "realtime_tokens_total mode=prefill_cache": REALTIME,
    "realtime_tokens_total mode=decode": REALTIME,
    "forward_execution_seconds_total category=extend": FORWARD,
    "forward_execution_seconds_total category=decode": FORWARD,
    "forward_execution_seconds_total category=mixed": FORWARD,
    "process_cpu_seconds_total component=scheduler": CPU,
    "estimated_flops_per_gpu_total": "Floating point operations, estimated.",
    "estimated_read_bytes_per_gpu_total": "Bytes of weights and KV cache read, estimated.",
    "estimated_write_bytes_per_gpu_total": "Bytes of the KV cache written, estimated.",
    "num_grammar_total": "Requests with a grammar.",
    "num_grammar_cache_hit_total": "Those whose grammar had been compiled before.",
    "num_grammar_aborted_total": "Those whose grammar could not be compiled.",
    "prefetched_tokens_total": "Prompt tokens whose KV came from storage.",
    "backuped_tokens_total": "Tokens whose KV was copied to the tiers.",
    "load_back_tokens_total": "Prompt tokens whose KV came from the host tier.",
    "hicache_dropped_tokens_total": "Tokens whose KV was not copied: too much waited.",
    "num_bootstrap_failed_reqs_total": "Fetches that found no prefill server, or another model.",
    "num_transfer_failed_reqs_total": "Fetches that broke off.",
    "spec_verify_calls_total": "Verifications of a request's drafts.",
    "radixlm:spec_drafted_tokens_total": "Tokens drafted.",
    "radixlm:spec_accepted_tokens_total": "Drafted tokens that were accepted.",
    "radixlm:spec_draft_steps_total": "Steps that verified drafts.",
    "radixlm:spec_draft_seconds_total": "Seconds of drafting on the host.",
}
"""What follows a space is a label and its value."""
"""What engines count since their start."""
DRAFT_COUNTERS: dict[str, str] = {
    "num_rounds": "spec_verify_calls_total",
    "num_drafted": "radixlm:spec_drafted_tokens_total",
    "num_accepted": "radixlm:spec_accepted_tokens_total",
    "num_steps": "radixlm:spec_draft_steps_total",
    "seconds": "radixlm:spec_draft_seconds_total",
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
    "uncached_prompt_tokens_histogram": "Prompt tokens that were not in the prefix cache.",
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
        self._aborted = metrics["num_aborted_requests"]
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

    def aborted(self, count: int) -> None:
        """``count`` requests were aborted of which nothing else is known."""
        self._aborted.inc(count)

    def ended(self, end: Ended) -> None:
        """A request is over."""
        lengths = (end.prompt_tokens, end.output_tokens)
        counts = (*lengths, end.cached_tokens, 1, end.has_grammar, end.is_aborted)
        for counter, count in zip(self._counters, counts, strict=True):
            counter.inc(count)
        self._e2e.observe(end.seconds)
        uncached = end.prompt_tokens - end.cached_tokens
        for histogram, length in zip(self._lengths, (*lengths, uncached), strict=False):
            histogram.observe(length)


class Totals:
    """COUNTERS since the start. Every process knows them all from the engines' reports, so that
    they are no part of what processes count together."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._now: dict[tuple[str, int], float] = {}  # counter, replica
        self._before: dict[str, float] = {}  # of engines that are gone

    def update(self, totals: Mapping[str, float], replica: int = 0) -> None:
        """The counts of a replica so far; those of an engine that was restarted begin again."""
        for name, total in totals.items():
            last = self._now.get((name, replica), 0.0)
            if total < last:
                self._before[name] = self._before.get(name, 0.0) + last
            self._now[name, replica] = total

    def collect(self) -> Iterable[CounterMetricFamily]:
        families: dict[str, CounterMetricFamily] = {}
        sums: dict[str, float] = {}
        for (counter, _), now in self._now.items():
            sums[counter] = sums.get(counter, self._before.get(counter, 0.0)) + now
        for counter, total in sums.items():
            name, _, label = counter.partition(" ")
            labels = {**self._labels, **dict([label.split("=")])} if label else self._labels
            if name not in families:
                text, names = COUNTERS[counter], tuple(labels)
                families[name] = CounterMetricFamily(full_name(name), text, labels=names)
            families[name].add_metric(tuple(labels.values()), total)
        return families.values()


def full_name(name: str) -> str:
    """The name of a metric with its prefix."""
    return name if ":" in name else f"sglang:{name}"


class HttpCounts:
    """Calls of the server by route, method and status. ``labels``: of every metric. ``key``: what
    the header x-smg-routing-key says."""

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        self._labels = labels
        names = (*labels, "endpoint", "method")
        self._requests = Counter("sglang:http_requests", "HTTP requests.", names, registry=registry)
        self._responses = Counter(
            "sglang:http_responses", "HTTP responses.", (*names, "status_code"), registry=registry
        )
        self._active = Gauge(
            "sglang:http_requests_active", "HTTP requests that are answered.",
            names, registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip
        self._keys: Counts[bytes] = Counts()
        self._num_keys = Gauge(
            "sglang:routing_keys_active", "Routing keys of HTTP requests that are answered.",
            tuple(labels), registry=registry, multiprocess_mode="livesum",
        ).labels(**labels)  # fmt: skip

    def begin(self, endpoint: str, method: str, key: bytes = b"") -> None:
        """A request has come."""
        labels = {**self._labels, "endpoint": endpoint, "method": method}
        self._requests.labels(**labels).inc()
        self._active.labels(**labels).inc()
        if key:
            self._keys[key] += 1
            self._num_keys.set(len(self._keys))

    def end(self, endpoint: str, method: str, status: int, key: bytes = b"") -> None:
        """It is answered; ``status`` 0: the client left before."""
        labels = {**self._labels, "endpoint": endpoint, "method": method}
        self._active.labels(**labels).dec()
        if key:
            self._keys[key] -= 1
            self._keys = +self._keys
            self._num_keys.set(len(self._keys))
        if status:
            self._responses.labels(**labels, status_code=str(status)).inc()


class Metrics:
    """One set of metrics with its own registry. ``labels``: name -> value, on every metric;
    ``customer_labels``: names of further labels that requests have, on the metrics of requests."""

    def __init__(
        self, labels: Mapping[str, str], buckets: Buckets, customer_labels: Sequence[str] = ()
    ) -> None:
        if os.environ.get(SHARED_FOLDER):
            metric_files.install()
        self.registry = CollectorRegistry()
        self._names, self._labels = tuple(labels), dict(labels)
        self._customer_names = tuple(customer_labels)
        self._gauges = {name: self._gauge(name, text) for name, text in GAUGES.items()}
        self._requests = self._request_metrics(buckets)
        self._series: dict[tuple[str, ...], Series] = {}
        self.plain = self.series({})  # of requests without labels of their own
        self._totals = Totals(self._labels)
        self._exposed = CollectorRegistry()
        is_shared = bool(os.environ.get(SHARED_FOLDER))
        counted = MultiProcessCollector(None) if is_shared else self.registry
        self._exposed.register(metric_files.OneFamilyEach(self._totals, counted))
        self._queues = [
            self._histogram(name, "Time in the queue.", QUEUE_S)
            for name in ("queue_time_s", "queue_time_seconds")  # the older and the newer name
        ]
        self._startup, self._startup_graphs = (
            Gauge(
                f"sglang:{name}",
                text,
                (*self._names, "phase"),
                registry=self.registry,
                multiprocess_mode="mostrecent",
            )
            for name, text in STARTUP.items()
        )
        self.http = HttpCounts(self._labels, self.registry)
        self._key_counts = {
            name: Gauge(
                f"sglang:routing_key_{name}_req_count", text,
                (*self._names, "gt", "le"), registry=self.registry, multiprocess_mode="mostrecent",
            )
            for name, text in KEY_COUNTS.items()
        }  # fmt: skip
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
        self._cpu = Counter(
            "sglang:process_cpu_seconds", CPU, (*self._names, "component"), registry=self.registry
        )
        self._cpu_s = 0.0  # as of the last report
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
            "uncached_prompt_tokens_histogram": buckets.prompt,
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
        metric = Gauge(
            full_name(name),
            text,
            self._names,
            registry=self.registry,
            multiprocess_mode="mostrecent",
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
        for histogram in self._queues:
            histogram.observe(end.queue_s)
        self._queue_s.append(end.queue_s)
        series.ended(end)

    def adapter_loaded(self, seconds: float) -> None:
        """An engine has read an adapter."""
        self._adapter_load.observe(seconds)

    def engine_lost(self) -> None:
        """An engine that served has died."""
        self._deaths.inc()

    def cpu(self, seconds: float) -> None:
        """This process has taken so many CPU seconds since its start."""
        self._cpu.labels(**self._labels, component="tokenizer").inc(seconds - self._cpu_s)
        self._cpu_s = seconds

    def counts(self, totals: Mapping[str, float], replica: int) -> None:
        """COUNTERS of the engine of a replica since its start."""
        self._totals.update(totals, replica)

    def drafts(self, totals: DraftTotals, replica: int = 0) -> None:
        """The counts of drafts so far, of the engine of a replica."""
        fields = DRAFT_COUNTERS.items()
        self._totals.update({name: getattr(totals, field) for field, name in fields}, replica)

    def startup(self, phases: Mapping[str, Any]) -> None:
        """Seconds of each part of the start; under "cuda_graph", by kind of step."""
        of_graphs = phases["cuda_graph"].items()
        for gauge, parts in ((self._startup, phases.items()), (self._startup_graphs, of_graphs)):
            for phase, seconds in parts:
                if phase != "cuda_graph":
                    gauge.labels(**self._labels, phase=phase).set(seconds)

    def routing_keys(self, counts: Mapping[str, int]) -> None:
        """How many routing keys have how many requests (``LoadReport.routing_keys``)."""
        self._gauges["num_unique_running_routing_keys"].set(counts.get("running", 0))
        for name, gauge in self._key_counts.items():
            for above, most in pairwise((0, *KEY_BOUNDS)):
                labels = {"gt": str(above), "le": "+Inf" if most == math.inf else str(most)}
                gauge.labels(**self._labels, **labels).set(counts.get(f"{name} {most}", 0))

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        """The text that Prometheus reads, with ``gauges`` (of GAUGES, PAIR_GAUGES, COUNTERS) set
        first."""
        mean_s = sum(self._queue_s) / max(1, len(self._queue_s))
        self._totals.update({n: value for n, value in gauges.items() if n in COUNTERS})
        for name, value in {**gauges, "avg_request_queue_latency": mean_s}.items():
            if name in COUNTERS:
                continue
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, PAIR_GAUGES[name])
            self._gauges[name].set(value)
        text: bytes = generate_latest(self._exposed)
        return text


def _label(value: str) -> str:
    """``value`` if it can be one: short, and text that can be sent."""
    is_text = len(value) <= MAX_LABEL_CHARS and not any("\ud800" <= c <= "\udfff" for c in value)
    return value if is_text else OTHER
