"""LoRA adapters."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import POSITIVE, Flag, Group

_LORA = "adapters in the executor"

LORA_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
    "embed_tokens",
    "lm_head",
    "all",
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AdapterConfig(Group):
    """LoRA."""

    enable_lora: Annotated[
        bool,
        "Serve LoRA adapters; follows from --lora-paths.",
        Flag(state="planned", needs=_LORA),
    ] = False
    lora_paths: Annotated[
        tuple[str, ...] | None,
        'Adapters to load: PATH, NAME=PATH or {"lora_name": .., "lora_path": .., "pinned": ..}.',
        Flag(state="planned", needs=_LORA),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        "Highest rank to serve; from --lora-paths when unset.",
        Flag(within=POSITIVE, state="planned", needs=_LORA),
    ] = None
    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        "Modules that adapters may change; from --lora-paths when unset.",
        Flag(choices=LORA_TARGETS, state="planned", needs=_LORA),
    ] = None
    max_loras_per_batch: Annotated[
        int,
        "Most adapters in a batch, the bare model included.",
        Flag(within=POSITIVE, state="planned", needs=_LORA),
    ] = 8
    max_loaded_loras: Annotated[
        int | None,
        "Most adapters in host memory; no bound when unset.",
        Flag(within=POSITIVE, state="planned", needs=_LORA),
    ] = None
    lora_backend: Annotated[
        str,
        "Kernels of adapters.",
        Flag(
            choices=("triton", "csgmv", "torch_native"), state="no-op", why="no adapter is served"
        ),
    ] = "triton"
