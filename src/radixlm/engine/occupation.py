"""Occupation: the memory of weights and pools that an engine gives back for a while
(/release_memory_occupation, /sleep) and takes again."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import torch
from torch import Tensor

from radixlm.attention.base import AttentionBackend
from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.base.heap import trim_heap
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.server_config import ServerConfig
from radixlm.devices.device import Device
from radixlm.engine.draft_model import LoadedDraft
from radixlm.engine.memory import Pools
from radixlm.engine.offload import is_offloading
from radixlm.layers.module import Contents, Module
from radixlm.models.build import Model
from radixlm.pools.memory import drop_pages, resident_bytes
from radixlm.wire.requests import KV_CACHE, WEIGHTS
from radixlm.wire.weights import WeightsSource

log = logging.getLogger(__name__)


class Occupation:
    """What one rank can give back. The scheduler sees to it that no step runs meanwhile, and that
    nobody reads what was released before it is resumed."""

    def __init__(
        self,
        config: ServerConfig,
        model: Model,
        fill: Callable[[WeightsSource | None], object],
        source: Callable[[], WeightsSource | None],
        attn: AttentionBackend,
        pools: Pools,
        draft: LoadedDraft | None,
        device: Device,
    ) -> None:
        """``fill``: loads the weights of ``model``, which has none, and finishes its layers;
        ``source``: what takes the place of its checkpoint's."""
        self._config, self._model, self._fill, self._source = config, model, fill, source
        self._attn, self._pools, self._draft = attn, pools, draft
        self._device = device
        self._released: set[str] = set()
        self._storage_bytes: dict[int, int] = {}  # of released pools on a device, by their order
        self.follow(lambda: None, lambda: None)

    def follow(self, drop_graphs: Callable[[], None], record_graphs: Callable[[], None]) -> None:
        """How graphs are dropped and recorded, from now on: of a new runner."""
        self._drop_graphs, self._record_graphs = drop_graphs, record_graphs

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {"release_memory": self._release, "resume_memory": self._resume}

    def exchange(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls that give layers other weights, between two recordings of graphs."""
        self._device.record().wait()
        self._drop_graphs()
        for call in calls:
            call()
        if not self._released:
            self._record_graphs()

    def _release(self, args: dict[str, Any]) -> dict[str, int]:
        """Give back the memory of ``tags``; how much less is resident."""
        tags = args["tags"]
        self._check(tags)
        before = psutil.Process().memory_info().rss
        self._device.record().wait()
        self._drop_graphs()  # they know addresses of all the rest
        if WEIGHTS in tags:
            self._drop_weights()
        if KV_CACHE in tags and KV_CACHE not in self._released:
            self._drop_pools()
        self._released |= set(tags)
        give_back_heap()
        self._device.reclaim_memory()
        freed = max(0, before - psutil.Process().memory_info().rss)
        log.info("released %s: %s less resident", ", ".join(tags), format_bytes(freed))
        return {"freed_bytes": freed}

    def _check(self, tags: list[str]) -> None:
        """InvalidRequest for what cannot be released."""
        config, why = self._config, ""
        if not config.memory.enable_memory_saver:
            raise InvalidRequest(
                "release_memory_occupation: this server keeps its memory; start it with "
                "--enable-memory-saver"
            )
        if not isinstance(self._model, Module):
            why = "this model runs by transformers"
        elif config.model.delete_ckpt_after_loading:
            why = "--delete-ckpt-after-loading leaves nothing to read them from"
        elif config.parallel.enable_eplb:
            why = "--enable-eplb moves experts, which the checkpoint does not know"
        elif is_offloading(config):
            why = "--cpu-offload-gb or --offload-group-size keeps part of them on the host"
        elif config.execute.enable_torch_compile:
            why = "--enable-torch-compile has compiled them into its steps"
        if WEIGHTS in tags and why:
            raise InvalidRequest(
                f"tags: weights stay, since {why}; 'kv_cache' can be released", param="tags"
            )

    def _resume(self, args: dict[str, Any]) -> Future[Callable[[], None]] | None:
        """Read released weights again, in a thread; pools fill as steps write to them."""
        tags = args["tags"]
        if KV_CACHE in tags:
            for number, tensor in enumerate(self._pool_tensors()):
                if number in self._storage_bytes:
                    tensor.untyped_storage().resize_(self._storage_bytes.pop(number))
                    tensor.zero_()
        self._released -= {*tags} - {WEIGHTS}
        if WEIGHTS not in tags:
            self._end_release(tags)
            return None
        thread = ThreadPoolExecutor(1, "resume weights")
        loaded = thread.submit(self._load_weights)  # also where they are there: as other ranks
        thread.shutdown(wait=False)
        return loaded

    def _load_weights(self) -> Callable[[], None]:
        started_s, failure = time.perf_counter(), ""
        try:
            for contents, fill in self._contents():
                if contents.is_dropped:  # no update has brought others
                    fill(self._source())
            if self._device.where.type == "cuda":  # copies on this thread's stream
                torch.cuda.synchronize(self._device.where)
        except (RadixError, OSError, RuntimeError, ValueError, MemoryError) as error:
            failure = str(error) or type(error).__name__
        seconds = time.perf_counter() - started_s

        def finish() -> None:
            if failure:
                self._drop_weights()
                raise InvalidRequest(f"the weights stay released: {failure}")
            for contents, _ in self._contents():
                contents.is_dropped = False
            self._released.discard(WEIGHTS)
            self._end_release([f"weights, read in {format_seconds(seconds)}"])

        return finish

    def _end_release(self, what: Sequence[str]) -> None:
        if not self._released:
            self._record_graphs()
        log.info("resumed %s", ", ".join(what))

    def _drop_pools(self) -> None:
        """On the host addresses stay, for the step program; torch's allocator of a device frees
        whole storages."""
        for number, tensor in enumerate(self._pool_tensors()):
            storage = tensor.untyped_storage()
            if self._device.is_synchronous:
                drop_pages(tensor)
            elif storage.nbytes():
                self._storage_bytes[number] = storage.nbytes()
                storage.resize_(0)

    def resident_pool_bytes(self) -> int:
        """Bytes of the pools that are in memory now: on a host, pages get theirs when they are
        first written."""
        pools = self._pool_tensors()
        if self._device.is_synchronous:
            return sum(map(resident_bytes, pools))
        return sum(pool.untyped_storage().nbytes() for pool in pools)

    def _drop_weights(self) -> None:
        for contents, _ in self._contents():
            contents.drop()

    def _contents(self) -> Iterator[tuple[Contents, Callable[[WeightsSource | None], object]]]:
        """What loading has made of model and drafter, and what makes it again."""
        if isinstance(self._model, Module) and self._model.contents is not None:
            yield self._model.contents, self._fill
        if self._draft is not None:
            first, *later = [root.contents for root in self._draft.roots if root.contents]
            yield first, self._draft.fill  # which loads all modules
            yield from ((contents, lambda _: None) for contents in later)

    def _pool_tensors(self) -> Iterator[Tensor]:
        drafts = [attn for _, attn in self._draft.modules] if self._draft else []
        for attn in (self._attn, *drafts):
            for pool in attn.pools:
                yield from pool.tensors if pool is not None else ()
        if self._pools.states is not None:
            for layer in self._pools.states.layers:
                yield from layer


def give_back_heap() -> None:
    """Return what is not used any more to the system, freed memory of the C heap too."""
    gc.collect()
    trim_heap()
