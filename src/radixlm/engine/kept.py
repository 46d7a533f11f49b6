"""KeptPages: KV pools and their journal in memory of the server, found again after a restart of the
engine (--warm-restart)."""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm import __version__
from radixlm.attention.base import AttentionBackend
from radixlm.base.record import Record, replace
from radixlm.base.units import format_seconds
from radixlm.config.server_config import ServerConfig, flat
from radixlm.distributed.topology import Place
from radixlm.engine.draft_model import LoadedDraft
from radixlm.engine.memory import MemoryNow, Pools, make_pools
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.ranks import Peers
from radixlm.memory.prefix.radix import RadixCache
from radixlm.models.build import Model
from radixlm.pools.memory import KeptMemory, kept_rows
from radixlm.tiers.manifest import weights_digest
from radixlm.warm_restart.digests import GroupDigests
from radixlm.warm_restart.journal import PageJournal
from radixlm.warm_restart.journal_replay import JournalReplay
from radixlm.wire.weights import WeightsSource

log = logging.getLogger(__name__)

Rows = list[NDArray[np.uint8]]
"""Of each layer uint8 [pages, bytes]."""


class Boot(Record):
    """Which start of which engine this is. ``replica``: its number; ``number``: how often it was
    started before; ``memory``: paths of the memory that is kept for its ranks, "" of ranks of other
    hosts; ``weights``: what it serves in place of the checkpoint's weights."""

    replica: int = 0
    number: int = 0
    memory: tuple[str, ...] = ()
    weights: WeightsSource | None = None


FIRST_BOOT: Final = Boot()


def open_memory(
    config: ServerConfig, info: ModelInfo, boot: Boot, peers: Peers
) -> KeptMemory | None:
    """The kept memory of this rank, warm if that of all ranks is; None, with a warning, if it
    cannot be used."""
    if not config.memory.warm_restart or not boot.memory:
        return None
    options = flat(config, show_secrets=False)
    weights = "" if config.model.load_format == "dummy" else weights_digest(info.folder)
    facts = (__version__, torch.__version__, options, weights)
    identity = hashlib.sha256(msgspec.json.encode(facts, enc_hook=str)).digest()
    memory = None
    try:  # an agent that could keep none has left the path empty
        memory = KeptMemory(boot.memory[peers.ranks.place.rank], identity)
    except OSError as error:
        log.warning("--warm-restart: %s; after a restart the KV cache will be empty", error)
    is_warm = memory is not None and memory.is_warm
    has, is_warm = map(bool, peers.agree((int(memory is not None), int(is_warm))))
    if memory is None or not has:
        return None
    if not is_warm:
        memory.forget()
    return memory


class KeptPages:
    """The pools of a rank in ``memory``, which it seals. Rank 0 has the journals: of each attention
    group one, over the pages of all ranks of the group. The lowest rank of a host reads them in the
    memory of the others there."""

    def __init__(
        self,
        memory: KeptMemory,
        model: Model,
        attn: AttentionBackend,
        pools: Pools,
        peers: Peers,
        boot: Boot,
    ) -> None:
        tensors: list[tuple[int, Tensor]] = []
        for group, pool in zip(model.kv_groups, attn.pools, strict=True):
            assert pool is not None, "make_pools() comes first"
            space = int(pools.window_tokens > 0 and group.name == "window")
            tensors += [(space, tensor) for tensor in pool.tensors if tensor.numel()]
        if pools.states is not None:
            pools.states.zero_null_page()  # a killed step may have written there
            tensors += [(1, t[None]) for layer in pools.states.layers for t in layer]
        memory.list_tensors([memory.place_of(space, tensor) for space, tensor in tensors])
        peers.agree((1,))  # each rank has its pools
        self.journals: list[PageJournal] = []
        if peers.is_lowest:
            rows = _rows_of_groups(peers.ranks.place, boot.memory)
            digests = peers.digests_of_hosts(partial(_digests, rows))
            if peers.is_first:
                self._make_journals(memory, pools, len(rows), digests)
        self._warm = [memory.is_warm] * len(self.journals)
        memory.seal()

    def _make_journals(
        self, memory: KeptMemory, pools: Pools, num_groups: int, digests: GroupDigests
    ) -> None:
        num_pages = pools.sizes.num_full + 1
        for group in range(num_groups):
            data = memory.take(PageJournal.num_bytes(num_pages, pools.page_size))
            of_group = partial(digests, group)
            self.journals.append(PageJournal(data, num_pages, pools.page_size, of_group))

    def count_pending(self) -> int:
        """Pages without a checksum so far, which a kill now would lose."""
        return sum(journal.num_pending for journal in self.journals)

    def follow(self, cache: RadixCache, group: int) -> None:
        """Fill a group's new prefix cache with what is found, if it is the first of a restarted
        engine."""
        journal = self.journals[group]
        if self._warm[group]:
            began_s = time.perf_counter()
            num_tokens = JournalReplay(journal, cache).run()
            elapsed = format_seconds(time.perf_counter() - began_s)
            log.info("%d cached tokens were found again in %s", num_tokens, elapsed)
        else:  # after a failed step, the tree is not to be trusted
            journal.on_reset()
        self._warm[group] = False
        cache.events = journal
        if cache.window is not None:
            cache.window.on_change = journal.on_window


def make_kept_pools(
    config: ServerConfig,
    info: ModelInfo,
    model: Model,
    attn: AttentionBackend,
    memory: MemoryNow,
    draft: LoadedDraft | None,
    peers: Peers,
    boot: Boot,
) -> tuple[Pools, KeptPages | None]:
    """``make_pools``, in the memory that the server keeps, if it keeps some."""
    kept = open_memory(config, info, boot, peers)
    if kept is None:
        return make_pools(config, info, model, attn, memory, draft, peers.agree), None

    def agree(numbers: Sequence[int]) -> list[int]:
        return kept.agree(peers.agree(numbers))

    # what it holds is free for the same pools
    memory = replace(memory, free_bytes=memory.free_bytes + kept.num_held)
    with kept.lent():
        pools = make_pools(config, info, model, attn, memory, draft, agree)
    return pools, KeptPages(kept, model, attn, pools, peers, boot)


def _rows_of_groups(place: Place, paths: Sequence[str]) -> list[list[Rows]]:
    """The pools of this host's ranks by attention group and space. ``paths``: of the memory of each
    rank, "" of other hosts."""
    ranks = {rank: kept_rows(path) for rank, path in enumerate(paths) if path}
    groups: list[list[Rows]] = []
    # a group's ranks follow each other; all stages have parts of its pages
    for group in range(place.tp // place.attn_tp):
        own = [r for i, r in ranks.items() if i % place.tp // place.attn_tp == group]
        groups.append([[layer for r in own for t in r[n] for layer in t] for n in (0, 1)])
    return groups


def _digests(
    rows: Sequence[Sequence[Rows]],
    group: int,
    space: int,
    pages: Sequence[int],
    seeds: Sequence[int],
) -> list[int]:
    """CRC-32 of each page of a group in this host's memory."""
    digests = list(seeds)
    for layer in rows[group][space]:
        digests = [zlib.crc32(layer[page], d) for page, d in zip(pages, digests, strict=True)]
    return digests
