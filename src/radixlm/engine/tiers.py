"""The tiers of an engine, from its options: manifest, worker, the feature that waits for pages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import torch

from radixlm.arch.spec import Decoder
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.record import Record, replace
from radixlm.config.server_config import ServerConfig
from radixlm.engine.draft_model import LoadedDraft, find_draft
from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.hicache import arrival_options, make_hicache
from radixlm.engine.memory import Pools
from radixlm.engine.model_info import ModelInfo, config_overrides
from radixlm.engine.packed_weights import available_bytes
from radixlm.engine.peering import is_paired, make_peer
from radixlm.engine.rank_processes import topology_of
from radixlm.engine.ranks import Peers
from radixlm.engine.stores import make_lmcache
from radixlm.executor.runner import Runner
from radixlm.models.build import Model
from radixlm.models.kv_groups import kv_groups
from radixlm.parallel.page_port import PagePort, RankedPort
from radixlm.parallel.relay import Relay
from radixlm.pools.page_bytes import PageBytes
from radixlm.scheduler.loop import Executor
from radixlm.speculative.device.model_drafter import ModelDrafter
from radixlm.speculative.device.tail import DraftTail
from radixlm.tiers.base import Tier
from radixlm.tiers.manifest import Manifest, PageGroup, Rectangle, weights_digest
from radixlm.tiers.peer import Outgoing
from radixlm.tiers.prefault import missing_bytes, room_bytes
from radixlm.tiers.row_memory import RowMemory
from radixlm.tiers.worker import PageWorker

STAGING_BYTES: Final = 64 << 20  # of pages between two servers
MakeTiers = Callable[[ServerConfig, Manifest], Sequence[Tier]]

# "module:function" of each kind of tier, in the order in which they are asked; each makes the tiers
# of its flags, none if they are not given
SOURCES: Final[list[str]] = []


class EnginePages(Record, eq=False):
    """What an engine with tiers has besides; every rank has one."""

    worker: PageWorker
    page_bytes: PageBytes
    manifest: Manifest
    options: ArrivalOptions
    num_groups: int = 1

    def begin(self, runner: Runner) -> None:
        """``runner`` has the pools from now on: nothing that was asked for before writes there."""
        self.worker.reset()
        drafter = runner.end.drafter if isinstance(runner.end, DraftTail) else None
        if isinstance(drafter, ModelDrafter):
            self.page_bytes.filled = lambda: drafter.filled_pages
            self.worker.others_get = drafter.lack_pages

    def ports(self, executor: Executor) -> list[PagePort]:
        """The workers of the ranks of each attention group, for a new scheduler."""
        if isinstance(executor, Relay):
            return [RankedPort(self.worker, executor, group) for group in range(self.num_groups)]
        return [PagePort(self.worker)]


def make_pages(
    config: ServerConfig,
    info: ModelInfo,
    model: Model,
    attn_pools: Sequence[object],
    pools: Pools,
    draft: LoadedDraft | None,
    peers: Peers,
    is_restart: bool,
) -> EnginePages | None:
    """The worker with its tiers; None where no flag asks for one."""
    makers: list[MakeTiers] = [load(source) for source in SOURCES]
    memory = config.memory
    has_tiers = memory.enable_hierarchical_cache or memory.enable_lmcache or is_paired(config)
    if not makers and not has_tiers:
        return None
    page_bytes = make_page_bytes(model, attn_pools, pools, draft)
    manifest = make_manifest(config, info, pools, page_bytes, peers, draft)
    free_bytes = available_bytes() // config.parallel.num_processes
    lazy_bytes = missing_bytes(page_bytes.spans()) if memory.enable_hierarchical_cache else 0
    hicache = make_hicache(
        config, manifest, pools.num_bytes, free_bytes, lazy_bytes, is_restart=is_restart
    )
    tiers = [*(hicache.tiers if hicache else ()), *(t for m in makers for t in m(config, manifest))]
    tiers += make_lmcache(config, manifest)
    tiers += make_peer(config, manifest, peers)
    if not tiers:
        return None
    _check(config, page_bytes)
    window_pages = -(-pools.window_tokens // pools.page_size)
    options = ArrivalOptions(
        pools.page_size,
        page_bytes=page_bytes.page_bytes,
        window_pages=window_pages,
        puts_late=draft is not None,
        is_prefill=config.disagg.disaggregation_mode == "prefill",
    )
    group = peers.ranks.place.attn_dp_rank
    worker = PageWorker(tiers, page_bytes, pools.page_size, window_pages, group)
    worker.facts = {
        "layout": manifest.layout,
        "page_size": manifest.page_size,
        "page_bytes": manifest.page_bytes,
        "kv_cache_dtype": manifest.kv_dtype,
        "namespace": manifest.storage_digest.hex()[:16],
    }
    if hicache is not None:
        options = arrival_options(config.memory, options)
        worker.attach = hicache.attach
    has_lower = memory.hicache_storage_backend is not None or is_paired(config)
    if has_lower and not memory.enable_memory_saver:
        # the next prompts come from there
        spans = [span for tier in tiers if isinstance(tier, Outgoing) for span in tier.spans()]
        if is_paired(config) and page_bytes.nbytes(0):
            worker.staging = RowMemory(page_bytes.nbytes(0), STAGING_BYTES)
        worker.prefault([*spans, *page_bytes.spans()], free_bytes)
        if memory.hicache_storage_backend == "file" and not window_pages:
            options = replace(options, preload_bytes=room_bytes(free_bytes))
    return EnginePages(worker, page_bytes, manifest, options, topology_of(config).attn_dp)


def _check(config: ServerConfig, page_bytes: PageBytes) -> None:
    """ConfigError where pages cannot be kept elsewhere."""
    if config.memory.disable_radix_cache:
        raise ConfigError(
            "--disable-radix-cache: tiers bring pages into the radix cache; leave it out"
        )
    if not page_bytes.nbytes(0) and not page_bytes.nbytes(1):
        raise ConfigError("this model has no KV cache that a tier could keep; leave the tiers out")


def make_page_bytes(
    model: Model, attn_pools: Sequence[object], pools: Pools, draft: LoadedDraft | None
) -> PageBytes:
    """All pools of this rank by page space."""
    has_windows = pools.window_tokens > 0
    spaces = [int(has_windows and group.name == "window") for group in model.kv_groups]
    own = list(zip(spaces, attn_pools, strict=True))
    drafts = [pool for _, attn in draft.modules for pool in attn.pools] if draft else []
    return PageBytes(own, pools.states, drafts)  # type: ignore[arg-type]


def _described(config: ServerConfig, info: ModelInfo) -> str:
    """A digest of what the model computes, 16 hex digits."""
    parts = [msgspec.json.encode(info.decoder, enc_hook=str, order="deterministic")]
    if info.is_transformers or info.is_multimodal:  # the record has not all of it
        files = [info.folder / "config.json", *sorted(info.folder.glob("*.py"))]
        parts += [msgspec.json.encode(config_overrides(config), order="deterministic")]
        parts += [file.read_bytes() for file in files]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def make_manifest(
    config: ServerConfig,
    info: ModelInfo,
    pools: Pools,
    page_bytes: PageBytes,
    peers: Peers,
    draft: LoadedDraft | None,
) -> Manifest:
    """What this engine's pages are made of."""
    decoder, topology, model_config = info.decoder, topology_of(config), config.model
    by_format = "bitsandbytes" if model_config.load_format == "bitsandbytes" else ""
    weights = f"{model_config.load_format} {config.execute.random_seed}"
    if model_config.load_format != "dummy":
        weights = weights_digest(info.folder)
    groups = _page_groups(decoder, pools)
    execute, place = config.execute, peers.ranks.place
    kernels = execute.device, execute.attention_backend, config.model.dtype, execute.kernel
    exact = execute.enable_deterministic_inference and execute.device == "cuda"
    drafts = weights_digest(find_draft(config, info))[:16] if draft is not None else ""
    modes = "deterministic" * exact, "sparse" * execute.enable_double_sparsity, drafts
    per_stage = -(-len(decoder.blocks) // topology.pp)
    return Manifest(
        model=f"{info.architecture} {_described(config, info)}",
        weights_digest=weights,
        weights_version=config.model.weight_version,
        kv_dtype=str(pools.dtype),
        page_size=pools.page_size,
        groups=tuple(groups),
        quantization=model_config.quantized_as or by_format,
        layout=page_bytes.layout,
        numerics=" ".join(map(str, (*kernels, torch.__version__, *filter(None, modes)))),
        rectangle=Rectangle(
            place.rank,
            topology.world,
            place.rank // topology.tp * per_stage,
            min((place.rank // topology.tp + 1) * per_stage, len(decoder.blocks)),
            *_heads(groups, place.attn_tp_rank, place.attn_tp),
        ),
        page_bytes=page_bytes.page_bytes,
    )


def _heads(groups: Sequence[PageGroup], rank: int, num_ranks: int) -> tuple[int, int]:
    """The KV heads [first, end) of the whole model that a tensor-parallel rank keeps."""
    count = next((g.kv_heads for g in groups if g.kv_heads and not g.latent), 1)
    first = rank * count // num_ranks
    return first, max(first + 1, (rank + 1) * count // num_ranks)


def _page_groups(decoder: Decoder, pools: Pools) -> list[PageGroup]:
    groups = [
        PageGroup(
            int(pools.window_tokens > 0 and group.name == "window"),
            group.layers,
            group.kv_heads,
            group.head_dim,
            group.v_dim,
            group.latent,
            group.window,
            compress_ratio=group.compress_ratio,
        )
        for group in kv_groups(decoder)
    ]
    states = {i: str(b.state.states) for i, b in enumerate(decoder.blocks) if b.state is not None}
    if states and pools.states is not None:
        kinds = {str(t.dtype) for layer in pools.states.layers for t in layer}
        groups.append(PageGroup(1, tuple(states), states=(*states.values(), *sorted(kinds))))
    return groups
