"""KeptPages: KV pools and their journal in memory of the server, found again after a restart of the
engine (--warm-restart)."""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm import __version__
from radixlm.attention.base import AttentionBackend
from radixlm.base.record import Record
from radixlm.base.units import format_seconds
from radixlm.config.server_config import ServerConfig, flat
from radixlm.engine.memory import Pools
from radixlm.engine.model_info import ModelInfo
from radixlm.memory.journal import PageJournal
from radixlm.memory.journal_replay import JournalReplay
from radixlm.memory.prefix.radix import RadixCache
from radixlm.models.build import Model
from radixlm.pools.memory import KeptMemory
from radixlm.tiers.manifest import weights_digest
from radixlm.wire.weights import WeightsSource

log = logging.getLogger(__name__)


class Boot(Record):
    """Which start of which engine this is. ``replica``: its number; ``number``: how often it was
    started before; ``memory``: path of the memory that the server keeps for it; ``weights``: what
    it serves in place of the checkpoint's weights."""

    replica: int = 0
    number: int = 0
    memory: str = ""
    weights: WeightsSource | None = None


FIRST_BOOT: Final = Boot()


def open_memory(config: ServerConfig, info: ModelInfo, boot: Boot) -> KeptMemory | None:
    """The kept memory of this engine; None, with a warning, if it cannot be used."""
    if not config.memory.warm_restart or not boot.memory:
        return None
    options = flat(config, show_secrets=False)
    weights = "" if config.model.load_format == "dummy" else weights_digest(info.folder)
    facts = (__version__, torch.__version__, options, weights)
    identity = hashlib.sha256(msgspec.json.encode(facts, enc_hook=str)).digest()
    try:
        return KeptMemory(boot.memory, identity)
    except OSError as error:
        log.warning("--warm-restart: %s; after a restart the KV cache will be empty", error)
        return None


class KeptPages:
    """The journal of the pools in ``memory``, which seals it."""

    def __init__(
        self, memory: KeptMemory, model: Model, attn: AttentionBackend, pools: Pools
    ) -> None:
        spaces: tuple[list[Tensor], list[Tensor]] = ([], [])
        for group, pool in zip(model.kv_groups, attn.pools, strict=True):
            assert pool is not None, "make_pools() comes first"
            space = int(pools.window_tokens > 0 and group.name == "window")
            spaces[space].extend(tensor for tensor in pool.tensors if tensor.numel())
        if pools.states is not None:
            pools.states.zero_null_page()  # a killed step may have written there
            spaces[1].extend(t[None] for layer in pools.states.layers for t in layer)
        # rows of bytes, [layers, pages, bytes]
        self._rows = [[_rows(tensor) for tensor in tensors] for tensors in spaces]
        num_pages, page_size = pools.sizes.num_full + 1, pools.page_size
        data = memory.take(PageJournal.num_bytes(num_pages, page_size))
        self.journal = PageJournal(data, num_pages, page_size, self._digest)
        self._is_warm = memory.is_warm
        memory.seal()

    def _digest(self, space: int, page: int, seed: int) -> int:
        for rows in self._rows[space]:
            for layer in rows:
                seed = zlib.crc32(layer[page], seed)
        return seed

    def follow(self, cache: RadixCache) -> None:
        """Fill a new prefix cache with what is found, if it is the first of a restarted engine."""
        if self._is_warm:
            began_s = time.perf_counter()
            num_tokens = JournalReplay(self.journal, cache).run()
            elapsed = format_seconds(time.perf_counter() - began_s)
            log.info("%d cached tokens were found again in %s", num_tokens, elapsed)
        else:  # after a failed step, the tree is not to be trusted
            self.journal.on_reset()
        self._is_warm = False
        cache.events = self.journal
        if cache.window is not None:
            cache.window.on_change = self.journal.on_window


def _rows(tensor: Tensor) -> Sequence[NDArray[np.uint8]]:
    rows: NDArray[np.uint8] = tensor.view(torch.uint8).flatten(2).numpy()
    return list(rows)
