"""Load the model: build it from its description and fill it with the checkpoint's weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from radixlm.arch.names import layers_left_out
from radixlm.arch.quant_methods import FP4
from radixlm.base.deferred import TORCH_SHAPES, run_deferred
from radixlm.base.errors import ConfigError
from radixlm.base.heap import trim_heap
from radixlm.base.lazy import load
from radixlm.base.record import replace
from radixlm.base.units import format_seconds
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.attention_groups import AttentionGroups
from radixlm.distributed.groups import ALONE, Ranks
from radixlm.engine.draft_model import shares_head
from radixlm.engine.located import load_options
from radixlm.engine.model_info import ModelInfo, config_overrides
from radixlm.engine.offload import offloading
from radixlm.engine.packed_weights import PackedWeights
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.module import noting_contents
from radixlm.layers.moe import MoeLayer
from radixlm.models.build import Model, NativeModel, build_model
from radixlm.models.dtype import resolve_dtypes
from radixlm.quant.checkpoint import StoredQuant, checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.quant.scheme import Scheme
from radixlm.weights.dummy import checkpoint_dtype
from radixlm.weights.folder import REMOTE
from radixlm.weights.load import LoadReport, load_weights
from radixlm.weights.options import DEFAULT
from radixlm.weights.packed_file import PackedFileError
from radixlm.wire.weights import WeightsSource

if TYPE_CHECKING:
    from radixlm.models.transformers_backend.model import TransformersModel

log = logging.getLogger(__name__)


def load_model(
    config: ServerConfig,
    info: ModelInfo,
    device: torch.device,
    kernels: Kernels,
    ranks: Ranks = ALONE,
    place_experts: Callable[[Sequence[MoeLayer], Ranks], None] | None = None,
    packed: PackedWeights | None = None,
    source: WeightsSource | None = None,
) -> tuple[Model, int]:
    """The model with its weights, and the bytes that they take; one rank's part of ``ranks``.
    ``packed``: from where they are mapped, or where they are kept; ``source``: weights that take
    the place of the checkpoint's, which are not kept."""
    _check_files(config, info, ranks)
    dtype = config.model.dtype
    compute, weight = resolve_dtypes(dtype, device, checkpoint_dtype(info.folder))
    if info.is_transformers:
        _check_ranks(info, ranks)
        if config.model.enable_fp32_lm_head:
            raise ConfigError(
                f"--enable-fp32-lm-head: {info.architecture} runs by transformers; leave it out, "
                "or use --dtype float32"
            )
        return _load_transformers(config, info, device, weight, kernels, ranks)
    quant = checkpoint_quant(info.folder)
    if device.type != "cpu" and quant is None and config.model.quantization in FP4:
        raise ConfigError(
            f"--quantization {config.model.quantization} quantizes floats on a CPU only; int4wo-32 "
            "works on a GPU"
        )
    model = build_model(
        info.decoder,
        device,
        compute,
        kernels,
        weight_dtype=weight,
        merge_windows=config.memory.disable_hybrid_swa_memory,
        scheme=_scheme(config, quant),
        ranks=ranks,
        splits_head=config.parallel.enable_dp_lm_head,
        place_experts=place_experts,
        moe_dense_tp=config.parallel.moe_dense_tp_size,
        cuts_output_head=not shares_head(config),
        cuts_kv_heads=not config.execute.enable_double_sparsity,  # its queries choose together
    )
    with offloading(config, model), noting_contents(model):
        report = fill(model, config, info, device, packed, source)
    if left_out := layers_left_out(report.ignored, info.decoder):
        log.warning(
            "the checkpoint has layers %s, config.json only %d (num_hidden_layers): the model "
            "runs without them",
            ", ".join(map(str, left_out)),
            len(info.decoder.blocks),
        )
    return model, report.num_bytes


def _check_files(config: ServerConfig, info: ModelInfo, ranks: Ranks) -> None:
    """--model-checksum, of the first rank of each node."""
    model, parallel = config.model, config.parallel
    ranks_of_node = max(1, parallel.world_size // parallel.nnodes)
    if model.model_checksum is None or ranks.place.rank % ranks_of_node:
        return
    started = time.monotonic()
    check: Callable[..., int] = load("radixlm.hub.checksums:check_files")
    num = check(info.folder, model.model_checksum, model.model_path, model.revision)
    log.info("%d files of %s have their checksums, in %s",
             num, info.folder, format_seconds(time.monotonic() - started))  # fmt: skip


def _scheme(config: ServerConfig, stored: StoredQuant | None) -> Scheme:
    c = config.model
    scheme = make_scheme(c.quantization, c.torchao_config, stored, c.load_format)
    if c.enable_fp32_lm_head:
        scheme.head_fmt, scheme.head_storage = "", "float32"
    return scheme


def _check_ranks(info: ModelInfo, ranks: Ranks) -> None:
    """ConfigError where a model that runs by transformers cannot be cut as asked."""
    if ranks.place.pp > 1:
        raise ConfigError(
            f"--pp-size: {info.architecture} runs by transformers, which computes all layers in "
            "one call and loads them in each process, so that stages save nothing; use --pp-size 1"
        )
    if ranks.attn.size > 1:
        log.warning("--tp-size gains nothing here: each rank has the whole transformers model")


def fill(
    model: Model,
    config: ServerConfig,
    info: ModelInfo,
    device: torch.device,
    packed: PackedWeights | None,
    source: WeightsSource | None,
) -> LoadReport:
    """Load the weights of a native model that has none: those of ``source``, or of its checkpoint,
    which ``packed`` may hold."""
    assert isinstance(model, NativeModel)
    packed = packed if source is None and packed and packed.is_on else None
    report = packed.load(model) if packed else None
    if report is None:
        source = source or WeightsSource(str(info.folder), config.model.load_format)
        options = load_options(config) if source.folder == str(info.folder) else DEFAULT
        read = partial(
            load_weights, model, source.folder, source.load_format, device=device,
            deltas=tuple(map(Path, source.deltas)),
            options=replace(options, rank=model.context.ranks.place.tp_rank),
        )  # fmt: skip
        recorder = packed.recorder() if packed and packed.is_on else None
        try:
            report = read(recorder=recorder)
        except (PackedFileError, OSError) as error:
            if packed is None or not packed.gives_up(error):
                raise
            report, recorder = read(), None
        if packed and recorder:
            report = packed.keep(model, report)
        if source.load_format == "dummy":  # numbers were drawn on the heap, not mapped from files
            trim_heap()
    return report


def _load_transformers(
    config: ServerConfig,
    info: ModelInfo,
    device: torch.device,
    weight: torch.dtype | None,
    kernels: Kernels,
    ranks: Ranks,
) -> tuple[Model, int]:
    """A model that runs by transformers; ConfigError for options that need a native model."""
    if config.model.quantized_as or info.decoder.pool is not None:
        raise ConfigError(
            "--quantization and --is-embedding need a native model: "
            f"{info.architecture} runs by transformers"
        )
    if config.model.load_format in ("dummy", *REMOTE):
        raise ConfigError(
            f"--load-format {config.model.load_format} needs a native model: "
            f"{info.architecture} runs by transformers; --download-dir FOLDER fetches its weights"
        )
    run_deferred(TORCH_SHAPES)  # it makes models without numbers
    make = load(
        "radixlm.models.transformers_backend.model:TransformersModel"
    )  # its imports take a while
    model: TransformersModel = make(
        info.folder, info.decoder, device, weight or "auto", kernels, config_overrides(config)
    )
    if ranks.place.attn_tp < ranks.place.tp:
        model.attention_groups = AttentionGroups(ranks, splits_head=True)
    log.info("%s runs by transformers on the paged cache", info.architecture)
    return model, model.num_bytes
