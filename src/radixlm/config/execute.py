"""Device, kernels, CUDA graphs, threads."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import AUTO, NON_NEGATIVE, POSITIVE, Flag, Group, no_op

ATTENTION_BACKENDS = (
    "cpu",
    "torch_native",
    "triton",
    "flashinfer",
    "fa3",
    "fa4",
    "flashmla",
    "cutlass_mla",
    "trtllm_mla",
    "trtllm_mha",
    "dual_chunk_flash_attn",
    "hybrid_linear_attn",
    "aiter",
    "wave",
    "ascend",
    "flex_attention",
    "cutedsl_mla",
    "tokenspeed_mla",
    "hpc_ops",
    "intel_xpu",
    "dsa",
    "nsa",
    "dsv4",
    "qsa",
)
# the layers of such models choose among the keys themselves; any backend holds them
MODEL_ATTENTION = ("dual_chunk_flash_attn", "dsa", "nsa", "dsv4", "qsa")
BUILT_ATTENTION = ("cpu", "torch_native", "triton", "flashinfer", "fa3", "fa4", *MODEL_ATTENTION)
_ATTENTION = Flag(
    choices=ATTENTION_BACKENDS,
    built=BUILT_ATTENTION,
    needs="that attention backend",
    old_values=(("intel_amx", "cpu"), ("compressed", "dsv4")),
)
_TRITON = "tunes a Triton kernel that is not in use"
_CUDA = "chooses between CUDA kernels that are not in use"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExecuteConfig(Group):
    """Execution."""

    device: Annotated[
        str,
        "Device that runs the model; when unset a supported GPU, else the CPU.",
        Flag(
            choices=("auto", "cuda", "cpu", "xpu", "hpu", "npu"),
            built=("auto", "cuda", "cpu"),
            needs="an executor for that device",
        ),
    ] = AUTO
    attention_backend: Annotated[
        str, "Attention kernels; 'cpu' on a CPU and 'triton' on a GPU when unset.", _ATTENTION
    ] = AUTO
    prefill_attention_backend: Annotated[
        str,
        "Attention kernels of steps with any part of a prompt; --attention-backend when unset.",
        _ATTENTION,
    ] = AUTO
    decode_attention_backend: Annotated[
        str,
        "Attention kernels of steps that only decode; --attention-backend when unset.",
        _ATTENTION,
    ] = AUTO
    sampling_backend: Annotated[
        str,
        "Sampling kernels; 'pytorch' when unset.",
        Flag(
            choices=("flashinfer", "pytorch", "ascend"),
            built=("pytorch",),
            why="the sampler of pytorch draws the same distribution",
        ),
    ] = AUTO
    moe_runner_backend: Annotated[
        str,
        "Kernels for mixtures of experts.",
        Flag(
            choices=(
                "auto",
                "triton",
                "triton_kernel",
                "flashinfer_trtllm",
                "flashinfer_cutlass",
                "flashinfer_mxfp4",
                "flashinfer_cutedsl",
                "flashinfer_trtllm_routed",
                "deep_gemm",
                "cutlass",
                "marlin",
                "humming",
                "aiter",
                "hpc_ops",
                "experimental_sgl_trtllm",
                "experimental_sgl_marlin",
                "flashinfer_megamoe",
                "megamoe",
                "lora_cutedsl",
                "lora_triton",
                "lora_marlin",
                "intel_xpu",
            ),
            built=("auto",),
            why="the experts have one kernel a device, for the same products",
        ),
    ] = "auto"
    flashinfer_mxfp4_moe_precision: Annotated[
        str,
        "Precision of flashinfer's mxfp4 experts.",
        Flag(
            choices=("default", "bf16", "fp8"),
            built=("default",),
            needs="flashinfer kernels",
            part_of=("quantization",),
        ),
    ] = "default"
    kernel: Annotated[
        tuple[str, ...],
        "OP=IMPLEMENTATION to use instead of the default, such as rms_norm=reference; repeatable.",
        Flag(is_repeatable=True),
    ] = ()
    random_seed: Annotated[
        int,
        "Seed for dummy weights and for requests without a seed; random when unset.",
        Flag(within=NON_NEGATIVE),
    ] = AUTO
    cpu_threads: Annotated[
        int, "Threads of the CPU kernels; all cores when unset.", Flag(within="[1, 1024]")
    ] = AUTO
    numa_node: Annotated[
        tuple[int, ...] | None,
        "NUMA node of each engine process of this host: its cores, and its memory first.",
        Flag(within=NON_NEGATIVE),
    ] = None
    enable_return_hidden_states: Annotated[bool, "Requests may ask for hidden states."] = False
    enable_return_routed_experts: Annotated[
        bool, "Requests may ask which experts their tokens chose."
    ] = False
    enable_nan_detection: Annotated[
        bool, "Fail a request whose logits are NaN; always on for CPUs.", Flag(only_device="cuda")
    ] = False
    enable_deterministic_inference: Annotated[
        bool,
        "Compute a token to the same bits in every batch; with the CPU kernels it is always so.",
    ] = False
    disable_cuda_graph: Annotated[bool, "Launch kernels one by one.", Flag(only_device="cuda")] = (
        False
    )
    cuda_graph_max_bs: Annotated[
        int | None,
        "Largest batch size with a CUDA graph; --max-running-requests when unset.",
        Flag(within=POSITIVE, only_device="cuda"),
    ] = None
    cuda_graph_bs: Annotated[
        tuple[int, ...] | None,
        "Batch sizes with a CUDA graph; 1 2 4 8 16 24 32 48 ... when unset.",
        Flag(within=POSITIVE, only_device="cuda"),
    ] = None
    disable_cuda_graph_padding: Annotated[
        bool,
        "Do not pad batches to the next CUDA graph; captures sizes up to 160 when none are given.",
        Flag(only_device="cuda"),
    ] = False
    disable_prefill_cuda_graph: Annotated[
        bool, "No CUDA graphs of steps with parts of prompts.", Flag(only_device="cuda")
    ] = False
    cuda_graph_max_bs_prefill: Annotated[
        int | None,
        "Most tokens of a step with parts of prompts that has a CUDA graph; 1024 when unset.",
        Flag(within=POSITIVE, only_device="cuda"),
    ] = None
    cuda_graph_bs_prefill: Annotated[
        tuple[int, ...] | None,
        "Numbers of tokens of steps with parts of prompts that have a CUDA graph; 32 48 64 96 ... "
        "when unset.",
        Flag(within=POSITIVE, only_device="cuda"),
    ] = None
    enable_profile_cuda_graph: Annotated[
        bool,
        "Write a trace of the capture of CUDA graphs to RADIXLM_PROFILER_DIR.",
        Flag(only_device="cuda"),
    ] = False
    enable_cudagraph_gc: Annotated[
        bool,
        "Collect garbage during the capture, which then takes longer.",
        Flag(only_device="cuda"),
    ] = False
    enable_torch_compile: Annotated[
        bool, "Compile small decode steps with torch.compile; a warning names models without any."
    ] = False
    torch_compile_max_bs: Annotated[
        int, "Largest batch of decodes that --enable-torch-compile compiles.", Flag(within=POSITIVE)
    ] = 32
    triton_attention_reduce_in_fp32: Annotated[
        bool, "Sum partial attention in float32.", no_op(_TRITON)
    ] = False
    triton_attention_num_kv_splits: Annotated[
        int, "KV splits in Triton decoding.", no_op(_TRITON, POSITIVE)
    ] = 8
    triton_attention_split_tile_size: Annotated[
        int | None, "Tile of a KV split in Triton decoding.", no_op(_TRITON, POSITIVE)
    ] = None
    flashinfer_mla_disable_ragged: Annotated[
        bool, "No ragged prefill in flashinfer's MLA.", no_op(_CUDA)
    ] = False
    disable_shared_experts_fusion: Annotated[
        bool, "Run shared experts separately.", no_op(_CUDA)
    ] = False
    disable_chunked_prefix_cache: Annotated[bool, "No chunked prefix in MLA.", no_op(_CUDA)] = False
    disable_flashinfer_cutlass_moe_fp4_allgather: Annotated[
        bool, "Gather before quantizing in flashinfer's FP4 experts.", no_op(_CUDA)
    ] = False
    enable_double_sparsity: Annotated[
        bool,
        "Output tokens of long sequences attend to the heavy tokens only (docs/long-context.md); "
        "needs --ds-channel-config-path.",
    ] = False
    ds_channel_config_path: Annotated[
        str | None,
        "JSON file with the heavy channels; `radixlm calibrate double-sparsity` writes it.",
        Flag(part_of=("enable_double_sparsity",)),
    ] = None
    ds_heavy_channel_num: Annotated[
        int,
        "Channels of a key that approximate scores are made of.",
        Flag(within=POSITIVE, part_of=("enable_double_sparsity",)),
    ] = 32
    ds_heavy_token_num: Annotated[
        int,
        "Tokens that the query heads of a KV head attend to, chosen together.",
        Flag(within=POSITIVE, part_of=("enable_double_sparsity",)),
    ] = 256
    ds_heavy_channel_type: Annotated[
        str,
        "Which of the file's lists of channels: by q, by k, or by their product.",
        Flag(choices=("qk", "q", "k"), part_of=("enable_double_sparsity",)),
    ] = "qk"
    ds_sparse_decode_threshold: Annotated[
        int,
        "Sequences of fewer tokens are dense.",
        Flag(within=NON_NEGATIVE, part_of=("enable_double_sparsity",)),
    ] = 4096
    debug_tensor_dump_output_folder: Annotated[
        str | None, "Folder to which each step's tensors are written (docs/debugging.md); slow."
    ] = None
    debug_tensor_dump_input_file: Annotated[
        str | None,
        "Token ids (.npy, .json) or a dump (.safetensors): the server runs them once and ends.",
        Flag(part_of=("debug_tensor_dump_output_folder",)),
    ] = None
    debug_tensor_dump_inject: Annotated[
        bool,
        "Each layer's input is taken from the dump in --debug-tensor-dump-input-file.",
        Flag(const=True, part_of=("debug_tensor_dump_input_file",)),
    ] = False
    debug_tensor_dump_prefill_only: Annotated[
        bool, "Dump prefill steps only.", Flag(part_of=("debug_tensor_dump_output_folder",))
    ] = False
