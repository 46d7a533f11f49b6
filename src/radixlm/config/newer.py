"""Flags of SGLang 0.5.3 to 0.5.23, which 0.5.2 does not know: mapped, without effect, or refused.

Names, and the values that ask for nothing, are those of SGLang's server arguments.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from radixlm.base.errors import ConfigError

logger = logging.getLogger(__name__)

NEWEST = "0.5.23"
OLDEST = "0.5.2"
"""Releases of SGLang: the newest whose flags are known, and the one whose flags are options."""


@dataclass(frozen=True, slots=True)
class NewerFlag:
    """What becomes of one flag: exactly one of the three texts is set.

    ``to`` is the option that it is mapped to; ``values`` maps a value to that option's value, None
    for "leave it"; without ``values`` the value is passed on. ``switch`` is an option that comes on
    with a value above 1. ``why`` is the reason why it has no effect. ``what`` is the feature that
    is not built; ``default`` lists values that ask for none.
    """

    to: str = ""
    values: Mapping[str, Any] | None = None
    switch: str = ""
    why: str = ""
    what: str = ""
    default: tuple[str, ...] = ()


_SWITCH = {"true": True, "false": None}

_MAPPED: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    "cuda_graph_bs_decode": ("cuda_graph_bs", None),
    "cuda_graph_max_bs_decode": ("cuda_graph_max_bs", None),
    "cuda_graph_backend_decode": (
        "disable_cuda_graph",
        {"disabled": True, "full": None, "breakable": None},
    ),
    "cuda_graph_backend_prefill": (
        "disable_prefill_cuda_graph",
        {"disabled": True, "full": None, "breakable": None, "tc_piecewise": None},
    ),
    "disable_decode_cuda_graph": ("disable_cuda_graph", _SWITCH),
    "disable_piecewise_cuda_graph": ("disable_prefill_cuda_graph", _SWITCH),
    "disable_priority_preemption": (
        "priority_scheduling_preemption_threshold",
        {"true": 1 << 40, "false": None},
    ),
    "hf_chat_template_name": ("chat_template", None),
    "speculative_dflash_block_size": ("speculative_num_draft_tokens", None),
    "speculative_dspark_block_size": ("speculative_num_steps", None),
    "image_processor_backend": (
        "disable_fast_image_processor",
        {"pil": True, "auto": None, "torchvision": None},
    ),
    "incremental_streaming_output": ("stream_output", _SWITCH),
    "language_model_only": ("enable_multimodal", {"true": False, "false": None}),
    "return_hidden_states_mode": ("enable_return_hidden_states", {"full": True, "last": True}),
    "tokenizer_metrics_allowed_custom_labels": ("tokenizer_metrics_allowed_customer_labels", None),
}

_NO_EFFECT: Mapping[str, str] = {
    "adapters are loaded beside the steps, checked strictly, and dropped by last use": """
        enable_lora_overlap_loading lora_eviction_policy lora_strict_loading max_lora_chunk_size""",
    "it tunes communication between GPUs; ranks use plain NCCL": """
        boundary_reduction enable_cp_tp_group_sharing cp_strategy dcp_comm_backend
        dcp_replicate_q_proj
        dsa_prefill_cp_mode nsa_prefill_cp_mode prefill_cp_mode
        disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill
        disable_attn_tp_gather enable_aiter_allreduce_fusion enable_attn_tp_input_scattered
        enable_cp_decode_attn_tp enable_dense_mlp_attn_tp
        enable_dp_attention_local_control_broadcast enable_dsa_cache_layer_split
        enable_dynamic_chunking enable_fused_moe_sum_all_reduce enable_layernorm_sp
        enable_prefill_delayer enable_quant_communications enable_scattered_sconv
        enable_shared_experts_attn_tp enable_single_batch_overlap enable_tp_lm_head_all_to_all
        enable_torch_symm_mem enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend mm_enable_dp_encoder pp_async_batch_depth pre_warm_nccl
        prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms
        prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
        prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
        shared_experts_tp_size speculative_boundary_reduction""",
    "it chooses between kernels that are not in use": """
        bf16_gemm_backend disable_flashinfer_autotune dsa_decode_backend
        enable_amd_monokernel enable_megamoe_for_layernorm_sp enable_nvidia_megakernel
        monokernel_backend
        dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend dsa_triton_union
        dsv4_attn_backend dsv4_prefill_backend enable_dsa_fused_indexer enable_fused_qk_norm_rope
        enable_lean_attention enable_linear_replayssm enable_linear_replayssm_spec
        enforce_shared_experts_fusion flashinfer_autotune_skip_ops fp4_gemm_backend
        fp4_gemm_runner_backend fp8_gemm_backend fp8_gemm_runner_backend linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        enable_gdn_replayssm_spec linear_replayssm_cache_len mamba_backend nsa_decode_backend
        nsa_prefill_backend prefill_kv_cache_dequant_dtype""",
    "a CUDA graph serves every length, and its sizes have options of their own": """
        context_bucket cuda_graph_config cuda_graph_max_seq_len_prefill
        cuda_graph_prefill_max_context cuda_graph_tc_compiler debug_cuda_graph
        enable_breakable_cuda_graph enforce_piecewise_cuda_graph piecewise_cuda_graph_compiler
        piecewise_cuda_graph_max_tokens piecewise_cuda_graph_tokens""",
    "the server lays out its KV cache itself, which changes no answer": """
        c128_page_size enable_kv_cache_sharding
        enable_decoder_swa_bounded_replay enable_encoder_swa_bounded_replay
        enable_page_major_kv_layout enable_unified_memory mamba_full_memory_ratio
        mamba_max_states_per_path mamba_radix_cache_strategy mamba_scheduler_strategy
        mamba_track_interval
        prefill_only_disable_kv_cache swa_prefix_tails uses_mamba_radix_cache""",
    "weights are mapped into memory and stay on their device": """
        enable_paged_experts paged_experts_num_resident
        engine_info_bootstrap_port ple_offload_backend ple_offload_dir ple_offload_embedding
        startup_weight_load_mode weight_loader_drop_cache_after_load
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads""",
    "requests of the lowest priority are retracted first with --enable-priority-scheduling": """
        retraction_policy""",
    "prompts and decodes share a step, within --max-prefill-tokens": """
        min_free_slots_delay prefill_decode_interval prefill_decode_interval_min_bs
        prefill_max_requests""",
    "which cached prefix is evicted first changes no answer": """
        enable_session_radix_cache radix_eviction_policy_config strip_thinking_cache""",
    "the server divides the work of its processes itself": """
        batch_notify_size custom_sigquit_handler detokenizer_worker_num
        disable_tokenizer_batch_decode enable_http_worker_reuseport
        gc_threshold mlx_enable_sampling mm_io_worker_num
        mm_processor_worker_num soft_watchdog_timeout tokenizer_backend""",
    "computed media are kept and sent by the server's own means": """
        enable_broadcast_mm_inputs_process enable_mm_global_cache enable_prefix_mm_cache
        keep_mm_feature_on_device mm_feature_transport mm_global_cache_backend
        mm_preprocess_cache_size_mb trust_mm_content_hashes""",
    "products and sums keep their full precision": "enable_tf32_matmul",
    "/v1/responses always stores responses": "enable_response_store",
    "/open_session always takes streaming": "enable_streaming_session",
    "the items of /v1/score are computed one by one": "enable_mis",
    "there is no route for speech in real time": """
        asr_max_buffer_seconds asr_max_concurrent_sessions""",
    "what it reports about is not measured": """
        bucket_decode_throughput enable_layerwise_nvtx_marker enable_torch_compile_debug_mode
        load_snapshot_publish_interval sampling_mask_max_tokens
        uvicorn_access_log_exclude_prefixes""",
}

_DETAILS: Mapping[str, str] = {
    "speculative_algorithm": """
        enable_multi_layer_eagle spec_trace_dir
        speculative_dflash_draft_window_size
        speculative_domino_candidate_pool_size speculative_draft_attention_backend
        speculative_draft_kv_cache_dtype speculative_draft_sink_size
        speculative_draft_window_size speculative_dsa_topk_backend
        speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path
        speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend
        speculative_moe_runner_backend speculative_skip_dp_mlp_sync
        speculative_use_block_verification speculative_use_rejection_sampling uno_lora_path""",
    "enable_lora": """
        experts_shared_outer_loras lora_drain_wait_threshold lora_use_virtual_experts""",
    "enable_hierarchical_cache": """
        hicache_host_memory_fraction hicache_host_memory_mode
        hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
        mooncake_store_contributor""",
    "enable_unified_cache_external_linker": """
        enable_linker_mla_dedup mooncake_enable_page_wise_load mooncake_page_wise_load_threshold
        unified_cache_external_linker_backend unified_cache_external_linker_config""",
    "disaggregation_mode": """
        disaggregation_decode_allocation_policy
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
        disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
        disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum
        enable_pd_role_switch optimistic_prefill_attempts""",
    "moe_a2a_backend": """
        deepep_dispatcher_output_dtype deepep_v2_mode enable_w4a4_mxfp4_megamoe enable_waterfill
        flashinfer_a2a_dispatch_type fuseep_mode mooncake_ib_device""",
    "elastic_ep_backend": """
        elastic_ep_initial_size elastic_ep_join_mode elastic_ep_join_rank_offset elastic_ep_rejoin
        elastic_ep_scale_timeout enable_elastic_expert_backup ep_join_mode ep_join_rank_offset
        max_ep_size""",
    "encoder_only": """
        enable_adaptive_dispatch_to_encoder encoder_bootstrap_port encoder_register_urls
        encoder_transfer_backend""",
    "kt_weight_path": """
        kt_cpuinfer kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts
        kt_threadpool_count""",
    "decoupled_spec_role": """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank""",
    "grpc_port": """
        grpc_http_sidecar_port grpc_response_timeout_secs grpc_worker_threads sidecar_args
        smg_http_sidecar_port""",
    "load_format": "modelexpress_config remote_instance_weight_loader_backend",
    "enable_memory_saver": "enable_draft_weights_cpu_backup enable_weights_cpu_backup",
    "dllm_algorithm": "dllm_algorithm_config dllm_fdfo",
    "weight_cache_mode": "weight_cache_socket weight_cache_timeout",
    "enable_hisparse": "hierarchical_sparse_attention_extra_config hisparse_config",
    "enable_trace": "otlp_service_name trace_modules",
    "enable_forward_pass_metrics": """
        forward_pass_metrics_ipc_name forward_pass_metrics_worker_id""",
    "kv_canary": "kv_canary_real_data kv_canary_sweep_interval",
    "enable_flexkv": "flexkv_config_file",
    "enable_pdmux": "pdmux_config_path",
    "enable_int8_mamba_checkpoint": "int8_mamba_ckpt_size",
    "enable_mamba_cache_stochastic_rounding": "mamba_cache_philox_rounds",
    "debug_tensor_dump_output_folder": "debug_tensor_dump_layers",
    "enable_watermark": "watermark_config",
    "enable_return_aux_hidden_states": "return_aux_hidden_state_layer_ids",
}
"""Option or flag -> the flags that say how it works: nothing follows from them alone."""

_REFUSED: Mapping[str, str] = {
    "context parallelism": """
        attention_context_parallel_size=1 attn_cp_size=1 dcp_size=1
        decode_context_parallel_size=1 enable_dsa_prefill_context_parallel
        enable_nsa_prefill_context_parallel enable_prefill_context_parallel enable_prefill_cp""",
    "groups of ranks with other weights": "dwdp_size=1 moe_data_parallel_size=1 moe_dp_size=1",
    "expert parallelism that grows and shrinks": "elastic_ep_backend",
    "reports about the balance of experts": "expert_balancedness_report_mode=off",
    "a launcher of several processes": "gated_launch_port",
    "gRPC": "grpc_mode grpc_port sidecar smg_grpc_mode",
    "diffusion language models": "dllm_algorithm",
    "experts of KTransformers": "kt_weight_path",
    "an encoder on a server of its own; each server encodes media itself": """
        encoder_only encoder_urls language_only""",
    "drafting on a server of its own": "decoupled_spec_role=null",
    "quantization by ModelOpt or FlashRL": """
        modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
        modelopt_quant quantize_and_serve rl_quant_profile""",
    "a cache of weights outside the server": "weight_cache_mode=off",
    "weights that come from, or go to, another process": """
        checkpoint_engine_wait_weights_before_ready
        remote_instance_weight_loader_start_seed_via_transfer_engine""",
    "encrypted checkpoints": "decrypted_config_file decrypted_draft_config_file",
    "another reader of config.json": "model_config_parser=auto,hf",
    "other caches of KV": """
        enable_flexkv enable_hisparse enable_unified_cache_external_linker radix_cache_backend""",
    "checks of the KV cache": "kv_canary=none",
    "rounded states of recurrent layers": """
        enable_int8_mamba_checkpoint enable_mamba_cache_stochastic_rounding""",
    "other numbers in some models": """
        enable_deepseek_v4_fp4_indexer enable_precise_embedding_interpolation
        qsa_indexer_dtype=auto,bfloat16 rl_on_policy_target""",
    "other fields in answers": """
        enable_return_aux_hidden_states enable_return_indexer_topk padded_output_tokens""",
    "a limit on the prompt tokens of all requests": "max_inflight_prefill_tokens",
    "other metrics": """
        enable_forward_pass_metrics load_publish_endpoint=off stat_loggers""",
    "watermarks in answers": "enable_watermark",
    "hooks inside the model": "forward_hooks msprobe_dump_config",
}
"""Feature -> flags that ask for it; "name=value,value" lists the values that do not."""


@cache
def newer_flags() -> Mapping[str, NewerFlag]:
    """Name with underscores -> what becomes of the flag."""
    table = {name: NewerFlag(to=to, values=values) for name, (to, values) in _MAPPED.items()}
    for name in ("attention_data_parallel_size", "attn_dp_size"):
        table[name] = NewerFlag(to="dp_size", switch="enable_dp_attention")
    for why, names in _NO_EFFECT.items():
        table |= {name: NewerFlag(why=why) for name in names.split()}
    for parent, names in _DETAILS.items():
        flag = "--" + parent.replace("_", "-")
        table |= {name: NewerFlag(why=f"it is a detail of {flag}") for name in names.split()}
    for what, terms in _REFUSED.items():
        for term in terms.split():
            name, _, values = term.partition("=")
            table[name] = NewerFlag(what=what, default=tuple(filter(None, values.split(","))))
    return MappingProxyType(dict(sorted(table.items())))


_OFF = ("", "false", "none", "null", "off", "no", "0")


def _words(value: Any) -> list[str]:
    """A raw value as text; [] for a flag without a value or an empty list."""
    items = value if isinstance(value, list | tuple) else [value]
    return [str(item).lower() for item in items]


def read_newer(key: str, value: Any) -> dict[str, Any]:
    """The option that the flag ``key`` is mapped to, with its raw value; {} if it has no effect.

    ``value`` is raw: True, text, a list, or what YAML holds. A value that asks for nothing is
    always accepted; ConfigError for a feature that is not built, and for an unknown value.
    """
    flag = newer_flags()[key]
    dashed = "--" + key.replace("_", "-")
    words = _words(value)
    if flag.to:
        return _mapped(flag, dashed, value, words)
    is_off = value in (None, {}, []) or all(word in (*_OFF, *flag.default) for word in words)
    if flag.why:
        logger.warning("%s has no effect: %s", dashed, flag.why)
    elif not is_off:
        raise ConfigError(
            f"{dashed} is newer than what is built: {flag.what} (SGLang {NEWEST}). Leave it out."
        )
    return {}


def _mapped(flag: NewerFlag, dashed: str, value: Any, words: list[str]) -> dict[str, Any]:
    if flag.switch and words in (["1"], ["none"]):
        return {}
    if flag.values is None:
        switch = {flag.switch: True} if flag.switch else {}
        return {} if value is None else {flag.to: value} | switch
    word = words[0] if len(words) == 1 else " ".join(words)
    if word not in flag.values and word != "none":
        works = ", ".join(flag.values)
        raise ConfigError(f"{dashed}: {word!r} is not one of {works}")
    new = flag.values.get(word)
    return {} if new is None else {flag.to: new}


def newer_words(rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(raw values of the newer flags in ``rest``, the other words), of a command line's words that
    no option took. "--no-x" is False; several values become a list."""
    values: dict[str, Any] = {}
    others: list[str] = []
    taken: list[Any] | None = None  # the values of the flag that was read last
    for word in rest:
        name, equals, text = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if word.startswith("--"):
            is_no = key not in newer_flags() and key.removeprefix("no_") in newer_flags()
            key = key.removeprefix("no_") if is_no else key
            taken = [text] if equals else [False] if is_no else []
            if key in newer_flags():
                values[key] = taken
                continue
            taken = None
        if taken is None:
            others.append(word)
        else:
            taken.append(word)
    single = {name: (items or [True])[0] for name, items in values.items() if len(items) < 2}
    return values | single, others
