"""Every metric of SGLang 0.5.2 is there, or is named here with the reason why not."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.http_server import scripted_server

from radixlm.entrypoints.http.admin.metrics import pair_gauges
from radixlm.observe.metrics import GAUGES, PAIR_GAUGES, Buckets, Metrics

REFERENCE = """
avg_request_queue_latency backup_bandwidth backup_pgs backuped_tokens_total cache_hit_rate
cached_tokens_total e2e_request_latency_seconds engine_load_weights_time engine_startup_time
func_latency_seconds gen_throughput generation_tokens_histogram generation_tokens_total
grammar_compilation_time_seconds grammar_ebnf_size grammar_schema_count
grammar_tree_traversal_time_avg grammar_tree_traversal_time_max inter_token_latency_seconds
kv_transfer_latency_ms kv_transfer_speed_gb_s max_running_requests_under_SLO num_aborted_requests
num_bootstrap_failed_reqs_total num_decode_prealloc_queue_reqs num_decode_transfer_queue_reqs
num_grammar_aborted_total num_grammar_cache_hit_total num_grammar_queue_reqs num_grammar_total
num_paused_reqs num_prefill_inflight_queue_reqs num_prefill_prealloc_queue_reqs num_queue_reqs
num_requests_total num_retracted_reqs num_running_reqs num_running_reqs_offline_batch
num_so_requests_total num_transfer_failed_reqs_total num_used_tokens prefetch_bandwidth prefetch_pgs
prefetched_tokens_total prompt_tokens_histogram prompt_tokens_total queue_time_s spec_accept_length
startup_latency_breakdown_seconds_max swa_token_usage time_to_first_token_seconds
time_to_first_token_seconds_offline_batch token_usage total_retracted_reqs utilization
""".split()
MISSING = {
    **dict.fromkeys(
        ("func_latency_seconds", "startup_latency_breakdown_seconds_max"),
        "no function is timed, nor is one in SGLang",
    ),
    **dict.fromkeys(
        ("backup_bandwidth", "backup_pgs", "prefetch_pgs"), "hf3fs alone reports them in SGLang"
    ),
    **dict.fromkeys(
        (
            *("grammar_compilation_time_seconds", "grammar_ebnf_size", "grammar_schema_count"),
            *("grammar_tree_traversal_time_avg", "grammar_tree_traversal_time_max"),
        ),
        "the engine reports counts of grammars, no times of single ones",
    ),
    **dict.fromkeys(
        ("num_running_reqs_offline_batch", "time_to_first_token_seconds_offline_batch"),
        "the label of a request has no effect",
    ),
    "max_running_requests_under_SLO": "no objective is given to a decode server",
    "swa_token_usage": "the pool of sliding windows reports no usage of its own",
}


def exposed(text: str) -> set[str]:
    """Names of samples, and of the families of histograms."""
    return {
        name.removeprefix("sglang:")
        for family in text_string_to_metric_families(text)
        for name in (family.name, *(sample.name for sample in family.samples))
    }


def test_every_metric_of_the_reference_is_there_or_missing_for_a_reason() -> None:
    assert len(REFERENCE) == 55
    metrics = Metrics({"model_name": "m"}, Buckets(prompt=(1.0,), generation=(1.0,)))
    values = dict.fromkeys(GAUGES, 0.0) | pair_gauges({"peer_num_rooms": 1.0})
    found = exposed(metrics.exposition(values).decode())
    assert {name for name in REFERENCE if name not in found} == set(MISSING)


async def test_a_server_serves_them(toy_folder: Any) -> None:
    options = {"enable_metrics": True, "collect_tokens_histogram": True}
    async with scripted_server(toy_folder, {}, **options) as made:
        found = exposed((await made.client.get("/metrics")).text)
    assert {name for name in REFERENCE if name not in found} <= set(MISSING) | set(PAIR_GAUGES)
