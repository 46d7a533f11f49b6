"""Build one replica: model, pools, executor, ledger, features, scheduler. All choices are made
here, once; nothing below asks for a backend again."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from radixlm.arch.spec import Rope
from radixlm.attention.base import AttentionBackend
from radixlm.attention.select import make_backend
from radixlm.base.errors import ConfigError
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.root import ServerConfig
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.engine.modelinfo import ModelInfo
from radixlm.executor.capacity import MemoryFacts, num_pages
from radixlm.executor.controls import TensorControls
from radixlm.executor.runner import Runner
from radixlm.executor.tables import SlotTables
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import PrefixCache
from radixlm.memory.prefix.chunk import ChunkCache
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.models.build import Model, build_model
from radixlm.models.dtype import resolve_dtypes
from radixlm.sampling.tensors import SamplingTable
from radixlm.scheduler.hooks import Feature, Hooks
from radixlm.scheduler.ledger import KvLedger
from radixlm.scheduler.limits import Limits, RopeLengths
from radixlm.scheduler.loop import Scheduler
from radixlm.text.tokenizer import load_tokenizer
from radixlm.weights.dummy import checkpoint_dtype
from radixlm.weights.load import load_weights
from radixlm.wire.channel import Channel

log = logging.getLogger(__name__)

# share of a running request's remaining output for which admission keeps room, at
# --schedule-conservativeness 1
BASE_RESERVE = 0.4


@dataclass(frozen=True, slots=True)
class Replica:
    """One assembled engine. ``facts`` go to intake when it is ready."""

    scheduler: Scheduler
    facts: dict[str, Any]


def assemble(
    config: ServerConfig,
    info: ModelInfo,
    channel: Channel,
    extra_features: tuple[Feature, ...] = (),
) -> Replica:
    """Load the model and connect everything. ConfigError or CheckpointError if that fails."""
    began_s = time.perf_counter()
    device = torch.device(config.execute.device or "cpu")
    _set_threads(config, info)
    free_bytes = _free_bytes(device)
    overrides = dict(item.split("=", 1) for item in config.execute.kernel or ())
    kernels = bind(device.type, overrides)
    model, weight_bytes = _load(config, info, device, kernels)
    loaded_s = time.perf_counter()
    page_size = config.memory.page_size or 1
    attn = make_backend(
        config.execute.attention_backend or "torch_native", model.kv_groups, kernels, device
    )
    if not attn.supports(page_size):
        raise ConfigError(
            f"--page-size {page_size}: attention backend {attn.name!r} works with "
            f"{attn.required_page_size or 'other sizes'}"
        )
    max_running = config.schedule.max_running_requests or 64
    kv_dtype = _kv_dtype(config, info, device)
    page_bytes = sum(attn.page_nbytes(g, page_size, kv_dtype) for g in model.kv_groups)
    memory = MemoryFacts(
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        mem_fraction_static=config.memory.mem_fraction_static or 0.6,
        max_total_tokens=config.memory.max_total_tokens,
        max_running=max_running,
        context_len=info.context_len,
    )
    pages = num_pages(memory, page_bytes, page_size)
    for group in model.kv_groups:
        attn.make_pool(group, pages + 1, page_size, kv_dtype)
    limits = _limits(config, info, pages * page_size, page_size)
    kv_bytes = page_bytes * (pages + 1)
    controls = TensorControls(model, weight_bytes, kv_bytes, pages * page_size)
    executor = _runner(info, model, attn, device, limits, controls)
    allocator = PageAllocator(pages + 1, page_size)
    slots = SlotAllocator(max_running)
    ledger = KvLedger(allocator, slots, _cache(config, allocator, page_size), page_size)
    scheduler = Scheduler(
        limits,
        executor,
        channel,
        ledger,
        Hooks((*_features(config, info), *extra_features)),
        stream_interval=config.schedule.stream_interval,
    )
    log.info(
        "%s: weights %s in %s; KV cache of %d tokens (%s, %s); %d threads",
        info.architecture,
        format_bytes(weight_bytes),
        format_seconds(loaded_s - began_s),
        pages * page_size,
        format_bytes(kv_bytes),
        str(kv_dtype).removeprefix("torch."),
        torch.get_num_threads(),
    )
    facts = {
        "max_total_num_tokens": pages * page_size,
        "max_req_input_len": limits.context_len - 1,
        "context_len": limits.context_len,
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "page_size": page_size,
        "load_seconds": loaded_s - began_s,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }
    return Replica(scheduler, facts)


def _set_threads(config: ServerConfig, info: ModelInfo) -> None:
    """--cpu-threads; a small model gains nothing from more than one, and loses when cores are
    busy with other work."""
    threads = config.execute.cpu_threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    if config.execute.random_seed is not None:
        torch.manual_seed(config.execute.random_seed)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _load(
    config: ServerConfig, info: ModelInfo, device: torch.device, kernels: Kernels
) -> tuple[Model, int]:
    dtype = config.model.dtype
    compute, weight = resolve_dtypes(dtype, device, checkpoint_dtype(info.folder))
    model = build_model(
        info.decoder,
        device,
        compute,
        kernels,
        weight_dtype=weight,
        merge_windows=True,
    )
    report = load_weights(model, info.folder, config.model.load_format, device=device)
    return model, report.num_bytes


def _kv_dtype(config: ServerConfig, info: ModelInfo, device: torch.device) -> torch.dtype:
    """The cache holds what the weights hold: 16 bits for a 16-bit model."""
    stored = checkpoint_dtype(info.folder)
    compute, weight = resolve_dtypes(config.model.dtype, device, stored)
    wanted = weight or stored
    return wanted if wanted in (torch.bfloat16, torch.float16, torch.float32) else compute


def _limits(config: ServerConfig, info: ModelInfo, tokens: int, page_size: int) -> Limits:
    schedule = config.schedule
    chunk = schedule.chunked_prefill_size or 2048
    whole = chunk < 0
    return Limits(
        max_running=schedule.max_running_requests or 64,
        max_queued=schedule.max_queued_requests,
        step_tokens=max(schedule.max_prefill_tokens, info.context_len) if whole else chunk,
        max_prefill_tokens=max(schedule.max_prefill_tokens, info.context_len if whole else 1),
        context_len=min(info.context_len, tokens),
        page_size=page_size,
        depth=0,
        reserve=BASE_RESERVE * schedule.schedule_conservativeness,
        policy="fcfs" if schedule.schedule_policy == "priority" else schedule.schedule_policy,
        priorities=schedule.enable_priority_scheduling,
        low_values_first=schedule.schedule_low_priority_values_first,
        preemption_threshold=schedule.priority_scheduling_preemption_threshold,
        chunked=not whole,
        eos_ids=info.eos_ids,
        vocab=info.decoder.vocab,
        rope=rope_lengths(info.ropes),
    )


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


def _cache(config: ServerConfig, allocator: PageAllocator, page_size: int) -> PrefixCache:
    if config.memory.disable_radix_cache:
        return ChunkCache(page_size)
    return RadixCache(allocator, page_size, eviction=config.memory.radix_eviction_policy)


def _runner(
    info: ModelInfo,
    model: Model,
    attn: AttentionBackend,
    device: torch.device,
    limits: Limits,
    controls: TensorControls,
) -> Runner:
    num_slots = limits.max_running
    max_pages = -(-limits.context_len // limits.page_size) + 1
    tables = SlotTables(num_slots, max_pages, 1, device)
    sampling = SamplingTable(num_slots, info.decoder.vocab, device)
    return Runner(
        model,
        attn,
        tables,
        sampling,
        (0,) * len(model.kv_groups),
        limits.page_size,
        info.eos_ids,
        controls.verbs(),
    )


def _features(config: ServerConfig, info: ModelInfo) -> tuple[Feature, ...]:
    """The order in which features speak."""
    builders: tuple[Callable[[], Feature | None], ...] = (lambda: _grammar(config, info),)
    return tuple(feature for build in builders if (feature := build()) is not None)


def _grammar(config: ServerConfig, info: ModelInfo) -> Feature | None:
    if config.model.skip_tokenizer_init or config.grammar.grammar_backend == "none":
        return None
    folder = config.model.tokenizer_path
    same = folder in (None, config.model.model_path)

    def tokenizer() -> Any:
        return load_tokenizer(info.folder if same else str(folder), config.model.tokenizer_mode)

    return GrammarFeature(config.grammar, tokenizer, info.decoder.vocab, info.eos_ids)
