"""Snapshot: how a server does, put together from the answers of its monitoring routes. RadixLM,
SGLang and vLLM name their metrics differently: ``COUNTERS`` and ``HISTOGRAMS`` have the names
(":" as "_")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from radixlm.base.record import Record, replace
from radixlm.terminal.scrape import Scrape

COUNTERS: dict[str, tuple[str, ...]] = {
    "tokens_in": ("sglang_prompt_tokens_total", "vllm_prompt_tokens_total"),
    "cached": ("sglang_cached_tokens_total", "vllm_prefix_cache_hits_total"),
    "looked_up": ("sglang_prompt_tokens_total", "vllm_prefix_cache_queries_total"),
    "tokens_out": ("vllm_generation_tokens_total",),
    "requests": ("sglang_num_requests_total", "vllm_request_success_total"),
    "aborted": ("sglang_num_aborted_requests_total",),
    "verified": ("sglang_spec_verify_calls_total", "vllm_spec_decode_num_drafts_total"),
    "drafted": ("radixlm_spec_drafted_tokens_total", "vllm_spec_decode_num_draft_tokens_total"),
    "accepted": (
        "radixlm_spec_accepted_tokens_total",
        "vllm_spec_decode_num_accepted_tokens_total",
    ),
}
HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "ttft": (
        "sglang_time_to_first_token_seconds",
        "vllm_time_to_first_token_seconds",
        "smg_router_ttft_seconds",
        "sgl_router_ttft_seconds",
    ),
    "itl": (
        "sglang_inter_token_latency_seconds",
        "vllm_inter_token_latency_seconds",
        "vllm_time_per_output_token_seconds",
    ),
    "e2e": (
        "sglang_e2e_request_latency_seconds",
        "vllm_e2e_request_latency_seconds",
        "smg_router_request_duration_seconds",
    ),
    "queue": (
        "sglang_queue_time_s",
        "sglang_queue_time_seconds",
        "vllm_request_queue_time_seconds",
    ),
}


class Percentiles(Record):
    """Seconds; None without values. ``top``: the last bound of the histogram, above which nothing
    is known."""

    p50: float | None
    p95: float | None
    p99: float | None
    top: float


class Part(Record):
    """A replica of a server, or a worker of a gateway. ``usage``: 0 to 1 of its KV cache."""

    name: str
    state: str
    running: float | None = None
    waiting: float | None = None
    usage: float | None = None


class Snapshot(Record):
    """How a server does now; None: it does not tell. Rates are of the last seconds, latencies in
    seconds of the last minute, both since its start where there is one look only (``is_first``);
    shares are 0 to 1, memory is bytes. ``tokens_in`` are prompts of requests that have ended."""

    url: str
    kind: str = "server"
    state: str = "down"
    reason: str = ""
    hint: str = ""
    model: str | None = None
    version: str | None = None
    uptime_s: float | None = None
    is_first: bool = True
    running: float | None = None
    waiting: float | None = None
    held: Mapping[str, float] = {}
    tokens_in_per_s: float | None = None
    tokens_out_per_s: float | None = None
    requests_per_s: float | None = None
    latency: Mapping[str, Percentiles] = {}
    kv_usage: float | None = None
    kv_used_tokens: float | None = None
    kv_total_tokens: float | None = None
    cached_share: float | None = None
    memory: Mapping[str, float] = {}
    accept_length: float | None = None
    accept_rate: float | None = None
    adapters: Mapping[str, float] = {}
    adapter_requests: Mapping[str, float] = {}
    engine_restarts: int = 0
    server_restarts: int = 0
    streams_moved: float | None = None
    parts: tuple[Part, ...] = ()
    events: tuple[str, ...] = ()


def dicts(values: Any) -> list[dict[str, Any]]:
    """Those of ``values`` that are objects of JSON."""
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def number(values: Mapping[str, Any], *names: str) -> float | None:
    """The first of these fields that is a number."""
    found = (values.get(name) for name in names)
    return next((float(v) for v in found if isinstance(v, int | float)), None)


def with_info(got: Snapshot, info: Mapping[str, Any]) -> Snapshot:
    """What /server_info tells."""
    states = dicts(info.get("internal_states"))
    replicas = dicts(info.get("replicas"))
    used = [one["memory_usage"] for one in states if isinstance(one.get("memory_usage"), dict)]
    ranks = [rank for one in used for rank in dicts(one.get("ranks")) or [one]]
    memory = {
        "weights": _sum(replicas, "weight_bytes") or _sum(used, "weight", 2.0**30),
        "kv_cache": _sum(replicas, "kv_bytes") or _sum(used, "kvcache", 2.0**30),
        "resident": _sum(ranks, "rss_bytes"),
    }
    model = info.get("served_model_name") or info.get("model_path")
    return replace(
        got,
        model=str(model) if model else None,
        version=str(info["version"]) if info.get("version") else None,
        uptime_s=number(info, "uptime_s"),
        memory={name: value for name, value in memory.items() if value},
        parts=tuple(
            Part(f"replica {i}", "ready" if one.get("is_ready", True) else "restarts")
            for i, one in enumerate(replicas)
        ),
    )


def _sum(rows: Iterable[Mapping[str, Any]], name: str, factor: float = 1.0) -> float:
    return factor * sum(number(row, name) or 0.0 for row in rows)


def with_loads(got: Snapshot, rows: Sequence[Mapping[str, Any]]) -> Snapshot:
    """What /v1/loads, or SGLang's /get_load, tells of each replica."""
    if not rows:
        return got
    parts, known = [], {part.name: part.state for part in got.parts}
    for row in rows:
        name, waiting = f"replica {row.get('dp_rank', 0)}", number(row, "num_waiting_reqs")
        running, total = number(row, "num_running_reqs"), number(row, "num_reqs")
        if running is None and total is not None:
            running = total - (waiting or 0.0)
        usage = number(row, "token_usage")
        parts.append(Part(name, known.get(name, "ready"), running, waiting, usage))
    used = _sum(rows, "num_used_tokens") or _sum(rows, "num_tokens")
    total_tokens = _sum(rows, "max_total_num_tokens") or None
    return replace(
        got,
        running=sum(part.running or 0.0 for part in parts),
        waiting=sum(part.waiting or 0.0 for part in parts),
        held=_held({n: _sum(rows, f"num_{n}_reqs") for n in ("retracted", "paused")}),
        tokens_out_per_s=_sum(rows, "gen_throughput") if "gen_throughput" in rows[0] else None,
        kv_used_tokens=used,
        kv_total_tokens=total_tokens,
        kv_usage=used / total_tokens if total_tokens else None,
        cached_share=number(rows[0], "cache_hit_rate"),
        accept_length=number(rows[0], "spec_accept_length") or None,
        accept_rate=number(rows[0], "spec_accept_rate") or None,
        parts=tuple(parts),
    )


def _held(counts: Mapping[str, float | None]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count}


def _either(new: float | None, old: float | None) -> float | None:
    return old if new is None else new


def with_gauges(got: Snapshot, scrape: Scrape) -> Snapshot:
    """The gauges of /metrics."""
    usage = ("sglang_token_usage", "vllm_kv_cache_usage_perc", "vllm_gpu_cache_usage_perc")
    hits, total = scrape.mean("sglang_cache_hit_rate"), scrape.total
    waiting = total("sglang_num_queue_reqs", "vllm_num_requests_waiting")
    held = {
        "grammar": total("sglang_num_grammar_queue_reqs"),
        "retracted": total("sglang_num_retracted_reqs"),
        "paused": total("sglang_num_paused_reqs"),
    }
    adapters = {
        "loaded": total("sglang_lora_pool_slots_used"),
        "slots": total("sglang_lora_pool_slots_total"),
        "loads": total("sglang_lora_num_loads"),
        "failed": total("sglang_lora_num_failed_loads"),
        "evicted": total("sglang_lora_num_evictions"),
    }
    running = ("sglang_num_running_reqs", "vllm_num_requests_running", "smg_worker_requests_active")
    return replace(
        got,
        running=_either(total(*running), got.running),
        waiting=_either(waiting, got.waiting),
        held=_held(held) or got.held,
        tokens_out_per_s=_either(total("sglang_gen_throughput"), got.tokens_out_per_s),
        kv_usage=_either(scrape.mean(*usage), got.kv_usage),
        kv_used_tokens=_either(total("sglang_num_used_tokens"), got.kv_used_tokens),
        cached_share=_either(hits, got.cached_share),
        accept_length=scrape.mean("sglang_spec_accept_length") or got.accept_length,
        accept_rate=scrape.mean("sglang_spec_accept_rate") or got.accept_rate,
        adapters=_held(adapters),
        adapter_requests=scrape.by_label("lora_name", "sglang_lora_requests_total"),
        streams_moved=total("radix_router_streams_moved_total"),
        parts=_workers(scrape) or got.parts,
    )


def _workers(scrape: Scrape) -> tuple[Part, ...]:
    health = scrape.by_label("worker", "smg_worker_health", "sgl_router_worker_health")
    active = scrape.by_label("worker", "smg_worker_requests_active", "sgl_router_worker_load")
    usage = scrape.by_label("worker", "radix_router_worker_kv_usage")
    states = {
        labels["worker"]: labels["state"]
        for labels, value in scrape.samples.get("radix_router_worker_state", ())
        if value and "worker" in labels and "state" in labels
    }
    return tuple(
        Part(
            name,
            states.get(name, "ready" if is_healthy else "unhealthy"),
            active.get(name),
            usage=usage.get(name),
        )
        for name, is_healthy in sorted(health.items())
    )
