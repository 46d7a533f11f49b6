"""/metrics, and the observer that feeds it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.routing import BaseRoute, Route

from radixlm.base.errors import Overloaded
from radixlm.base.lazy import load
from radixlm.config.observe import ObserveConfig, bucket_values
from radixlm.entrypoints.http.admin.health import PROBE_PREFIX
from radixlm.entrypoints.http.admin.info import accept_rate, startup_time
from radixlm.entrypoints.http.middleware import App, Receive, Scope, Send
from radixlm.entrypoints.http.state import ServerState
from radixlm.intake.call import ROUTING_HEADER, current_call
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState
from radixlm.wire.replies import DraftTotals, Finish, LoadReport, PageCounts

if TYPE_CHECKING:
    from radixlm.observe.metrics import Buckets, Ended, HttpCounts, Metrics, Series

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_HEADER_BYTES = 4096  # of customers' labels
PRIORITY = "priority"  # the label of requests with --enable-priority-scheduling
OTHER = "other"  # paths and methods that are none of the server's
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
ANSWER_S = 2.0  # a scrape waits no longer for an engine that computes a long step
PAIR_COUNTERS = ("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsObserver(Observer):
    """Feeds the metrics with the events of requests, but not of health probes. ``is_first``: of the
    processes that share engines; only that one counts what happens to an engine. ``by_priority``:
    requests have the label ``priority``."""

    def __init__(self, metrics: Metrics, is_first: bool, by_priority: bool = False) -> None:
        self._metrics, self._is_first, self._by_priority = metrics, is_first, by_priority
        self._ended: type[Ended] = load("radixlm.observe.metrics:Ended")
        self._last_s: dict[str, float] = {}
        self._series: dict[str, Series] = {}  # of requests with labels of their own

    def submitted(self, state: RequestState) -> None:
        call = current_call()
        labels = call.labels if call is not None else {}
        if self._by_priority:
            labels = labels | {PRIORITY: str(state.wire.priority)}
        if labels:
            self._series[state.rid] = self._metrics.series(labels)

    def progressed(self, state: RequestState, num_tokens: int) -> None:
        if not num_tokens or state.rid.startswith(PROBE_PREFIX):
            return
        last_s = self._last_s.get(state.rid)
        series = self._series.get(state.rid, self._metrics.plain)
        if last_s is None:
            series.first_token(state.first_token_s - state.arrival_s)
        else:
            series.tokens(state.last_token_s - last_s, num_tokens)
        self._last_s[state.rid] = state.last_token_s

    def ended(self, state: RequestState, finish: Finish) -> None:
        self._last_s.pop(state.rid, None)
        series = self._series.pop(state.rid, self._metrics.plain)
        if state.rid.startswith(PROBE_PREFIX) or state.pending is None:
            return
        end = self._ended(
            seconds=state.finished_s - state.arrival_s,
            queue_s=state.pending.queue_time_s,
            prompt_tokens=state.prompt_tokens,
            output_tokens=len(state.output_ids),
            cached_tokens=state.pending.cached_tokens,
            has_grammar=state.wire.grammar is not None,
            is_aborted=finish.kind == "abort",
            adapter=state.wire.adapter.name if state.wire.adapter is not None else None,
        )
        self._metrics.ended(end, series)
        self._metrics.cpu(time.process_time())

    def orphaned(self, count: int) -> None:
        self._metrics.plain.aborted(count)

    def adapter_loaded(self, seconds: float) -> None:
        if self._is_first:
            self._metrics.adapter_loaded(seconds)

    def engine_lost(self, reason: str) -> None:
        if self._is_first:
            self._metrics.engine_lost()


class CustomerLabels:
    """Takes labels of customers from a header (a JSON object) for the requests of a call. Labels
    that are not ``allowed``, and a header that is no object, are left out, as SGLang does."""

    def __init__(self, app: App, header: str, allowed: Sequence[str]) -> None:
        self._app, self._header, self._allowed = app, header.lower().encode(), allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        for name, value in scope.get("headers", ()):
            if name == self._header and call is not None:
                call.labels = self._labels(value)
        await self._app(scope, receive, send)

    def _labels(self, value: bytes) -> dict[str, str]:
        try:
            found = json.loads(value) if len(value) <= MAX_HEADER_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            log.debug("the header of customers' labels is no JSON object")
            return {}
        labels = {name: found[name] for name in self._allowed if name in found}
        return {
            name: label if isinstance(label, str) else json.dumps(label)
            for name, label in labels.items()
            if isinstance(label, str | int | float)
        }


def install(app: FastAPI, state: ServerState, is_first: bool) -> Metrics:
    """Observe requests from now on, and serve /metrics. ``is_first``: see ``MetricsObserver``."""
    module = "radixlm.observe.metrics"
    observe = state.config.observe
    allowed = observe.tokenizer_metrics_allowed_customer_labels or ()
    labels = _labels(state)
    by_priority = state.config.schedule.enable_priority_scheduling and PRIORITY not in labels
    names = tuple(dict.fromkeys([*allowed, PRIORITY] if by_priority else allowed))
    made: Metrics = load(f"{module}:Metrics")(labels, _buckets(observe), names)
    if allowed:
        header = observe.tokenizer_metrics_custom_labels_header
        app.add_middleware(CustomerLabels, header=header, allowed=allowed)
    state.intake.observers = (
        *state.intake.observers,
        MetricsObserver(made, is_first, by_priority),
    )

    async def metrics() -> Response:
        """Prometheus metrics."""
        made.cpu(time.process_time())
        for index, replica in enumerate(state.intake.replicas):
            made.counts(_counters(replica.load, len(state.intake.replicas)), index)
            made.drafts(replica.load.drafts or DraftTotals(), index)
        made.startup(startup_time(state))
        made.routing_keys(state.intake.load.routing_keys)
        values = gauges(state) | await expert_balance(state) | await rank_wait(state)
        return Response(made.exposition(values), media_type=CONTENT_TYPE)

    app.add_api_route("/metrics", metrics, methods=["GET"], tags=["info"])
    return made


class HttpCounter:
    """Counts requests and answers of all routes."""

    def __init__(self, app: App, counts: HttpCounts, routes: Sequence[BaseRoute]) -> None:
        self._app, self._counts = app, counts
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._paths = {route.path for route in self._routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint, status = self._endpoint(scope), 0
        method = scope["method"] if scope["method"] in _METHODS else OTHER

        async def note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        key = next((value for name, value in scope["headers"] if name == ROUTING_HEADER), b"")
        self._counts.begin(endpoint, method, key)
        try:
            await self._app(scope, receive, note)
        finally:
            self._counts.end(endpoint, method, status, key)

    def _endpoint(self, scope: Scope) -> str:
        """The path of the route, with names for its parameters; OTHER for paths that are none."""
        path = str(scope["path"])
        if path in self._paths:
            return path
        return next((r.path for r in self._routes if r.path_regex.match(path)), OTHER)


def _labels(state: ServerState) -> dict[str, str]:
    return {
        "model_name": state.model_name,
        "engine_type": "unified",
        "tp_rank": "0",
        "pp_rank": "0",
        **json.loads(state.config.observe.extra_metric_labels or "{}"),
    }


def _buckets(observe: ObserveConfig) -> Buckets:
    module = "radixlm.observe.metrics"
    lengths: tuple[float, ...] = load(f"{module}:LENGTHS")
    default: Buckets = load(f"{module}:Buckets")()
    has_lengths = observe.collect_tokens_histogram
    made: Buckets = load(f"{module}:Buckets")(
        observe.bucket_time_to_first_token or default.first_token_s,
        observe.bucket_inter_token_latency or default.inter_token_s,
        observe.bucket_e2e_request_latency or default.e2e_s,
        bucket_values(observe.prompt_tokens_buckets, lengths) if has_lengths else None,
        bucket_values(observe.generation_tokens_buckets, lengths) if has_lengths else None,
    )
    return made


async def expert_balance(state: ServerState) -> dict[str, float]:
    """How evenly tokens chose the ranks' experts; {} while no engine answers."""
    if not state.config.parallel.enable_expert_distribution_metrics:
        return {}
    reply = await _soon(state.intake.control("expert_balance"))
    averages = (reply and reply.data) or {}
    return {f"expert_balancedness_{steps}": mean for steps, mean in averages.items()}


async def rank_wait(state: ServerState) -> dict[str, float]:
    """How long ranks waited, of all replicas; {} without several ranks or while none answers."""
    if state.config.parallel.world_size == 1:
        return {}
    replies = await _soon(state.intake.control_each("memory_usage", is_brief=True))
    if replies is None:
        return {}
    ranks = [rank for reply in replies if reply.ok for rank in reply.data["ranks"]]
    return {"radixlm:rank_wait_seconds": sum(rank["wait_seconds"] for rank in ranks)}


async def _soon(answer: Awaitable[T]) -> T | None:
    """What engines answer before a scrape gives up; None while one is busy or none serves."""
    try:
        return await asyncio.wait_for(answer, ANSWER_S)
    except (Overloaded, TimeoutError):
        return None


def gauges(state: ServerState) -> dict[str, float]:
    """The current values of the gauges."""
    load_, facts, lora = state.intake.load, state.intake.engine_facts, state.intake.adapters
    max_running = (state.config.schedule.max_running_requests or 0) * len(state.intake.replicas)
    pairs = pair_gauges(load_.tiers).items()
    return {name: value for name, value in pairs if name not in PAIR_COUNTERS} | {
        "num_running_reqs": load_.num_running,
        "num_queue_reqs": load_.num_waiting,
        "num_grammar_queue_reqs": load_.num_grammar_queue,
        "num_paused_reqs": load_.num_paused,
        "num_retracted_reqs": load_.num_retracted,
        "total_retracted_reqs": load_.num_retracted,
        **_kv_gauges(state, load_.pages or PageCounts()),
        "num_streaming_sessions": state.sessions.num_streaming,
        "num_used_tokens": load_.num_used_tokens,
        "token_usage": load_.num_used_tokens / max(load_.num_total_tokens, 1),
        "gen_throughput": load_.gen_throughput,
        "cache_hit_rate": load_.cache_hit_rate,
        "spec_accept_length": load_.spec_accept_length,
        "spec_accept_rate": accept_rate(load_),
        "spec_num_steps": state.config.speculate.speculative_num_steps or 0,
        "spec_num_draft_tokens": state.config.speculate.speculative_num_draft_tokens or 0,
        "utilization": load_.num_running / max_running if max_running else 0.0,
        "radixlm:evicted_tokens": load_.num_evicted_tokens,
        "radixlm:engines_ready": len(state.intake.replicas.ready),
        "radixlm:held_reqs": state.intake.num_held,
        "lora_pool_slots_used": len(state.intake.adapters.loaded),
        "lora_pool_slots_total": state.intake.adapters.options.max_loaded or 0,
        "lora_num_loads": state.intake.adapters.num_loads,
        "lora_num_failed_loads": state.intake.adapters.num_failed,
        "lora_num_evictions": state.intake.adapters.num_evicted,
        "prefetch_bandwidth": load_.tiers.get("fetch_bytes_per_s", 0) / 1e9,
        "lora_pool_utilization": len(lora.loaded) / (lora.options.max_loaded or math.inf),
        "engine_startup_time": state.ready_after_s,
        "engine_load_weights_time": float(facts.get("load_seconds", 0.0)),
    }


def _counters(load_: LoadReport, num_replicas: int) -> dict[str, float]:
    """What an engine has counted since its start. Estimates of devices are a mean of replicas."""
    pairs, tiers = pair_gauges(load_.tiers), load_.tiers
    return {
        **{name: pairs[name] for name in PAIR_COUNTERS if name in pairs},
        **{
            f"{name}_per_gpu_total": value / num_replicas
            for name, value in tiers.items()
            if name.startswith("estimated_")
        },
        **{
            f"forward_execution_seconds_total category={kind}": load_.forward_s.get(kind, 0.0)
            for kind in ("extend", "decode", "mixed")
        },
        "process_cpu_seconds_total component=scheduler": load_.cpu_s,
        "num_retracted_requests_total": load_.num_retracted,
        "evicted_tokens_total": load_.num_evicted_tokens,
        "realtime_tokens_total mode=prefill_compute": load_.num_prefilled,
        "realtime_tokens_total mode=prefill_cache": load_.num_hits,
        "realtime_tokens_total mode=decode": load_.num_generated,
        "num_grammar_total": tiers.get("grammar_requests", 0),
        "num_grammar_cache_hit_total": tiers.get("grammar_hits", 0),
        "num_grammar_aborted_total": tiers.get("grammar_failures", 0),
        "prefetched_tokens_total": tiers.get("storage_tokens", 0),
        "backuped_tokens_total": tiers.get("kept_tokens", 0),
        "load_back_tokens_total": tiers.get("host_tokens", 0),
        "hicache_dropped_tokens_total": tiers.get("dropped_tokens", 0),
    }


def _kv_gauges(state: ServerState, pages: PageCounts) -> dict[str, float]:
    """What fits the KV cache, and what is in it; shares of pools that there are none of are 0."""
    facts, size = state.intake.engine_facts, pages.size
    evictable = pages.cached - pages.locked
    used = pages.total - pages.free - evictable
    window_free = pages.window_total - pages.window_used
    return {
        "max_total_num_tokens": float(facts.get("max_total_num_tokens", 0)),
        "page_size": float(facts.get("kv_page_size", 0)),
        "num_pages": pages.total,
        "context_len": float(state.intake.facts.context_len),
        "kv_available_tokens": pages.free * size,
        "kv_evictable_tokens": evictable * size,
        "kv_used_tokens": used * size,
        "full_token_usage": used / max(1, pages.total),
        "swa_token_usage": pages.window_used / max(1, pages.window_total),
        "swa_used_tokens": pages.window_used * size,
        "swa_available_tokens": window_free * size,
        "mamba_usage": pages.states_used / max(1, pages.states_total),
        "mamba_used_tokens": pages.states_used,
        "mamba_available_tokens": pages.states_total - pages.states_used,
        "weight_memory_usage_gb": facts.get("weight_bytes", 0) / 2**30,
        "kv_cache_memory_usage_gb": facts.get("kv_bytes", 0) / 2**30,
    }


def pair_gauges(tiers: Mapping[str, float]) -> dict[str, float]:
    """Figures of a prefill or decode server by the reference's names; {} of others. ``tiers``: of
    its load report."""
    peer = {n.removeprefix("peer_"): v for n, v in tiers.items() if n.startswith("peer_")}

    def total(*names: str) -> float:
        return sum(peer.get(name, 0.0) for name in names)

    if not peer:
        return {}
    shm, tcp = total("bytes_shm", "sent_bytes_shm"), total("bytes_tcp", "sent_bytes_tcp")
    pulls = {f"radixlm:kv_{n}": total(n) for n in ("pulls_whole", "pulls_part", "pulls_local")}
    copy_s, num_pulls = total("copy_seconds"), total("pulls_whole", "pulls_part")
    waiting = max(0.0, tiers.get("jobs", 0.0) - total("num_pulling"))
    return pulls | {
        "num_prefill_prealloc_queue_reqs": total("num_rooms"),
        "num_prefill_inflight_queue_reqs": total("num_inflight"),
        "num_decode_prealloc_queue_reqs": waiting if "num_pulling" in peer else 0.0,
        "num_decode_transfer_queue_reqs": total("num_pulling"),
        "num_bootstrap_failed_reqs_total": total("bootstrap_failed", "refused"),
        "num_transfer_failed_reqs_total": total("transfer_failed", "failed_transfers"),
        "kv_transfer_speed_gb_s": (shm + tcp) / copy_s / 1e9 if copy_s else 0.0,
        "kv_transfer_latency_ms": 1e3 * copy_s / num_pulls if num_pulls else 0.0,
        "kv_transfer_bootstrap_ms": 1e3
        * total("bootstrap_seconds")
        / max(1.0, total("num_bootstraps")),
        "kv_transfer_total_mb": (shm + tcp) / 1e6,
        "radixlm:kv_transfer_shm_bytes": shm,
        "radixlm:kv_transfer_tcp_bytes": tcp,
        "radixlm:kv_digest_failures": total("damaged"),
    }
