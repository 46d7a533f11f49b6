"""Build one replica: model, pools, executor, kv_manager, features, scheduler. All choices are made
here, once; nothing below asks for a backend again."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
from torch import Tensor

from radixlm.arch.names import layers_left_out
from radixlm.arch.spec import Rope
from radixlm.attention.base import AttentionBackend
from radixlm.attention.select import make_backend
from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest
from radixlm.base.lazy import load
from radixlm.base.record import Record, replace
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.server_config import ServerConfig
from radixlm.engine.allocation import needs_memory
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.engine.features.processors import ProcessorFeature
from radixlm.engine.gpu import (
    open_device,
    record_graphs,
    sizes_of,
    try_steps,
    warm_up,
    why_no_graphs,
)
from radixlm.engine.logit_processors import processor_targets
from radixlm.engine.memory import MemoryNow, Pools, make_pools, trial_pools
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.torch_compile import compile_now, compiled_steps, for_compiling
from radixlm.executor.capacity import STATES_A_REQUEST
from radixlm.executor.controls import TensorControls
from radixlm.executor.device import CudaDevice, Device
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.media import EncoderCache
from radixlm.executor.media_embeddings import ImageVectors, VectorPooler
from radixlm.executor.pooling import Pooler
from radixlm.executor.profile import Profiler
from radixlm.executor.runner import Model as StepModel
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import PrefixCache
from radixlm.memory.prefix.chunk import ChunkCache
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup, WindowTable
from radixlm.memory.slots import SlotAllocator
from radixlm.models.build import Model, build_model, head_of, is_transformers
from radixlm.models.dtype import resolve_dtypes
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.sampling.processors import LogitProcessors, ServerFacts
from radixlm.sampling.table import SamplingTable
from radixlm.scheduler.hooks import Feature, Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager, WindowPages
from radixlm.scheduler.limits import Limits, RopeLengths
from radixlm.scheduler.loop import Scheduler
from radixlm.text.tokenizer import Tokenizer, load_tokenizer
from radixlm.weights.dummy import checkpoint_dtype
from radixlm.weights.folder import open_folder
from radixlm.weights.load import load_weights
from radixlm.wire.channel import Channel

if TYPE_CHECKING:
    from radixlm.models.transformers_backend.model import TransformersModel

log = logging.getLogger(__name__)

# share of a running request's remaining output for which admission keeps room, at
# --schedule-conservativeness 1
BASE_RESERVE = 0.4
# share of a GPU for weights and pools where steps cannot be tried before the pools are made
UNTRIED_SHARE = 0.85


class EngineCore(Record):
    """One assembled engine. ``facts`` go to intake when it is ready; ``renew`` makes another
    scheduler around the same model and pools, which knows of no request."""

    scheduler: Scheduler
    facts: dict[str, Any]
    renew: Callable[[], Scheduler]


def assemble(
    config: ServerConfig,
    info: ModelInfo,
    channel: Channel,
    extra_features: tuple[Feature, ...] = (),
) -> EngineCore:
    """Load the model and connect everything. ConfigError or CheckpointError if that fails."""
    began_s = time.perf_counter()
    opened = open_device(config)
    device = opened.where
    _set_threads(config, info)
    free_bytes = _free_bytes(opened) // config.parallel.dp_size
    overrides = dict(item.split("=", 1) for item in config.execute.kernel or ())
    kernels = for_compiling(bind(device.type, overrides), config)
    with needs_memory("the weights", "choose a smaller model or --quantization"):
        model, weight_bytes = _load(config, info, device, kernels)
    loaded_s = time.perf_counter()
    attn = _attention(config, model, kernels, device)
    sizes = _graph_sizes(config, info, model, attn, kernels)
    steps = compiled_steps(config, model, attn)
    memory = MemoryNow(free_bytes, weight_bytes)
    if isinstance(opened, CudaDevice):
        memory = _tried(config, info, (model, steps), attn, opened, free_bytes, sizes)
    with needs_memory("the KV cache", "lower --max-total-tokens or --mem-fraction-static"):
        pools = make_pools(config, info, model, attn, memory)
    limits = _limits_with(pools, config, info)
    weight = partial(_weight, model, info.folder, config.model.load_format)
    profiler = Profiler(device)
    controls = TensorControls(weight, weight_bytes, pools.num_bytes, pools.num_tokens, profiler)
    processors, media = _processors(config, info), _media(config, info, device)
    hooks = Hooks((*_features(config, info), ProcessorFeature(processors), *extra_features))

    def make() -> Scheduler:
        commands = controls.commands()
        parts = EngineParts(model, attn, pools, commands, processors, media, profiler, steps)
        if steps is not None:
            compile_now(steps, partial(_runner, config, info, parts, opened), limits)
        if isinstance(opened, CudaDevice) and _is_tried(info, model):
            warm_up(partial(_runner, config, info, parts, opened, limits), limits)
        runner = _runner(config, info, parts, opened, limits)
        if sizes:
            free = _free_bytes(opened)
            with profiler.of_graphs(config.execute.enable_profile_cuda_graph):
                record_graphs(runner, sizes, not config.execute.disable_cuda_graph_padding)
            controls.note_graphs(free - _free_bytes(opened))
        kv_manager = _make_kv_manager(config, pools, limits)
        interval = config.schedule.stream_interval
        return Scheduler(limits, runner, channel, kv_manager, hooks, stream_interval=interval)

    return EngineCore(make(), _facts(info, pools, limits, weight_bytes, loaded_s - began_s), make)


def _attention(
    config: ServerConfig, model: Model, kernels: Kernels, device: torch.device
) -> AttentionBackend:
    execute = config.execute
    phases = (execute.prefill_attention_backend, execute.decode_attention_backend)
    name = execute.attention_backend or "torch_native"
    return make_backend(name, model.kv_groups, kernels, device, *phases)


def _facts(
    info: ModelInfo, pools: Pools, limits: Limits, weight_bytes: int, load_s: float
) -> dict[str, Any]:
    """What intake hears of a ready engine; said in the log too."""
    log.info(
        "%s: weights %s in %s; KV cache of %d tokens (%s, %s); %d threads",
        info.architecture,
        format_bytes(weight_bytes),
        format_seconds(load_s),
        pools.num_tokens,
        format_bytes(pools.num_bytes),
        str(pools.dtype).removeprefix("torch."),
        torch.get_num_threads(),
    )
    return {
        "max_total_num_tokens": pools.num_tokens,
        "max_req_input_len": limits.context_len - 1,
        "context_len": limits.context_len,
        "weight_bytes": weight_bytes,
        "kv_bytes": pools.num_bytes,
        "page_size": pools.page_size,
        "load_seconds": load_s,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }


def _media(config: ServerConfig, info: ModelInfo, device: torch.device) -> EncoderCache | None:
    """The encoders, unless there are none or none are wanted."""
    if not info.is_multimodal or config.media.enable_multimodal is False:
        return None
    return cast(EncoderCache, load("radixlm.engine.mm_encoders:encoder_cache")(info, device))


def _make_kv_manager(config: ServerConfig, pools: Pools, limits: Limits) -> KVCacheManager:
    page_size = pools.page_size
    allocator = PageAllocator(pools.sizes.num_full + 1, page_size)
    books = None
    if pools.window_tokens:
        table = WindowTable(pools.window_tokens, page_size)
        second = PageAllocator(pools.sizes.num_window + 1, page_size)
        books = WindowPages(second, table, pools.states is not None)
    cache = _cache(config, allocator, page_size, books, limits.is_encoder)
    return KVCacheManager(allocator, SlotAllocator(limits.max_running), cache, page_size, books)


def _set_threads(config: ServerConfig, info: ModelInfo) -> None:
    """--cpu-threads; a small model gains nothing from more than one, and loses when cores are
    busy with other work."""
    threads = config.execute.cpu_threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    if config.execute.random_seed is not None:
        torch.manual_seed(config.execute.random_seed)


def _free_bytes(device: Device) -> int:
    if isinstance(device, CudaDevice):
        return device.free_bytes()
    return int(psutil.virtual_memory().available)


def _graph_sizes(
    config: ServerConfig, info: ModelInfo, model: Model, attn: AttentionBackend, kernels: Kernels
) -> tuple[int, ...]:
    """Batch sizes whose decode steps are recorded as graphs."""
    if config.execute.device != "cuda" or not model.kv_groups:
        return ()
    reason = why_no_graphs(config, model, attn, kernels)
    if reason:
        log.info("no CUDA graphs: %s", reason)
        return ()
    return sizes_of(config, _limits(config, info, info.context_len, 1))


def _tried(
    config: ServerConfig,
    info: ModelInfo,
    models: tuple[Model, StepModel | None],
    attn: AttentionBackend,
    device: CudaDevice,
    free_bytes: int,
    sizes: tuple[int, ...],
) -> MemoryNow:
    """The memory as it is with the weights on a GPU, and what the largest steps take of it."""
    model, steps = models
    device.empty_cache()
    weight_bytes = free_bytes - device.free_bytes()
    if config.memory.mem_fraction_static is not None:
        return MemoryNow(free_bytes, weight_bytes)
    if not _is_tried(info, model):
        return MemoryNow(free_bytes, weight_bytes, int(free_bytes * (1 - UNTRIED_SHARE)))
    limits = _limits(config, info, info.context_len, config.memory.page_size or 1)
    pools = trial_pools(config, info, model, attn)
    processors = LogitProcessors()
    parts = EngineParts(model, attn, pools, {}, processors, None, None, steps)
    make = partial(_runner, config, info, parts, device, limits)
    needed = try_steps(device, make, limits, sizes).needed(device.total_bytes())
    return MemoryNow(free_bytes, weight_bytes, needed)


def _is_tried(info: ModelInfo, model: Model) -> bool:
    """Whether steps can be tried: states of recurrent layers have no page that is nobody's."""
    has_states = any(block.state for block in info.decoder.blocks)
    return bool(model.kv_groups) and info.decoder.encoder is None and not has_states


def _load(
    config: ServerConfig, info: ModelInfo, device: torch.device, kernels: Kernels
) -> tuple[Model, int]:
    dtype = config.model.dtype
    compute, weight = resolve_dtypes(dtype, device, checkpoint_dtype(info.folder))
    if info.is_transformers:
        return _foreign(config, info, device, weight, kernels)
    model = build_model(
        info.decoder,
        device,
        compute,
        kernels,
        weight_dtype=weight,
        merge_windows=config.memory.disable_hybrid_swa_memory,
        scheme=make_scheme(
            config.model.quantization, config.model.torchao_config, checkpoint_quant(info.folder)
        ),
    )
    report = load_weights(model, info.folder, config.model.load_format, device=device)
    if left_out := layers_left_out(report.ignored, info.decoder):
        log.warning(
            "the checkpoint has layers %s, config.json only %d (num_hidden_layers): the model "
            "runs without them",
            ", ".join(map(str, left_out)),
            len(info.decoder.blocks),
        )
    return model, report.num_bytes


def _foreign(
    config: ServerConfig,
    info: ModelInfo,
    device: torch.device,
    weight: torch.dtype | None,
    kernels: Kernels,
) -> tuple[Model, int]:
    """The model of transformers; ConfigError for what only our own can."""
    if config.model.quantization or config.model.torchao_config or info.decoder.pool is not None:
        raise ConfigError(
            "--quantization and --is-embedding need a model of ours: "
            f"{info.architecture} runs by transformers"
        )
    if config.model.load_format == "dummy":
        raise ConfigError("--load-format dummy needs a model of ours")
    make = load(
        "radixlm.models.transformers_backend.model:TransformersModel"
    )  # its imports take a while
    model: TransformersModel = make(info.folder, info.decoder, device, weight or "auto", kernels)
    log.info("%s runs by transformers on the paged cache", info.architecture)
    return model, model.num_bytes


def _limits_with(pools: Pools, config: ServerConfig, info: ModelInfo) -> Limits:
    """The limits, with no more requests than there are states for."""
    limits = _limits(config, info, pools.num_tokens, pools.page_size)
    if pools.states is None:
        return limits
    most = max(1, pools.sizes.num_window // STATES_A_REQUEST)
    return replace(limits, max_running=min(limits.max_running, most))


def _limits(config: ServerConfig, info: ModelInfo, tokens: int, page_size: int) -> Limits:
    schedule = config.schedule
    chunk = schedule.chunked_prefill_size or 2048
    is_encoder = info.decoder.encoder is not None
    whole = chunk < 0 or is_encoder
    most = schedule.max_prefill_tokens if chunk < 0 else chunk
    return Limits(
        max_running=schedule.max_running_requests or 64,
        max_queued=schedule.max_queued_requests,
        step_tokens=max(most, info.context_len) if whole else chunk,
        max_prefill_tokens=max(schedule.max_prefill_tokens, info.context_len if whole else 1),
        context_len=min(info.context_len, tokens),
        page_size=page_size,
        depth=_depth(config, info),
        admit_every=schedule.num_continuous_decode_steps,
        reserve=BASE_RESERVE * schedule.schedule_conservativeness,
        policy="fcfs" if schedule.schedule_policy == "priority" else schedule.schedule_policy,
        priorities=schedule.enable_priority_scheduling,
        low_values_first=schedule.schedule_low_priority_values_first,
        preemption_threshold=schedule.priority_scheduling_preemption_threshold,
        fair=config.schedule.fair_share is not None,
        chunked=not whole,
        is_encoder=is_encoder,
        eos_ids=info.eos_ids,
        vocab=info.decoder.vocab,
        rope=rope_lengths(info.ropes),
        log_interval=config.observe.decode_log_interval or 0,
    )


def _depth(config: ServerConfig, info: ModelInfo) -> int:
    """Steps that are launched ahead. A CPU has computed a step when its launch returns; the rows of
    recurrent layers are not tried ahead."""
    has_states = any(block.state is not None for block in info.decoder.blocks)
    is_ahead = config.execute.device == "cuda" and not has_states
    return int(is_ahead and not config.schedule.disable_overlap_schedule)


def rope_lengths(ropes: tuple[Rope, ...]) -> RopeLengths | None:
    """How cached KV depends on the length of its prompt, if the model's ropes depend on it."""
    for rope in ropes:
        if rope.depends_on_length and rope.scaling is not None:
            params = dict(rope.scaling.params)
            original = params.get("original_max_position_embeddings")
            original = original or params.get("max_position_embeddings")
            if isinstance(original, int | float):
                return RopeLengths(int(original), rope.scaling.kind == "dynamic")
    return None


def _cache(
    config: ServerConfig,
    allocator: PageAllocator,
    page_size: int,
    books: WindowPages | None,
    is_encoder: bool,
) -> PrefixCache:
    if config.memory.disable_radix_cache or is_encoder:
        return ChunkCache(page_size, is_hybrid=books is not None)
    window = WindowGroup(books.pages, books.table.window_tokens) if books is not None else None
    eviction = config.memory.radix_eviction_policy
    return RadixCache(allocator, page_size, eviction, window=window)


class EngineParts(Record):
    """What outlives a scheduler: its successor's runner has the same."""

    model: Model
    attn: AttentionBackend
    pools: Pools
    commands: Mapping[str, Any]
    processors: LogitProcessors
    media: EncoderCache | None
    profiler: Profiler | None
    steps: StepModel | None = None  # what runs the model's steps, if not the model


def _weight(model: Model, folder: Path, load_format: str, name: str) -> Tensor | None:
    """A parameter as the checkpoint has it: ours is packed for the kernels."""
    if is_transformers(model):
        return model.weight(name)
    if load_format in ("dummy", "sharded_state"):
        raise InvalidRequest(f"name: --load-format {load_format} has no named tensors to show")
    source = open_folder(folder, load_format)
    return source.read(name).clone() if name in source.sizes() else None


def _runner(
    config: ServerConfig, info: ModelInfo, parts: EngineParts, device: Device, limits: Limits
) -> Runner:
    model, pools, num_slots = parts.model, parts.pools, limits.max_running
    has_windows = pools.window_tokens > 0
    max_pages = -(-limits.context_len // limits.page_size) + 1
    spaces = tuple(int(has_windows and g.name == "window") for g in model.kv_groups)
    where, is_shared = device.where, device.is_synchronous
    tables = DeviceTables(num_slots, max_pages, 1 + has_windows, where, is_shared)
    sampling = SamplingTable(num_slots, info.decoder.vocab, where)
    detects = is_shared or config.execute.enable_nan_detection
    runner_parts = RunnerParts(
        parts.steps or model,
        parts.attn,
        tables,
        sampling,
        device,
        parts.processors,
        _pooler(model, parts.media),
        parts.media,
        pools.states,
        parts.commands,
    )
    options = RunnerOptions(
        limits.page_size,
        spaces,
        info.eos_ids,
        limits.step_tokens,
        detect_bad=detects,
        profiler=parts.profiler,
    )
    return Runner(runner_parts, options)


def _pooler(model: Model, media: EncoderCache | None) -> Pooler:
    head = head_of(model)
    return VectorPooler(head, media) if isinstance(media, ImageVectors) else Pooler(head)


def _features(config: ServerConfig, info: ModelInfo) -> tuple[Feature, ...]:
    """The order in which features speak."""
    builders: tuple[Callable[[], Feature | None], ...] = (lambda: _grammar(config, info),)
    return tuple(feature for build in builders if (feature := build()) is not None)


def _grammar(config: ServerConfig, info: ModelInfo) -> Feature | None:
    tokenizer = _tokenizer_loader(config, info)
    if tokenizer is None or config.grammar.grammar_backend == "none":
        return None
    vocab, overlaps = info.decoder.vocab, _depth(config, info) == 0
    return GrammarFeature(config.grammar, tokenizer, vocab, info.eos_ids, overlaps)


def _processors(config: ServerConfig, info: ModelInfo) -> LogitProcessors:
    loader = _tokenizer_loader(config, info)
    facts = ServerFacts(info.decoder.vocab, info.eos_ids, loader)
    return LogitProcessors(processor_targets(config.grammar), facts)


def _tokenizer_loader(config: ServerConfig, info: ModelInfo) -> Callable[[], Tokenizer] | None:
    """Loads the tokenizer in the engine, for what needs it there; None without a tokenizer."""
    if config.model.skip_tokenizer_init:
        return None
    folder = config.model.tokenizer_path
    same = folder in (None, config.model.model_path)
    path = info.folder if same else str(folder)
    return partial(_load_once, path, config.model.tokenizer_mode)


@lru_cache(maxsize=1)
def _load_once(path: str | Path, mode: str) -> Tokenizer:
    try:
        return load_tokenizer(path, mode)
    except (OSError, ValueError) as error:  # its folder has changed since the start
        raise CheckpointError(f"no tokenizer can be read from {path}: {error}") from error
