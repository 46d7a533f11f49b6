"""Flags of vLLM and llama.cpp that have other names here, for the message that refuses them."""

from functools import cache

_VLLM = """
allowed_local_media_path    --allow-local-media
allowed_origins             --cors-allowed-origins
api_server_count, renderer_num_workers  --tokenizer-worker-num
async_scheduling            nothing: it is on unless --disable-overlap-schedule is given
attention_config            --attention-backend
block_size                  --page-size
chat_template_content_format  nothing: it is read from the template
code_revision               nothing: code of a checkpoint is never run
collect_detailed_traces     --enable-trace
compilation_config, optimization_level, -O, -cc  --enable-torch-compile, --cuda-graph-bs
convert, runner, task       --is-embedding
cudagraph_capture_sizes     --cuda-graph-bs
custom_histogram_buckets    --prompt-tokens-buckets, --generation-tokens-buckets
data_parallel_address, data_parallel_rpc_port, -dpa, -dpp  --dist-init-addr
master_addr, master_port    --dist-init-addr
data_parallel_external_lb, data_parallel_hybrid_lb, -dpe, -dph  `radixlm router` before servers
data_parallel_rank, headless, -dpn  --node-rank
disable_log_requests        nothing: requests are logged with --log-requests only
disable_log_stats           --decode-log-interval
disable_uvicorn_access_log, uvicorn_log_level  --log-level-http
distributed_executor_backend  nothing: ranks are processes
distributed_timeout_seconds  --dist-timeout
enable_auto_tool_choice     nothing: it is on; --tool-call-parser names a format
enable_chunked_prefill      nothing: it is on; --chunked-prefill-size says how much
enable_expert_parallel, -ep  --ep-size
enable_force_include_usage  --stream-response-default-include-usage
enable_log_deltas, enable_log_outputs, max_log_len  --log-requests-level
enable_log_requests         --log-requests
enable_mm_embeds, enable_prompt_embeds  nothing: requests may have them
return_tokens_as_token_ids  nothing: requests may ask for it
enable_prefix_caching       nothing: it is on unless --disable-radix-cache is given
enable_prompt_tokens_details  --enable-cache-report
enable_request_id_headers   nothing: every answer has X-Request-Id
enable_server_load_tracking  nothing: GET /load tells
enable_sleep_mode           --enable-memory-saver
enable_tokenizer_info_endpoint  nothing: /tokenizer_info answers to every client with a key
enforce_eager               --disable-cuda-graph
generation_config           --sampling-defaults
gpu_memory_utilization, device_memory_utilization  --mem-fraction-static
grpc                        nothing: there is no gRPC
hf_overrides                --json-model-override-args
hf_token                    the environment variable HF_TOKEN
kv_cache_memory_bytes, num_gpu_blocks_override  --max-total-tokens
kv_offloading_size, kv_offloading_backend, swap_space  --hicache-size
kv_transfer_config          --disaggregation-mode, or --hicache-storage-backend
limit_mm_per_prompt         --limit-mm-data-per-request
log_config_file             --log-format
logits_processors           --logit-processor
logprobs_mode               the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB
lora_modules                --lora-paths
mamba_ssm_cache_dtype       --mamba-ssm-dtype
max_cpu_loras               --max-loaded-loras
max_cudagraph_capture_size  --cuda-graph-max-bs
max_model_len               --context-length
max_num_batched_tokens, max_num_scheduled_tokens  --chunked-prefill-size
long_prefill_token_threshold  --chunked-prefill-size
max_num_queued_reqs         --max-queued-requests
max_num_seqs, max_num_active_seqs  --max-running-requests
media_io_kwargs, mm_processor_kwargs  --mm-process-config
moe_backend                 --moe-runner-backend
numa_bind, numa_bind_cpus, numa_bind_nodes  --numa-node
offload_backend             --cpu-offload-gb
override_generation_config  --preferred-sampling-params
root_path                   --fastapi-root-path
scheduling_policy           --schedule-policy
seed                        --random-seed
shutdown_timeout            --drain-timeout
spec_method, speculative_config, -sc  --speculative-algorithm, --speculative-draft-model-path
spec_model                  --speculative-draft-model-path
spec_tokens                 --speculative-num-draft-tokens
structured_outputs_config, guided_decoding_backend  --grammar-backend
tokenizer                   --tokenizer-path
tokenizer_revision, hf_config_path  --revision
-tp                         --tp-size
-pp                         --pp-size
-dp                         --dp-size
-q                          --quantization
-n                          --nnodes
-r                          --node-rank
"""
"""Names, then what there is here instead."""

_VLLM_ONLY = """
additional_config aggregate_engine_logging all2all_backend allow_credentials
allow_deprecated_quantization allowed_headers allowed_methods anthropic_disabled_thinking_effort
aux_output_config cohere_format cohere_is_reasoning_model config_format
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_params cudagraph_metrics
data_parallel_backend data_parallel_multi_port_external_lb data_parallel_size_local
data_parallel_start_rank data_parallel_supervisor_port dbo_decode_token_threshold
dbo_prefill_token_threshold dcp_kv_cache_interleave_size dcp_q_replicate default_mm_loras device_ids
diffusion_config disable_access_log_for_endpoints disable_cascade_attn disable_chunked_mm_input
disable_fastapi_docs disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization
disable_sliding_window dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
dp_supervisor_probe_timeout_s dp_sync_interval ec_manager_config ec_transfer_config
elastic_ep_max_dp_size enable_batch_sharded_sampling enable_cumem_allocator enable_dbo
enable_elastic_ep enable_ep_weight_filter enable_fault_tolerance enable_flash_late_interaction
enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
enable_logging_iteration_details enable_mamba_shared_prefix_checkpoint
enable_mixed_moe_lora_format enable_moe_shared_loras enable_nccl_comm_suspend enable_offline_docs
enable_per_request_metrics enable_scale_out enable_shm_tensor_arena
enable_trace_replay engram_config eplb_config exclude_tools_when_tool_choice_none
expert_placement_strategy fail_on_environ_validation fault_tolerance_config fingerprint_mode
fingerprint_value fully_sharded_loras gdn_prefill_backend h11_max_header_count
h11_max_incomplete_event_size ignore_patterns interleave_mm_strings io_processor_plugin
ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend
kernel_config kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample
kv_sharing_fast_prefill linear_backend log_error_stack logging_config
long_prefill_token_threshold_adaptive lora_dtype mamba_block_size mamba_cache_dtype
mamba_cache_mode mamba_ssu_algorithm max_lora_cls_labels max_num_queued_tokens
max_parallel_loading_workers middleware mm_device_do_normalize mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides monokernel offload_params
per_request_spec_decode_metrics performance_mode pooler_config prefill_context_parallel_size
prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
prefix_match_unit profiler_config pt_load_map_location quantization_config ray_workers_use_nsight
reasoning_config reasoning_effort_map reasoning_parser_plugin replayssm_buffer_len response_role
return_sampling_mask safetensors_load_strategy safetensors_prefetch_block_size
safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl
show_hidden_metrics_for_version skip_mm_profiling sleep_mode_backend sleep_mode_offload_cudagraph
sleep_preserve_parameter_names sparse_indexer_topk_backend specialize_active_lora
sse_keep_alive_interval ssl_cert_reqs ssl_ciphers swa_bounded_replay tokens_only
tool_parser_plugin tool_strict_level trust_request_mm_kwargs ubatch_size use_fp64_gumbel
use_replayssm use_tqdm_on_load video_pruning_method video_pruning_rate watchdog_config watermark
weight_transfer_config worker_cls worker_extension_cls
"""

_LLAMA_CPP = """
-m                          --model-path
-a, alias                   --served-model-name
-hf, -hfr, hf_repo          --model-path
-c, ctx_size                --context-length
-ngl, n_gpu_layers, gpu_layers  --device; --cpu-offload-gb keeps a part of the weights in memory
-np, parallel               --max-running-requests
-t, threads                 --cpu-threads
-b, batch_size, -ub         --chunked-prefill-size
-fa, flash_attn             --attention-backend
-ctk, -ctv, cache_type_k, cache_type_v  --kv-cache-dtype
-md, model_draft            --speculative-draft-model-path
draft, draft_max            --speculative-num-draft-tokens
chat_template_file          --chat-template
embedding, embeddings, rerank, reranking  --is-embedding
grammar, grammar_file, json_schema_file  the field `grammar` or `json_schema` of a request
lora                        --lora-paths
metrics                     --enable-metrics
n_predict                   the field `max_tokens` of a request
no_mmap, mlock, jinja, cont_batching, no_webui  nothing: leave it out
props, slots                nothing: GET /props and GET /slots answer without a flag
reasoning_budget            the field `thinking_token_budget` of a request
reasoning_format            --reasoning-parser
repeat_penalty, temp        --preferred-sampling-params
ssl_cert_file               --ssl-certfile
ssl_key_file                --ssl-keyfile
threads_http                --tokenizer-worker-num
rope_scaling, rope_freq_base, override_kv  --json-model-override-args
"""


@cache
def _table() -> dict[str, str]:
    """Name, underscored or with one dash -> the rest of the message."""
    table = dict.fromkeys(_VLLM_ONLY.split(), "vLLM's; nothing here does the same: leave it out")
    for owner, text in (("llama.cpp's", _LLAMA_CPP), ("vLLM's", _VLLM)):
        for line in text.strip().splitlines():
            given, _, here = line.partition("  ")
            for name in given.split(", "):
                table[name] = f"{owner}; here it is {here.strip()}"
    return table


def of_others(key: str) -> str:
    """What ``key`` (a flag, or its name underscored) is elsewhere, as the end of a message; ""."""
    if key[:1] == "-" and key[:2] != "--":
        return _table().get(key, "")
    name = key.removeprefix("--").replace("-", "_")
    return _table().get(name) or _table().get(name.removeprefix("no_"), "")
