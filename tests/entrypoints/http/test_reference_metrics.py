"""Every metric of SGLang is there, or is named here with the reason why not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.http_server import scripted_server

from radixlm.entrypoints.http.admin.metrics import install, pair_gauges
from radixlm.observe.loads import count_keys
from radixlm.observe.metrics import COUNTERS, GAUGES, PAIR_GAUGES, Buckets, Metrics
from radixlm.wire.replies import LoadReport

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
# added after 0.5.2, up to August 2026
NEWER = """
context_len cuda_graph_passes_total decode_sum_seq_lens encoder_cache_entries
dp_cooperation_forward_execution_seconds_total dp_cooperation_realtime_tokens_total
encoder_cache_evictions_total encoder_cache_hit_files_total encoder_cache_hit_tokens_total
encoder_cache_size_mb
encoder_cache_total_files_total encoder_cache_total_tokens_total encoder_mm_items_per_batch
encoder_mm_items_per_request encoder_model_forward_seconds encoder_preprocess_seconds
encoder_queue_wait_seconds encoder_request_e2e_latency_seconds encoder_requests_received_total
encoder_requests_total encoder_transfer_seconds eplb_balancedness eplb_gpu_physical_count
estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total
evicted_tokens_total eviction_duration_seconds forward_execution_seconds_total full_token_usage
fwd_occupancy get_loads_duration_seconds graph_memory_usage_gb hicache_host_total_tokens
hicache_host_used_tokens http_requests_active http_requests_total http_responses_total is_cuda_graph
kv_available_tokens kv_cache_memory_usage_gb kv_evictable_tokens kv_transfer_alloc_ms
kv_transfer_bootstrap_ms kv_transfer_total_mb kv_used_tokens load_back_duration_seconds
load_back_tokens_total lora_pool_slots_total lora_pool_slots_used lora_pool_utilization
mamba_available_tokens mamba_evictable_tokens mamba_usage mamba_used_tokens max_total_num_tokens
max_total_num_tokens_swa new_token_ratio num_grammar_timeout_total num_pages
num_prefill_bootstrap_queue_reqs num_prefill_retries_total num_retracted_input_tokens_total
num_retracted_output_tokens_total num_retracted_requests_total num_streaming_sessions
num_unique_running_routing_keys page_size pending_prealloc_token_usage per_stage_req_latency_seconds
prefill_delayer_outcomes_total prefill_delayer_wait_forward_passes prefill_delayer_wait_seconds
process_cpu_seconds_total queue_time_seconds realtime_tokens_total routing_key_all_req_count
routing_key_running_req_count routing_keys_active spec_accept_rate spec_block_accept_length
spec_cap_length spec_num_draft_tokens spec_num_steps spec_verify_calls_total
startup_available_gpu_memory_gb startup_cuda_graph_time_seconds startup_time_seconds
streaming_session_held_tokens swa_available_tokens swa_evictable_tokens swa_used_tokens
uncached_prompt_tokens_histogram weight_load_duration_seconds weight_memory_usage_gb
""".split()
_NO_PART = "there is no such part: "
MISSING_NEWER = {
    **{name: f"{_NO_PART}an encoder server" for name in NEWER if name.startswith("encoder_")},
    **{name: f"{_NO_PART}a delayer" for name in NEWER if name.startswith("prefill_delayer_")},
    **{name: f"{_NO_PART}work of DP ranks together" for name in NEWER if "cooperation" in name},
    **dict.fromkeys(
        ("spec_block_accept_length", "spec_cap_length", "new_token_ratio"),
        f"{_NO_PART}the scheduler or drafter that it is about",
    ),
    **dict.fromkeys(
        (
            "cuda_graph_passes_total",
            "is_cuda_graph",
            "graph_memory_usage_gb",
            "fwd_occupancy",
            "startup_available_gpu_memory_gb",
        ),
        "CUDA graphs and the GPU report no figures",
    ),
    **dict.fromkeys(
        ("eplb_balancedness", "eplb_gpu_physical_count"), "expert_balancedness_10, ... tell it"
    ),
    **dict.fromkeys(
        (
            "num_prefill_bootstrap_queue_reqs",
            "num_prefill_retries_total",
            "kv_transfer_alloc_ms",
            "pending_prealloc_token_usage",
            "num_grammar_timeout_total",
        ),
        "pairs and grammars do not count it",
    ),
    **dict.fromkeys(
        (
            "eviction_duration_seconds",
            "load_back_duration_seconds",
            "hicache_host_total_tokens",
            "hicache_host_used_tokens",
            "streaming_session_held_tokens",
            "swa_evictable_tokens",
            "mamba_evictable_tokens",
            "max_total_num_tokens_swa",
        ),
        "the caches report no such figure",
    ),
    **dict.fromkeys(
        (
            "decode_sum_seq_lens",
            "per_stage_req_latency_seconds",
            "num_retracted_input_tokens_total",
            "num_retracted_output_tokens_total",
            "weight_load_duration_seconds",
            "get_loads_duration_seconds",
        ),
        "it is not counted",
    ),
}
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
}


STEPS = ("extend", "decode", "mixed")


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
    metrics.http.begin("/", "GET")
    metrics.http.end("/", "GET", 200)
    metrics.startup({"load_weight": 1.0, "cuda_graph": {"decode": 1.0}})
    metrics.routing_keys({})
    metrics.cpu(1.0)
    values = dict.fromkeys((*GAUGES, *COUNTERS), 0.0) | pair_gauges({"peer_num_rooms": 1.0})
    found = exposed(metrics.exposition(values).decode())
    assert {name for name in REFERENCE if name not in found} == set(MISSING)
    assert {name for name in NEWER if name not in found} == set(MISSING_NEWER)


async def test_a_server_serves_them(toy_folder: Any) -> None:
    options = {"enable_metrics": True, "collect_tokens_histogram": True}
    async with scripted_server(toy_folder, {}, **options) as made:
        assert (await made.client.get("/health")).status_code == 200
        text = (await made.client.get("/metrics")).text
        found = exposed(text)
        kinds = dict(re.findall(r"# TYPE sglang:(\S+) (\S+)", text))
        assert {kinds[name] for name in COUNTERS if name in kinds} == {"counter"}
        modes = re.findall(r'^sglang:realtime_tokens_total\{.*mode="(\w+)"', text, re.MULTILINE)
        assert sorted(modes) == ["decode", "prefill_cache", "prefill_compute"]
        await made.post("/generate", text="hi")
        assert made.engine.scheduler.recorder is not None
        seconds = made.engine.scheduler.recorder.forward_s
        assert seconds["extend"] > 0 < seconds["decode"] and tuple(seconds) == STEPS
        shown = re.findall(r'^sglang:forward_execution.*category="(\w+)"', text, re.MULTILINE)
        assert sorted(shown) == sorted(STEPS)
    missing = {name for name in (*REFERENCE, *NEWER) if name not in found}
    assert missing <= {*MISSING, *MISSING_NEWER, *PAIR_GAUGES, *COUNTERS}


async def test_cpu_seconds_of_both_processes_are_counted(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}, enable_metrics=True) as made:
        await made.post("/generate", text="hi")
        text = (await made.client.get("/metrics")).text
        app = FastAPI()  # of a second process that shares the engine
        install(app, made.state, is_first=False)
        async with AsyncClient(transport=ASGITransport(app), base_url="http://x") as client:
            other = (await client.get("/metrics")).text
    for shown in (text, other):
        found = re.findall(r'process_cpu_seconds_total\{component="(\w+)".*\} (\S+)', shown)
        assert all(float(value) > 0 for _, value in found)
        assert sorted(component for component, _ in found) == ["scheduler", "tokenizer"]
        assert shown.count("# TYPE sglang:process_cpu_seconds_total counter") == 1


def test_cpu_seconds_of_a_process_that_starts_anew_are_added() -> None:
    metrics = Metrics({"model_name": "m"}, Buckets())
    for seconds in (5.0, 7.0, 1.0, 2.0):
        metrics.counts({"process_cpu_seconds_total component=scheduler": seconds}, 0)
    text = metrics.exposition({}).decode()
    assert re.findall(r"process_cpu_seconds_total\{.*\} (\S+)", text) == ["9.0"]


def test_counts_of_an_engine_that_died_stay_and_those_of_others_are_added_once() -> None:
    metrics, name = Metrics({"model_name": "m"}, Buckets()), "realtime_tokens_total mode=decode"
    for replica, count in ((0, 100.0), (1, 50.0), (1, 0.0), (0, 110.0), (1, 5.0)):
        metrics.counts({name: count}, replica)
    text = metrics.exposition({}).decode()
    assert re.findall(r"realtime_tokens_total\{.*\} (\S+)", text) == ["165.0"]


async def test_calls_are_counted_by_route_and_status(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}, enable_metrics=True, api_key="k") as made:
        for path, key in (("/v1/models/tiny", "k"), ("/v1/models/x", "k"), ("/nothing/1", "k"),
                          ("/v1/models", "wrong")):  # fmt: skip
            await made.client.get(path, headers={"Authorization": f"Bearer {key}"})
        text = (await made.client.get("/metrics")).text
        info = (await made.client.get("/server_info", headers={"Authorization": "Bearer k"})).json()
    text = re.sub(r'(model_name|engine_type|tp_rank|pp_rank)="[^"]*",?', "", text).replace(
        ",}", "}"
    )
    counts = dict(re.findall(r"^sglang:(http_\S+\{.*\}) (\S+)$", text, re.MULTILINE))
    card = 'endpoint="/v1/models/{model:path}",method="GET"'
    assert counts[f"http_requests_total{{{card}}}"] == "2.0"
    for status, endpoint in (("200", "/v1/models/{model:path}"), ("404", "other"),
                             ("401", "/v1/models")):  # fmt: skip
        labels = f'endpoint="{endpoint}",method="GET",status_code="{status}"'
        assert counts[f"http_responses_total{{{labels}}}"] == "1.0", counts
    assert counts[f"http_requests_active{{{card}}}"] == "0.0"
    assert counts['http_requests_active{endpoint="/metrics",method="GET"}'] == "1.0"
    assert set(info["startup_time"]) == {
        "load_weight", "kv_cache_allocation", "scheduler_e2e", "tokenizer_e2e", "cuda_graph",
    }  # fmt: skip
    assert info["internal_states"][0]["startup_time"] == info["startup_time"]


async def test_routing_keys_are_counted(toy_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_server(toy_folder, {}, enable_metrics=True) as made:
        headers = {"x-smg-routing-key": "mine"}
        keys = (*"aaaab", None)
        counts = count_keys(keys[:3], keys[3:])
        assert counts == {"running": 1, "running 3": 1, "all 5": 1, "all 1": 1}
        report = LoadReport(routing_keys=counts)
        monkeypatch.setattr(made.engine.intake.replicas, "load", lambda: report)
        text = (await made.client.get("/metrics", headers=headers)).text
    values = {
        (name, labels.get("gt", ""), labels.get("le", "")): value
        for family in text_string_to_metric_families(text)
        for name, labels, value, *_ in family.samples
        if "routing_key" in name and value
    }
    assert values == {
        ("sglang:routing_keys_active", "", ""): 1,
        ("sglang:num_unique_running_routing_keys", "", ""): 1,
        ("sglang:routing_key_running_req_count", "2", "3"): 1,
        ("sglang:routing_key_all_req_count", "3", "5"): 1,
        ("sglang:routing_key_all_req_count", "0", "1"): 1,
    }
