"""Model, tokenizer, weights, dtype."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.arch.quant_methods import (
    CHECKPOINT_FLAGS,
    ONLINE_FORMATS,
    ONLINE_INTEGERS,
    TORCHAO_FP8,
    UNQUANTIZED,
)
from radixlm.config.flag import ABOVE_ZERO, AUTO, POSITIVE, Flag, Group, no_op

LOAD_FORMATS = (
    "auto",
    "pt",
    "safetensors",
    "npcache",
    "dummy",
    "sharded_state",
    "gguf",
    "bitsandbytes",
    "layered",
    "fastsafetensors",
    "remote",
    "remote_instance",
    "mistral",
)
_QUANTIZATIONS = tuple(dict.fromkeys((*ONLINE_FORMATS, *CHECKPOINT_FLAGS, UNQUANTIZED)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelConfig(Group):
    """Model and tokenizer."""

    model_path: Annotated[
        str,
        "Folder of a checkpoint in Hugging Face format or Mistral's own (params.json), a .gguf "
        "file, the name of a model on a hub (org/name, org/name@revision, org/name:Q4_K_M), or of "
        "a bundled one, or a URL (s3://, redis://, http://, https://) whose weights are streamed.",
        Flag(("--model",)),
    ] = "radix-tiny"
    tokenizer_path: Annotated[
        str, "Folder of the tokenizer, or its name on a hub; the model's own when unset."
    ] = AUTO
    tokenizer_mode: Annotated[
        str,
        "'auto' reads tokenizer.json or tekken.json, 'slow' loads the tokenizer by transformers.",
        Flag(choices=("auto", "slow")),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool, "Serve token ids only: requests give input_ids and get output_ids."
    ] = False
    load_format: Annotated[
        str,
        "Format of the weights; 'auto' prefers safetensors and falls back to .bin files, "
        "'dummy' draws random weights, 'remote' streams them from the URL in --model-path, "
        "'remote_instance' from a running server.",
        Flag(choices=LOAD_FORMATS, old_values=(("runai_streamer", "auto"),)),
    ] = "auto"
    model_loader_extra_config: Annotated[
        str,
        "JSON object with options of the load format: enable_multithread_load and num_threads of "
        "safetensors, concurrency and memory_limit of remote, pattern of sharded_state.",
        Flag(is_json=True),
    ] = "{}"
    packed_cache_dir: Annotated[
        str | None,
        "Folder for packed weights, which the next start maps; without it, radixlm/packed in the "
        "user's cache folder, for quantized models of 64 MiB and more.",
    ] = None
    packed_cache_gb: Annotated[
        float,
        "GB that packed weights may take on disk; those used longest ago are deleted.",
        Flag(within=ABOVE_ZERO),
    ] = 64.0
    disable_packed_cache: Annotated[bool, "Neither read nor write packed weights."] = False
    trust_remote_code: Annotated[
        bool,
        "Allow model code that comes with a checkpoint.",
        no_op("code of a checkpoint is never run: a native model serves it, or loading fails"),
    ] = False
    context_length: Annotated[
        int | None,
        "Longest context in tokens (prompt and output); the checkpoint's own when unset.",
        Flag(within=POSITIVE),
    ] = None
    is_embedding: Annotated[
        bool, "Serve a causal model as an embedding model: last-token vectors of unit length."
    ] = False
    revision: Annotated[
        str | None,
        "Branch, tag or commit of a model that is given by name; the default branch when unset.",
    ] = None
    download_dir: Annotated[
        str | None,
        "Folder for downloaded models; the hub's cache when unset (HF_HOME, HF_HUB_CACHE).",
    ] = None
    model_checksum: Annotated[
        str | None,
        "Check the model's files before they are loaded: a JSON file with their SHA-256, or the "
        "name of a repository on the hub; without a value, the one that --model-path names.",
        Flag(const=""),
    ] = None
    model_impl: Annotated[
        str,
        "'radixlm': native model; 'transformers': Hugging Face's; 'auto': native if there is one.",
        Flag(choices=("auto", "radixlm", "transformers"), old_values=(("sglang", "radixlm"),)),
    ] = "auto"
    json_model_override_args: Annotated[
        str, "JSON object that overrides keys of the checkpoint's config.json.", Flag(is_json=True)
    ] = "{}"
    dtype: Annotated[
        str,
        "Dtype of weights and activations; 'auto' is the checkpoint's (on a CPU bfloat16 weights "
        "are kept and sums are float32).",
        Flag(choices=("auto", "half", "float16", "bfloat16", "float", "float32")),
    ] = "auto"
    quantization: Annotated[
        str | None,
        "Method that quantizes the weights at load, or that the checkpoint was quantized with; "
        "unquant: as the checkpoint has them.",
        Flag(choices=_QUANTIZATIONS),
    ] = None
    enable_fp32_lm_head: Annotated[
        bool,
        "Keep the output head in float32, not quantized, and multiply it by float32 activations.",
    ] = False
    quantization_param_path: Annotated[
        str | None,
        "JSON file with the scales of a KV cache in 8 bit floats (--kv-cache-dtype fp8_e4m3 or "
        "fp8_e5m2), in place of those of the checkpoint.",
    ] = None
    torchao_config: Annotated[
        str,
        "Quantize at load: int8dq, int8wo, int4wo-<group>, fp8wo, fp8dq-per_tensor, fp8dq-per_row.",
        Flag(choices=("", *ONLINE_INTEGERS, "fp8wo", *TORCHAO_FP8)),
    ] = ""
    weight_version: Annotated[str, "Label of the weights, returned with every response."] = (
        "default"
    )
    custom_weight_loader: Annotated[
        tuple[str, ...] | None,
        "Import paths of functions (module.function) that /update_weights_from_tensor may name as "
        "load_format: each turns a list of (name, tensor) into tensors of the checkpoint.",
    ] = None
    weight_loader_disable_mmap: Annotated[
        bool, "Read safetensors files by calls instead of mapping them."
    ] = False
    delete_ckpt_after_loading: Annotated[
        bool,
        "Delete the weights that were downloaded into --download-dir once they are loaded; never "
        "a folder of the user's.",
    ] = False
    remote_instance_weight_loader_seed_instance_ip: Annotated[
        str | None,
        "Address of the instance that sends its weights (--load-format remote_instance).",
        Flag(part_of=("load_format",)),
    ] = None
    remote_instance_weight_loader_seed_instance_service_port: Annotated[
        int | None,
        "Port of the instance that sends its weights.",
        Flag(within="[1, 65535]", part_of=("load_format",)),
    ] = None
    remote_instance_weight_loader_send_weights_group_ports: Annotated[
        tuple[int, ...] | None,
        "Ports of the groups that receive weights.",
        no_op("weights come over the seed's service port, without process groups", "[1, 65535]"),
    ] = None

    @property
    def quantized_as(self) -> str:
        """How weights are quantized when they are loaded, by whichever option says so; "" if none
        does."""
        asked = self.quantization if self.quantization != UNQUANTIZED else None
        return asked or self.torchao_config or ""
