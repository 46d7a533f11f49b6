"""Occupation: the memory of weights and pools that an engine gives back for a while
(/release_memory_occupation, /sleep) and takes again."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from torch import Tensor

from radixlm.attention.base import AttentionBackend
from radixlm.base.errors import InvalidRequest
from radixlm.base.units import format_bytes
from radixlm.config.server_config import ServerConfig
from radixlm.engine.draft_model import LoadedDraft
from radixlm.engine.memory import Pools
from radixlm.pools.memory import drop_pages
from radixlm.wire.requests import KV_CACHE

log = logging.getLogger(__name__)


class Occupation:
    """What one rank can give back. The scheduler sees to it that no step runs meanwhile, and that
    nobody reads what was released before it is resumed."""

    def __init__(
        self,
        config: ServerConfig,
        attn: AttentionBackend,
        pools: Pools,
        draft: LoadedDraft | None,
    ) -> None:
        self._is_enabled = config.memory.enable_memory_saver
        self._attn, self._pools, self._draft = attn, pools, draft

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {"release_memory": self._release, "resume_memory": self._resume}

    def _release(self, args: dict[str, Any]) -> dict[str, int]:
        """Give back the memory of ``tags``; how much less is resident."""
        if not self._is_enabled:
            raise InvalidRequest(
                "release_memory_occupation: this server keeps its memory; start it with "
                "--enable-memory-saver"
            )
        before = psutil.Process().memory_info().rss
        if KV_CACHE in args["tags"]:
            for tensor in self._pool_tensors():
                drop_pages(tensor)
        gc.collect()
        freed = max(0, before - psutil.Process().memory_info().rss)
        log.info("released %s: %s less resident", ", ".join(args["tags"]), format_bytes(freed))
        return {"freed_bytes": freed}

    def _resume(self, args: dict[str, Any]) -> None:
        """The pools fill again as steps write to them."""
        log.info("resumed %s", ", ".join(args["tags"]))

    def _pool_tensors(self) -> Iterator[Tensor]:
        drafts = [attn for _, attn in self._draft.modules] if self._draft else []
        for attn in (self._attn, *drafts):
            for pool in attn.pools:
                yield from pool.tensors if pool is not None else ()
        if self._pools.states is not None:
            for layer in self._pools.states.layers:
                yield from layer
