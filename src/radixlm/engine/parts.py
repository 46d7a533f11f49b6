"""The parts of an engine: runner, KV cache manager, features, logit processors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixlm.attention.base import AttentionBackend
from radixlm.base.deferred import TORCH_SHAPES, run_deferred
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record, replace
from radixlm.config.server_config import ServerConfig
from radixlm.cuda_graphs.graphs import draft_widths
from radixlm.devices.device import Device
from radixlm.distributed.groups import ALONE, Group, Ranks
from radixlm.engine.adapters import AdapterLoader
from radixlm.engine.draft_model import LoadedDraft
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.engine.features.lora import LoraFeature
from radixlm.engine.features.token_rules import TokenRules
from radixlm.engine.kept import KeptPages
from radixlm.engine.kv_events import KvEvents
from radixlm.engine.limits import overlap_depth
from radixlm.engine.located import tokenizer_folder
from radixlm.engine.logit_processors import processor_targets
from radixlm.engine.memory import Pools
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.profile import Profiler
from radixlm.engine.rank_processes import topology_of
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts
from radixlm.hidden_outputs.buffer import OutputBuffer
from radixlm.hidden_outputs.logprob_budget import LogprobBudget
from radixlm.hidden_outputs.reader import HiddenReader
from radixlm.kernels.dispatch import INVARIANT, INVARIANT_OPS
from radixlm.lora.table import AdapterTable
from radixlm.media.encoder_budget import EncoderBudget
from radixlm.media.encoder_cache import EncoderCache
from radixlm.media.image_vectors import ImageVectors, VectorPooler
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import PrefixCache
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup, WindowTable
from radixlm.memory.slots import SlotAllocator
from radixlm.models.block_draft import BlockDraft
from radixlm.models.build import Model, attention_groups_of, head_of
from radixlm.models.decoder import DecoderModel
from radixlm.models.draft_heads import DraftHead
from radixlm.models.dump import TensorDump
from radixlm.models.pooler import Pooler
from radixlm.models.reading_draft import ReadingDraft
from radixlm.parallel.grouped_kv_cache import GroupedKVCacheManager
from radixlm.parallel.grouped_runner import GroupedRunner
from radixlm.parallel.pipelined import PipelinedGroupedRunner, PipelinedRunner
from radixlm.parallel.routed import ExpertChoices
from radixlm.sampling.processors import LogitProcessors, ServerFacts
from radixlm.sampling.table import SamplingTable
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.kv_cache_manager import KVCacheManager, WindowPages
from radixlm.scheduler.limits import Limits
from radixlm.speculative.device.block_drafter import BlockDrafter
from radixlm.speculative.device.draft_entries import PageGroups
from radixlm.speculative.device.heads_drafter import HeadsDrafter
from radixlm.speculative.device.model_drafter import ONE_GROUP, ModelDrafter
from radixlm.speculative.device.parallel_drafter import ParallelDrafter
from radixlm.speculative.device.reading_drafter import ReadingDrafter
from radixlm.speculative.device.tail import DraftTail
from radixlm.step_sizes.further_tokens import FurtherTokens
from radixlm.tails.page_tails import PageTails
from radixlm.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:  # torch's compiler takes a second to import
    from radixlm.models.compiled import CompiledSteps

log = logging.getLogger(__name__)


class EngineParts(Record):
    """What stays when a scheduler is replaced. ``steps`` runs the model's steps, if not the
    model; ``draft`` drafts for it."""

    model: Model
    attn: AttentionBackend
    pools: Pools
    commands: Mapping[str, Any]
    processors: LogitProcessors
    media: EncoderCache | None
    profiler: Profiler | None
    steps: CompiledSteps | None = None
    adapters: AdapterTable | None = None
    draft: LoadedDraft | None = None
    choices: ExpertChoices | None = None
    dump: TensorDump | None = None
    ranks: Ranks = ALONE


def invariant_kernels(config: ServerConfig, info: ModelInfo) -> dict[str, str]:
    """Kernels by op that --enable-deterministic-inference asks for: none on the CPU path, which is
    always batch invariant. A warning names what still runs in torch."""
    execute = config.execute
    if not execute.enable_deterministic_inference or execute.attention_backend != "triton":
        return {}
    has_states = any(block.state is not None for block in info.decoder.blocks)
    uncovered = [
        *(["recurrent layers"] if has_states else []),
        *(["adapters of head, token table and kv_b_proj"] if config.adapters.enable_lora else []),
        *(["images, video and audio"] if info.media is not None else []),
    ]
    if uncovered:
        log.warning(
            "--enable-deterministic-inference: %s run in torch, where a token's last bits may "
            "depend on its batch",
            ", ".join(uncovered),
        )
    return dict.fromkeys(INVARIANT_OPS, INVARIANT)


def make_runner(
    config: ServerConfig, info: ModelInfo, parts: EngineParts, device: Device, limits: Limits
) -> Runner:
    """A runner with new tables around the parts."""
    model, pools, num_slots = parts.model, parts.pools, limits.max_running
    has_windows = pools.window_tokens > 0
    max_pages = -(-limits.context_len // limits.page_size) + 1
    spaces = tuple(int(has_windows and g.name == "window") for g in model.kv_groups)
    where, is_shared = device.where, device.is_synchronous
    num_spaces = 1 + has_windows
    sizes = num_slots, max_pages, num_spaces
    tables = DeviceTables(*sizes, where, is_shared, limits.max_drafts, limits.max_paths)
    sampling = SamplingTable(num_slots, info.decoder.vocab, where)
    detects = is_shared or config.execute.enable_nan_detection
    drafter = _drafter(
        parts, tables, limits, spaces, pools.sizes.num_full + 1, topology_of(config).attn_dp
    )
    runs = parts.dump or parts.steps or model
    runner_parts = RunnerParts(
        runs,
        parts.attn,
        tables,
        sampling,
        device,
        parts.processors,
        HiddenReader(runs, tables, _pooler(model, parts.media)),
        parts.media,
        pools.states,
        parts.adapters,
        parts.commands,
        None
        if drafter is None
        else DraftTail(drafter, tables, sampling, limits.page_size, pools.states is not None),
        parts.choices,
        _followers(device, parts.ranks),
    )
    # ranks that do not sample could not tell which graph of drafts is right
    has_graphs = config.speculate.speculative_algorithm and parts.ranks.place == ALONE.place
    options = RunnerOptions(
        limits.page_size,
        spaces,
        info.eos_ids,
        limits.step_tokens,
        detect_bad=detects,
        max_drafts=limits.max_drafts,
        draft_widths=draft_widths(limits.max_drafts) if has_graphs else (),
        max_paths=limits.max_paths,
        tree_size=parts.draft.tree.size if parts.draft and parts.draft.tree else 0,
        on_step=None if parts.profiler is None else parts.profiler.count,
        samples=parts.ranks.place.rank == 0,
    )
    pipeline = model.pipeline if isinstance(model, DecoderModel) else None
    is_piped = pipeline is not None and pipeline.place.rank == 0
    groups = attention_groups_of(model)
    more: dict[str, Any] = {"last": pipeline} if is_piped else {}
    kind: type[Runner] = PipelinedRunner if is_piped else Runner
    if groups is not None:
        kind = PipelinedGroupedRunner if is_piped else GroupedRunner
        per_group = num_slots // groups.num_groups
        more |= {"model": model, "groups": groups, "slots_per_group": per_group}
    runner = kind(runner_parts, options, **more)
    runner.further = FurtherTokens(runner)
    return runner


def _followers(device: Device, ranks: Ranks) -> Group | None:
    """The group in which sampled tokens pass from device to device: where steps overlap, plans do
    not know them. Stages work on other requests meanwhile, whose tokens plans know."""
    is_told = device.is_synchronous or ranks.place.pp > 1 or ranks.place.tp == 1
    return None if is_told else ranks.tp


def _drafter(
    parts: EngineParts,
    tables: DeviceTables,
    limits: Limits,
    spaces: tuple[int, ...],
    num_pages: int,
    num_groups: int,
) -> ModelDrafter | ReadingDrafter | HeadsDrafter | None:
    """``num_pages``: of each of the groups of data-parallel attention."""
    draft = parts.draft
    if draft is None or not limits.max_drafts:
        return None
    if isinstance(draft.net, ReadingDraft):
        return ReadingDrafter(
            draft.net, parts.attn, tables, spaces, limits.page_size, draft.num_ids
        )
    nets = [net for net, _ in draft.modules if isinstance(net, DraftHead)]
    if nets:
        return HeadsDrafter(nets, tables, draft.num_ids)
    groups = ONE_GROUP
    if num_groups > 1:
        groups = PageGroups(tables.num_slots // num_groups, num_pages)
    size, num_ids, shape = limits.page_size, draft.num_ids, draft.tree or draft.block
    if shape is not None:
        shape = replace(shape, first_page=num_groups * num_pages)
    if isinstance(draft.net, BlockDraft):
        assert shape is not None
        return BlockDrafter(draft.net, draft.attn, tables, size, num_ids, shape, groups=groups)
    kind = ModelDrafter if draft.net.mask is None else ParallelDrafter
    return kind(draft.net, draft.attn, tables, size, num_ids, draft.later, groups, shape)


def _pooler(model: Model, media: EncoderCache | None) -> Pooler:
    head = head_of(model)
    return VectorPooler(head, media) if isinstance(media, ImageVectors) else Pooler(head)


def make_kv_manager(
    config: ServerConfig,
    pools: Pools,
    limits: Limits,
    events: KvEvents | None = None,
    kept: KeptPages | None = None,
) -> KVCacheManager:
    """The KV cache manager of the pools, of which each attention group has its own."""
    num_groups = topology_of(config).attn_dp
    count = limits.max_running // num_groups
    managers = []
    for group in range(num_groups):
        slots = SlotAllocator(count, group * count)
        manager = _make_manager(config, pools, limits, slots)
        if isinstance(manager.prefix_cache, RadixCache):
            if kept is not None:
                kept.follow(manager.prefix_cache, group)
            if events is not None:
                events.follow(manager.prefix_cache, group)
        managers.append(manager)
    return managers[0] if num_groups == 1 else GroupedKVCacheManager(managers)


def _make_manager(
    config: ServerConfig, pools: Pools, limits: Limits, slots: SlotAllocator
) -> KVCacheManager:
    page_size = pools.page_size
    allocator = PageAllocator(pools.sizes.num_full + 1, page_size)
    window = None
    if pools.window_tokens:
        table = WindowTable(pools.window_tokens, page_size)
        window_pages = PageAllocator(pools.sizes.num_window + 1, page_size)
        window = WindowPages(window_pages, table, pools.states is not None)
    prefix_cache = _make_prefix_cache(config, allocator, page_size, window, limits.is_encoder)
    shares_pages = isinstance(prefix_cache, RadixCache)
    manager = KVCacheManager(allocator, slots, prefix_cache, page_size, window)
    if shares_pages and pools.min_tail is not None:
        PageTails(manager, pools.min_tail)
    return manager


def _make_prefix_cache(
    config: ServerConfig,
    allocator: PageAllocator,
    page_size: int,
    second: WindowPages | None,
    is_encoder: bool,
) -> PrefixCache:
    if config.memory.disable_radix_cache or is_encoder:
        return PrefixCache(page_size, is_hybrid=second is not None)
    window = WindowGroup(second.pages, second.table.window_tokens) if second is not None else None
    eviction = config.memory.radix_eviction_policy
    return RadixCache(allocator, page_size, eviction, window=window)


def make_features(
    config: ServerConfig, info: ModelInfo, limits: Limits, loader: AdapterLoader | None
) -> tuple[Feature, ...]:
    """The features, in the order in which their hooks are called."""
    outputs = LogprobBudget(limits.chunked), EncoderBudget(limits.step_tokens), OutputBuffer()
    lora = LoraFeature(loader, config.adapters.max_loras_per_batch)
    grammar = _make_grammar(config, info)
    rules = TokenRules(info.decoder.vocab)
    return (lora, *([grammar] if grammar is not None else []), rules, *outputs)


def _make_grammar(config: ServerConfig, info: ModelInfo) -> Feature | None:
    tokenizer = tokenizer_loader(config, info)
    if tokenizer is None or config.grammar.grammar_backend == "none":
        return None
    vocab, overlaps = info.decoder.vocab, overlap_depth(config, info) == 0
    return GrammarFeature(config.grammar, tokenizer, vocab, info.eos_ids, overlaps)


def make_processors(config: ServerConfig, info: ModelInfo) -> LogitProcessors:
    """The logit processors that requests can name."""
    if config.grammar.logit_processor:
        run_deferred(TORCH_SHAPES)  # code of users may need all of torch
    loader = tokenizer_loader(config, info)
    facts = ServerFacts(info.decoder.vocab, info.eos_ids, loader)
    return LogitProcessors(processor_targets(config.grammar), facts)


def tokenizer_loader(config: ServerConfig, info: ModelInfo) -> Callable[[], Tokenizer] | None:
    """A function that loads the tokenizer for what needs it in the engine; None without one."""
    if config.model.skip_tokenizer_init:
        return None
    folder = tokenizer_folder(config, info.folder)
    return partial(_load_tokenizer_once, folder, config.model.tokenizer_mode)


@lru_cache(maxsize=1)
def _load_tokenizer_once(path: str | Path, mode: str) -> Tokenizer:
    try:
        return load_tokenizer(path, mode)
    except (OSError, ValueError) as error:  # its folder has changed since the start
        raise CheckpointError(f"no tokenizer can be read from {path}: {error}") from error
