"""KV pages, prefix cache, hierarchical cache, offloading."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import AUTO, NON_NEGATIVE, POSITIVE, Flag, Group

KV_DTYPES = (
    *("auto", "fp8_e5m2", "fp8_e4m3", "int8", "int4"),
    *("bf16", "bfloat16", "fp16", "float16", "fp32", "float32"),
)
_HICACHE = ("enable_hierarchical_cache",)
_STORAGES = (*("file", "mooncake", "hf3fs", "nixl"), *("shared_file", "redis", "s3", "dynamic"))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MemoryConfig(Group):
    """Memory."""

    mem_fraction_static: Annotated[
        float | None,
        "Share of the memory for weights and KV cache. When unset 0.6 on a CPU; on a GPU all but "
        "what the largest steps need, measured at start.",
        Flag(within="(0, 1)"),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        "Tokens that the KV cache holds; from --mem-fraction-static when unset.",
        Flag(within=POSITIVE),
    ] = None
    page_size: Annotated[
        int,
        "Tokens of one KV page; 16 when unset. The CPU kernels serve every size by pages of a "
        "multiple of 16 tokens. Prefix hits count tokens, not pages.",
        Flag(within=POSITIVE),
    ] = AUTO
    kv_cache_dtype: Annotated[
        str,
        "Dtype of the KV cache; 'auto' is the model's. int8 keeps one scale per token and head, "
        "int4 one for every 32 channels of them (docs/kv-cache.md).",
        Flag(choices=KV_DTYPES),
    ] = "auto"
    disable_radix_cache: Annotated[bool, "Do not share KV between equal prefixes."] = False
    warm_restart: Annotated[
        bool,
        "Keep the KV cache of all ranks in memory of the server, where engine processes that take "
        "the place of killed ones find it again.",
    ] = False
    radix_eviction_policy: Annotated[
        str,
        "Which cached prefix is evicted first: the least recently used, the least often used, or "
        "of those used less than twice the least recently used (slru).",
        Flag(choices=("lru", "lfu", "slru"), old_values=(("priority", "lru"), ("tlru", "lru"))),
    ] = "lru"
    hybrid_kvcache_ratio: Annotated[
        float | None,
        "Sliding-window models: 0 gives all layers full-length pools, 1 gives window layers only "
        "their window; 0.5 when written without a value.",
        Flag(within="[0, 1]", const=0.5),
    ] = None
    swa_full_tokens_ratio: Annotated[
        float,
        "Tokens in the window layers' pool over tokens in the full layers' pool.",
        Flag(within="(0, 1]"),
    ] = 0.8
    disable_hybrid_swa_memory: Annotated[
        bool, "Keep the full length for sliding-window layers too."
    ] = False
    max_mamba_cache_size: Annotated[
        int | None,
        "States in the pool of recurrent layers: up to four per running request, the rest are "
        "snapshots for the prefix cache. From the memory when unset.",
        Flag(within=POSITIVE),
    ] = None
    mamba_ssm_dtype: Annotated[
        str,
        "Dtype of the states of recurrent layers (their convolutions stay float32).",
        Flag(choices=("float32", "bfloat16")),
    ] = "float32"
    enable_memory_saver: Annotated[
        bool, "Let /release_memory_occupation and /sleep give memory back to the system."
    ] = False
    enable_hierarchical_cache: Annotated[
        bool,
        "Keep KV pages in RAM beside the KV cache too, and in the storage of "
        "--hicache-storage-backend, and bring them back for prompts that begin with them.",
        Flag(aliases=("--enable-hicache",)),
    ] = False
    hicache_ratio: Annotated[
        float,
        "Bytes of the host tier over those of the KV cache; less where the RAM does not have them.",
        Flag(within="(0, inf)", part_of=_HICACHE),
    ] = 2.0
    hicache_size: Annotated[
        int,
        "GB of the host tier of each rank; overrides --hicache-ratio unless 0.",
        Flag(within=NON_NEGATIVE, part_of=_HICACHE),
    ] = 0
    hicache_write_policy: Annotated[
        str,
        "Which pages are copied to the tiers: all when the prefix cache takes them over; "
        "(write_through_selective) those of requests that hit it, and prefixes of 1,024 tokens; or "
        "(write_back) those that it would give up next.",
        Flag(choices=("write_back", "write_through", "write_through_selective"), part_of=_HICACHE),
    ] = "write_through"
    hicache_io_backend: Annotated[
        str,
        "What copies between host and device.",
        Flag(
            choices=("direct", "kernel", "kernel_ascend"),
            built=("kernel",),
            why="pages are copied in one way on each device",
            part_of=_HICACHE,
        ),
    ] = "kernel"
    hicache_mem_layout: Annotated[
        str,
        "Layout of the host pool.",
        Flag(
            choices=(
                "layer_first",
                "page_first",
                "page_first_direct",
                "page_first_kv_split",
                "page_head",
            ),
            built=("layer_first",),
            why="the host tier keeps each page in one piece, as its pools have it",
            part_of=_HICACHE,
        ),
    ] = "layer_first"
    hicache_storage_backend: Annotated[
        str | None,
        "Storage below the host tier. 'file': segment files in a folder of this server, which "
        "outlive it; the others are shared between servers.",
        Flag(choices=_STORAGES, part_of=_HICACHE),
    ] = None
    hicache_storage_prefetch_policy: Annotated[
        str,
        "How long a request waits for pages of the tiers. 'auto': while they come sooner than they "
        "are computed; 'timeout': seconds by the number of tokens; 'best_effort': as 'auto', but "
        "whatever is there is asked for.",
        Flag(choices=("auto", "best_effort", "wait_complete", "timeout"), part_of=_HICACHE),
    ] = "auto"
    hicache_storage_backend_extra_config: Annotated[
        str | None,
        "JSON object with options of the storage, or @ and a file (JSON, YAML, TOML). For all: "
        "prefetch_threshold (tokens), prefetch_timeout_base, prefetch_timeout_per_ki_token "
        "(seconds); for 'file': directory, max_size_gb, min_free_gb.",
        Flag(is_json=True, may_be_file=True, is_secret=True, part_of=_HICACHE),
    ] = None
    enable_lmcache: Annotated[
        bool, "Keep KV in a server of LMCache; with --enable-hierarchical-cache below its tiers."
    ] = False
    lmcache_config_file: Annotated[
        str | None,
        "LMCache's YAML file; its remote_url is used. $LMCACHE_CONFIG_FILE when unset.",
        Flag(part_of=("enable_lmcache",)),
    ] = None
    kv_store_secret_file: Annotated[
        str | None,
        "File with a secret of the servers that share a storage: pages that others wrote are "
        "misses, and no tenant can compute the keys of another.",
        Flag(part_of=("hicache_storage_backend", "enable_lmcache")),
    ] = None
    cpu_offload_gb: Annotated[
        int,
        "GB of weights that stay in pinned host memory (GPU), in whole layers that are copied "
        "ahead of their use; or in their packed file on disk (CPU).",
        Flag(within=NON_NEGATIVE),
    ] = 0
    offload_group_size: Annotated[
        int,
        "Layers in an offload group, of which the last --offload-num-in-group stay in host memory; "
        "-1 disables groups.",
        Flag(within="[-1, inf)", only_device="cuda"),
    ] = -1
    offload_num_in_group: Annotated[
        int,
        "Layers of a group that are offloaded.",
        Flag(within=POSITIVE, part_of=("offload_group_size",)),
    ] = 1
    offload_prefetch_step: Annotated[
        int,
        "How many offloaded layers are copied ahead of the one that runs; the device has memory "
        "for one more.",
        Flag(within=NON_NEGATIVE, part_of=("cpu_offload_gb", "offload_group_size")),
    ] = 1
    offload_mode: Annotated[
        str,
        "Where offloaded weights are kept.",
        Flag(
            choices=("cpu", "meta", "sharded_gpu", "shm_cpu"),
            built=("cpu",),
            needs="several GPUs that read each other's memory (meta: no weights at all)",
            part_of=("cpu_offload_gb", "offload_group_size"),
        ),
    ] = "cpu"
