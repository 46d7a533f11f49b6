"""Load what an engine computes with, on each rank: models, pools, and what changes their tensors.
Every choice of a backend is made here, once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from radixlm.attention.base import AttentionBackend
from radixlm.attention.double_sparsity import load_sparsity
from radixlm.attention.select import make_backend
from radixlm.base.lazy import load
from radixlm.base.record import Record, replace
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.server_config import ServerConfig
from radixlm.cuda_graphs.graphs import NO_GRAPHS, GraphSizes
from radixlm.devices.cuda import CudaDevice
from radixlm.devices.device import Device
from radixlm.distributed.groups import Ranks
from radixlm.engine.adapters import AdapterLoader
from radixlm.engine.draft_model import LoadedDraft, load_draft, tap_for_drafter
from radixlm.engine.drafting import max_drafts
from radixlm.engine.dumps import open_dump
from radixlm.engine.experts import ExpertPlaces
from radixlm.engine.gpu import (
    device_ranks,
    open_device,
    profile_steps,
    sizes_of_graphs,
    why_no_graphs,
)
from radixlm.engine.kept import FIRST_BOOT, Boot, KeptPages, make_kept_pools
from radixlm.engine.kv_scales import with_scaled_cache
from radixlm.engine.limits import limits_for_pools, scheduler_limits, with_sparsity
from radixlm.engine.live_weights import WeightUpdater
from radixlm.engine.load_model import fill, load_model
from radixlm.engine.memory import MemoryNow, Pools, needs_memory, trial_pools
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.occupation import Occupation
from radixlm.engine.packed_weights import PackedWeights, available_bytes
from radixlm.engine.parts import EngineParts, invariant_kernels, make_processors, make_runner
from radixlm.engine.profile import Profiler
from radixlm.engine.ranks import Peers
from radixlm.engine.sharded_save import ShardedSaver
from radixlm.engine.tensor_controls import TensorControls
from radixlm.engine.tiers import EnginePages, make_pages
from radixlm.engine.torch_compile import compiled_steps, for_compiling
from radixlm.engine.weights_check import WeightsChecker
from radixlm.kernels.cpu import describe
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.media.encoder_cache import EncoderCache, NoEncoder
from radixlm.models.build import Model, NativeModel
from radixlm.models.decoder import DecoderModel
from radixlm.models.dump import TensorDump
from radixlm.models.kv_groups import own_kv_heads
from radixlm.sampling.processors import LogitProcessors
from radixlm.scheduler.limits import Limits
from radixlm.weight_updates.tensor_spool import TensorSpool
from radixlm.wire.weights import WeightsSource

if TYPE_CHECKING:  # torch's compiler takes a second to import
    from radixlm.models.compiled import CompiledSteps

log = logging.getLogger(__name__)

# share of a GPU for weights and pools of models whose steps cannot be profiled
UNPROFILED_SHARE = 0.85


class LoadedEngine(Record):
    """What stays when a scheduler is replaced; every rank has one. ``graph_sizes``: steps that
    are recorded."""

    device: Device
    parts: EngineParts
    limits: Limits
    packed: PackedWeights
    graph_sizes: GraphSizes
    controls: TensorControls
    loader: AdapterLoader | None
    facts: dict[str, Any]
    updater: WeightUpdater
    occupation: Occupation
    pages: EnginePages | None = None  # with tiers
    kept: KeptPages | None = None


class _Models(Record):
    """What this rank computes, loaded. ``num_bytes``: of all weights; ``seconds``: to load them,
    from ``started_s`` on."""

    kernels: Kernels
    experts: ExpertPlaces
    packed: PackedWeights
    model: Model
    draft: LoadedDraft | None
    num_bytes: int
    seconds: float
    started_s: float


def _load_models(
    config: ServerConfig, info: ModelInfo, where: torch.device, peers: Peers, boot: Boot
) -> _Models:
    started_s = time.perf_counter()
    overrides = dict(item.split("=", 1) for item in config.execute.kernel or ())
    overrides = invariant_kernels(config, info) | overrides
    kernels = for_compiling(bind(where.type, overrides), config)
    with needs_memory("the weights", "choose a smaller model or --quantization"):
        experts = ExpertPlaces(config.parallel, peers.ranks)
        packed = PackedWeights(config, info, kernels, peers.ranks)
        model, num_bytes = load_model(
            config, info, where, kernels, peers.ranks, experts.place, packed, boot.weights
        )
        experts.finish(model, info, config.execute.enable_return_routed_experts)
        # drafts are rank 0's, which alone samples
        draft = None
        if peers.is_first:
            draft = load_draft(config, info, model, where, kernels, boot.weights)
        else:
            tap_for_drafter(config, info, model)
        num_bytes += draft.num_bytes if draft else 0
    seconds = time.perf_counter() - started_s
    return _Models(kernels, experts, packed, model, draft, num_bytes, seconds, started_s)


class _Steps(Record):
    """How the models' steps run, and the memory that they use. ``graph_sizes`` as above."""

    attn: AttentionBackend
    compiled: CompiledSteps | None
    graph_sizes: GraphSizes
    dump: TensorDump | None
    pools: Pools
    kept: KeptPages | None


def _make_steps(
    config: ServerConfig,
    info: ModelInfo,
    loaded: _Models,
    device: Device,
    free_bytes: int,
    peers: Peers,
    boot: Boot,
) -> _Steps:
    model, draft = loaded.model, loaded.draft
    attn = _attention(config, info, model, loaded.kernels, device.where)
    dump = open_dump(config.execute, model, peers.ranks.place.rank)
    sizes, compiled = (NO_GRAPHS, None) if dump else (
        _graph_sizes(config, info, model, attn, loaded.kernels), compiled_steps(config, model, attn)
    )  # fmt: skip
    among_ranks = config.parallel.world_size > 1  # of which rank 0 alone has the draft model
    drafts = draft is not None or (among_ranks and config.speculate.speculative_algorithm)
    if drafts:  # it reads the hidden states of all tokens of a prompt
        sizes = replace(sizes, prompts=())
    memory = MemoryNow(free_bytes, loaded.num_bytes)
    if isinstance(device, CudaDevice):
        models = (model, compiled)
        memory = _measure_memory(
            config, info, models, attn, device, free_bytes, sizes, draft, peers.ranks
        )
    if isinstance(model, DecoderModel) and model.pipeline is not None:
        model.pipeline.confirms = config.memory.warm_restart
    with needs_memory("the KV cache", "lower --max-total-tokens or --mem-fraction-static"):
        pools, kept = make_kept_pools(config, info, model, attn, memory, draft, peers, boot)
    return _Steps(attn, compiled, sizes, dump, pools, kept)


def load_engine(
    config: ServerConfig,
    info: ModelInfo,
    peers: Peers,
    commands: Mapping[str, Any],
    boot: Boot = FIRST_BOOT,
) -> LoadedEngine:
    """Load the model and make its pools; ConfigError or CheckpointError if that fails.
    ``commands``: operators' commands besides those that concern tensors."""
    device = open_device(config, peers.ranks.place.rank)
    where = device.where
    peers.ranks = device_ranks(config, peers.ranks, device)
    _set_threads(config, info)
    info = with_scaled_cache(config, info, peers.ranks.place)
    free_bytes = available_on(device, config.parallel.num_processes)
    copies: list[TensorSpool] = []
    if boot.weights is not None:
        weights, copies = peers.bring(boot.weights, info.folder)
        boot = replace(boot, weights=weights)
    loaded = _load_models(config, info, where, peers, boot)
    steps = _make_steps(config, info, loaded, device, free_bytes, peers, boot)
    model, draft, attn, pools = loaded.model, loaded.draft, steps.attn, steps.pools
    updater = WeightUpdater(config, info, model, peers, boot.weights, copies)
    loader = AdapterLoader(config, model, where, peers) if config.adapters.enable_lora else None
    profiler = Profiler(where, peers.ranks.place.rank, boot.replica)
    waited_s, sizes = peers.take_waited_s, (pools.num_bytes, pools.num_tokens, free_bytes)
    controls = TensorControls(
        updater.read, loaded.num_bytes, *sizes, profiler, waited_s, pools.num_window_tokens
    )
    limits = with_sparsity(limits_for_pools(pools, config, info), attn.sparsity)
    again = partial(_fill_again, model, config, info, where, loaded.packed)
    occupation = Occupation(config, model, again, updater.later, attn, pools, draft, device)
    controls.note_pools(occupation.resident_pool_bytes)
    if steps.kept is not None:
        controls.note_kept(steps.kept.count_pending)
    is_restart = boot.number > 0
    pages = make_pages(config, info, model, attn.pools, pools, draft, peers, is_restart)
    parts = EngineParts(
        model, attn, pools,
        {
            **controls.commands(),
            **updater.commands(),
            **WeightsChecker(updater).commands(),
            **ShardedSaver(model, updater, _has_encoder(config, info)).commands(),
            **commands,
            **(loader.commands() if loader else {}),
            **loaded.experts.commands(),
            **(pages.worker.commands() if pages else {}),
            **occupation.commands(),
        },
        make_processors(config, info), _media(config, info, where, boot.weights), profiler,
        steps.compiled, loader.table if loader else None, draft, loaded.experts.choices,
        steps.dump, peers.ranks,
    )  # fmt: skip
    facts = _facts(info, pools, limits, loaded)
    facts["gpu"] = torch.cuda.get_device_name(where) if where.type == "cuda" else None
    encoder = parts.media if _has_encoder(config, info) else None
    updater.follow(facts, draft, loader, encoder, occupation.exchange)
    return LoadedEngine(
        device, parts, limits, loaded.packed, steps.graph_sizes, controls, loader, facts, updater,
        occupation, pages, steps.kept,
    )  # fmt: skip


def _fill_again(
    model: Model,
    config: ServerConfig,
    info: ModelInfo,
    where: torch.device,
    packed: PackedWeights,
    source: WeightsSource | None,
) -> None:
    """Load the weights that were served last; of a checkpoint from its packed file, if written, or
    through one where they do not fit into memory."""
    own = packed if packed.is_large or packed.path.is_file() else None
    fill(model, config, info, where, own, source)


def _attention(
    config: ServerConfig,
    info: ModelInfo,
    model: Model,
    kernels: Kernels,
    device: torch.device,
) -> AttentionBackend:
    execute = config.execute
    phases = (execute.prefill_attention_backend, execute.decode_attention_backend)
    name = execute.attention_backend or "torch_native"
    context = model.context if isinstance(model, NativeModel) else None
    sparsity = load_sparsity(execute, model.kv_groups, own_kv_heads(info.decoder, context))
    is_invariant = execute.enable_deterministic_inference
    return make_backend(name, model.kv_groups, kernels, device, *phases, sparsity, is_invariant)


def _facts(info: ModelInfo, pools: Pools, limits: Limits, loaded: _Models) -> dict[str, Any]:
    """What intake is told when the engine is ready; logged too."""
    log.info(
        "%s: weights %s%s in %s; KV cache of %d tokens (%s reserved, %s); %d thread%s",
        info.architecture,
        format_bytes(loaded.num_bytes),
        " mapped" if loaded.packed.mapped_bytes else "",
        format_seconds(loaded.seconds),
        pools.num_tokens,
        format_bytes(pools.num_bytes),
        str(pools.dtype).removeprefix("torch."),
        num_threads := torch.get_num_threads(),
        "s" * (num_threads != 1),
    )
    if limits.context_len < info.context_len:
        log.info(
            "requests of more than %d tokens are refused: the model reads %d, the KV cache has no "
            "room for them; more with a larger --max-total-tokens or --mem-fraction-static, or a "
            "smaller --kv-cache-dtype",
            limits.context_len, info.context_len,
        )  # fmt: skip
    return {
        "max_total_num_tokens": pools.num_tokens,
        "kv_page_size": pools.page_size,  # that of the pool, where --page-size is smaller
        "max_req_input_len": limits.context_len - 1,
        "context_len": limits.context_len,
        "max_running": limits.max_running,
        "weight_bytes": loaded.num_bytes,
        "kv_bytes": pools.num_bytes,
        "load_seconds": loaded.seconds,
        "engine_seconds": time.perf_counter() - loaded.started_s,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "kernels": describe(),
    }


def _has_encoder(config: ServerConfig, info: ModelInfo) -> bool:
    return info.is_multimodal and config.media.enable_multimodal is not False


def _media(
    config: ServerConfig, info: ModelInfo, device: torch.device, source: WeightsSource | None
) -> EncoderCache:
    """The multimodal encoder, if the model has one and it is enabled; of ``source``, if that takes
    the place of the checkpoint."""
    if not _has_encoder(config, info):
        return EncoderCache(NoEncoder())
    if source is not None:
        info = replace(info, folder=Path(source.folder))
    return cast(EncoderCache, load("radixlm.engine.mm_encoders:encoder_cache")(info, device))


def _set_threads(config: ServerConfig, info: ModelInfo) -> None:
    """Apply --cpu-threads and --random-seed."""
    threads = config.execute.cpu_threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    if config.execute.random_seed is not None:
        torch.manual_seed(config.execute.random_seed)


def available_on(device: Device, num_processes: int = 1) -> int:
    """What this process may take: the processes of a host share its memory, but no GPU."""
    if isinstance(device, CudaDevice):
        return device.free_bytes()
    return available_bytes() // num_processes


def _graph_sizes(
    config: ServerConfig, info: ModelInfo, model: Model, attn: AttentionBackend, kernels: Kernels
) -> GraphSizes:
    """Steps that are recorded as CUDA graphs."""
    if config.execute.device != "cuda" or not model.kv_groups:
        return NO_GRAPHS
    reason = why_no_graphs(config, model, attn, kernels)
    if reason:
        log.info("no CUDA graphs: %s", reason)
        return NO_GRAPHS
    limits = scheduler_limits(config, info, info.context_len, 1)
    has_adapters = config.adapters.enable_lora and kernels.records_adapters
    return sizes_of_graphs(config, limits, attn, has_adapters)


def _measure_memory(
    config: ServerConfig,
    info: ModelInfo,
    models: tuple[Model, CompiledSteps | None],
    attn: AttentionBackend,
    device: CudaDevice,
    free_bytes: int,
    sizes: GraphSizes,
    draft: LoadedDraft | None,
    ranks: Ranks,
) -> MemoryNow:
    """The memory of a GPU after the weights are loaded, and what the largest steps need of it."""
    model, steps = models
    device.empty_cache()
    weight_bytes = free_bytes - device.free_bytes()
    if config.memory.mem_fraction_static is not None:
        return MemoryNow(free_bytes, weight_bytes)
    if not can_profile(info, model):
        return MemoryNow(free_bytes, weight_bytes, int(free_bytes * (1 - UNPROFILED_SHARE)))
    pools = trial_pools(config, info, model, attn, draft)
    limits = scheduler_limits(config, info, info.context_len, pools.page_size)
    limits = replace(limits, max_drafts=max_drafts(config, limits.depth, info.decoder))
    processors = LogitProcessors()
    parts = EngineParts(model, attn, pools, {}, processors, None, None, steps, ranks=ranks)
    make = partial(make_runner, config, info, parts, device, limits)
    needed = profile_steps(device, make, limits, sizes).needed(device.total_bytes())
    return MemoryNow(free_bytes, weight_bytes, needed)


def can_profile(info: ModelInfo, model: Model) -> bool:
    """Whether steps can run before the pools are made; recurrent states have no unused page."""
    has_states = any(block.state for block in info.decoder.blocks)
    return bool(model.kv_groups) and info.decoder.encoder is None and not has_states
