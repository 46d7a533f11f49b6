"""Prometheus metrics under SGLang's names.

Callers report events (``first_token``, ``tokens``, ``ended``) and pass the gauges at a scrape; this
module defines names, labels and buckets.
"""

from collections.abc import Mapping
from copy import copy

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from radixlm.base.record import Record
from radixlm.wire.replies import DraftTotals

FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
INTER_TOKEN_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
E2E_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 2400)
LOAD_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30)
MAX_ADAPTERS = 50  # that have a label of their own; all others are "other"
QUEUE_S = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
LENGTHS = (
    100,
    300,
    500,
    700,
    1000,
    1500,
    2000,
    3000,
    4000,
    5000,
    7000,
    10000,
    20000,
    50000,
    100000,
)
GAUGES: dict[str, str] = {
    "num_running_reqs": "Requests that are computed.",
    "num_queue_reqs": "Requests that wait.",
    "num_grammar_queue_reqs": "Requests whose grammar is compiled.",
    "num_paused_reqs": "Requests that are paused.",
    "num_retracted_reqs": "Requests that gave their cache back and wait again.",
    "num_used_tokens": "Tokens in the KV cache that are in use.",
    "token_usage": "Part of the KV cache that is in use.",
    "gen_throughput": "Tokens generated a second.",
    "cache_hit_rate": "Part of the prompt tokens found in the prefix cache.",
    "spec_accept_length": "Mean tokens of a step that verified drafts, by request.",
    "spec_accept_rate": "Part of the drafted tokens that was accepted.",
    "spec_num_steps": "Tokens of a draft where no length is chosen.",
    "spec_num_draft_tokens": "The draft and the token before it.",
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


class Buckets(Record):
    """Upper bounds of the histograms; ``prompt`` and ``generation`` None: no such histograms."""

    first_token_s: tuple[float, ...] = FIRST_TOKEN_S
    inter_token_s: tuple[float, ...] = INTER_TOKEN_S
    e2e_s: tuple[float, ...] = E2E_S
    prompt: tuple[float, ...] | None = None
    generation: tuple[float, ...] | None = None


class Metrics:
    """One set of metrics with its own registry. ``labels``: name -> value, on every metric."""

    def __init__(self, labels: Mapping[str, str], buckets: Buckets) -> None:
        self.registry = CollectorRegistry()
        self._names = tuple(labels)
        self._labels = dict(labels)
        self._gauges = {name: self._gauge(name, text) for name, text in GAUGES.items()}
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._output = self._counter("generation_tokens", "Tokens generated.")
        self._cached = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self._requests = self._counter("num_requests", "Requests that ended.")
        self._aborted = self._counter("num_aborted_requests", "Requests that were aborted.")
        self._drafts = {
            field: Counter(name, text, self._names, registry=self.registry).labels(**self._labels)
            for field, (name, text) in DRAFT_COUNTERS.items()
        }
        self._draft_totals = DraftTotals()
        self._first = self._histogram(
            "time_to_first_token_seconds", "Time to the first token.", buckets.first_token_s
        )
        self._inter = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens.", buckets.inter_token_s
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Time of a whole request.", buckets.e2e_s
        )
        self._queue = self._histogram("queue_time_s", "Time in the queue.", QUEUE_S)
        self._adapter_load = self._histogram(
            "lora_load_seconds", "Time to load an adapter.", LOAD_S
        )
        self._adapter_requests = Counter(
            "sglang:lora_requests", "Requests that ended, by adapter.",
            (*self._names, "lora_name"), registry=self.registry,
        )  # fmt: skip
        self._adapters: set[str] = set()
        self._prompt_hist = buckets.prompt and self._histogram(
            "prompt_tokens_histogram", "Prompt lengths.", buckets.prompt
        )
        self._output_hist = buckets.generation and self._histogram(
            "generation_tokens_histogram", "Output lengths.", buckets.generation
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        full_name = name if ":" in name else f"sglang:{name}"
        metric = Gauge(full_name, text, self._names, registry=self.registry)
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"sglang:{name}", text, self._names, registry=self.registry)
        return metric.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"sglang:{name}", text, self._names, registry=self.registry, buckets=buckets
        )
        return metric.labels(**self._labels)

    def first_token(self, seconds: float) -> None:
        """A request's first token came after ``seconds``."""
        self._first.observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """``count`` more tokens came ``seconds`` after those before."""
        for _ in range(count):
            self._inter.observe(seconds / count)

    def ended(
        self,
        *,
        seconds: float,
        queue_s: float,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int,
        is_aborted: bool,
        adapter: str | None = None,
    ) -> None:
        """A request is over."""
        if adapter is not None:
            if len(self._adapters) < MAX_ADAPTERS:
                self._adapters.add(adapter)
            name = adapter if adapter in self._adapters else "other"
            self._adapter_requests.labels(**self._labels, lora_name=name).inc()
        self._requests.inc()
        self._aborted.inc(is_aborted)
        self._prompt.inc(prompt_tokens)
        self._output.inc(output_tokens)
        self._cached.inc(cached_tokens)
        self._e2e.observe(seconds)
        self._queue.observe(queue_s)
        if self._prompt_hist:
            self._prompt_hist.observe(prompt_tokens)
        if self._output_hist:
            self._output_hist.observe(output_tokens)

    def adapter_loaded(self, seconds: float) -> None:
        """An engine has read an adapter."""
        self._adapter_load.observe(seconds)

    def drafts(self, totals: DraftTotals) -> None:
        """The counts of drafts so far; those of an engine that was restarted begin again."""
        for name, counter in self._drafts.items():
            now, before = getattr(totals, name), getattr(self._draft_totals, name)
            counter.inc(now - before if now >= before else now)
        self._draft_totals = copy(totals)

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        """The text that Prometheus reads, with ``gauges`` (of GAUGES, PAIR_GAUGES) set first."""
        for name, value in gauges.items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, PAIR_GAUGES[name])
            self._gauges[name].set(value)
        text: bytes = generate_latest(self.registry)
        return text
