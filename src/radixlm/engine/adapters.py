"""AdapterLoader: reads adapters in a thread beside the steps, and hands them over between two."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from radixlm.base.errors import ConfigError, InvalidRequest, RadixError
from radixlm.base.record import replace
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.adapters import AdapterConfig
from radixlm.config.server_config import ServerConfig
from radixlm.engine.ranks import NO_PEERS, Peers
from radixlm.kernels.ops.lora import LoraLayout, PackedAdapter
from radixlm.layers.linear import Linear
from radixlm.lora.adapter import Adapter, LoraLimits, local_parts, read_adapter
from radixlm.lora.registry import Spool
from radixlm.lora.table import AdapterTable
from radixlm.lora.targets import EMBED, HEAD, AdapterTargets
from radixlm.models.build import Model
from radixlm.models.decoder import DecoderModel

log = logging.getLogger(__name__)


class AdapterLoader:
    """The adapters of one engine, by the numbers that intake has given them. Outlives the
    schedulers of the engine."""

    def __init__(
        self, config: ServerConfig, model: Model, device: torch.device, peers: Peers = NO_PEERS
    ) -> None:
        """ConfigError for a model that takes no adapters."""
        if not isinstance(model, DecoderModel):
            raise ConfigError(
                "--enable-lora: this model takes no adapters; native decoders do (--model-impl "
                "radixlm)"
            )
        options = config.adapters
        self._whole = model.without_weights() if model.is_part else None
        self._targets = targets = AdapterTargets(model, self._whole)
        model.adapt(tuple(targets.own_sites.values()))
        self._sites = {path: number for number, path in enumerate(targets.own_sites)}
        ends = {HEAD: model.head_site, EMBED: model.embed_site}
        self._sites |= {path: site for path, site in ends.items() if targets.has_end(path)}
        self._is_first = model.context.ranks.place.rank == 0
        self.table = AdapterTable(model.context.kernels, self._layout(model, device, options))
        self._limits = LoraLimits(options.max_lora_rank, options.lora_target_modules)
        self._thread = ThreadPoolExecutor(1, "load adapters")
        self._loading: dict[int, Future[Callable[[], dict[str, Any]]]] = {}
        self._failed: dict[int, str] = {}
        self._of_base: dict[int, str] = {}  # paths of those that have been made with base weights
        self._facts: dict[int, dict[str, Any]] = {}  # of those that are loaded
        self._peers = peers
        self._copies: dict[int, Spool] = {}  # of those that came in requests to another host

    def _layout(
        self, model: DecoderModel, device: torch.device, options: AdapterConfig
    ) -> LoraLayout:
        layers = self._targets.own_sites
        linear = frozenset(
            self._sites[path] for path, one in layers.items() if isinstance(one, Linear)
        )
        layout = LoraLayout(device, linear, model.context.compute_dtype)
        limits = {"max_adapters": options.max_loras_per_batch, "max_rank": options.max_lora_rank}
        return replace(layout, **{name: n for name, n in limits.items() if n is not None})

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What intake asks of it."""
        return {
            "load_lora_adapter": self._load,
            "unload_lora_adapter": self._unload,
            "keep_lora_adapters": self._keep,
        }

    def is_ready(self, number: int) -> bool:
        """Whether requests may use the adapter now. InvalidRequest if they never may."""
        if number in self._facts:
            return True
        if number not in self._loading:
            why = self._failed.get(number, "it is not loaded")
            raise InvalidRequest(f"lora_path: the adapter cannot be used: {why}", "lora_path")
        return False

    def _load(self, args: dict[str, Any]) -> Any:
        """Read ``path`` as adapter ``number``. With a ``digest``, no other content will do.
        ``is_sent``: it came in a request, to rank 0's host."""
        number = int(args["number"])
        if number in self._facts:
            return self._facts[number]
        self._failed.pop(number, None)
        if number not in self._loading:
            wanted = (number, str(args["path"]), args.get("digest"))
            is_sent = bool(args.get("is_sent"))
            self._loading[number] = self._thread.submit(self._read, *wanted, is_sent)
        return self._loading[number]

    def _read(
        self, number: int, path: str, digest: str | None, is_sent: bool
    ) -> Callable[[], dict[str, Any]]:
        started_s = time.perf_counter()
        try:
            if is_sent and (copy := self._peers.bring_adapter(path)) is not None:
                self._copies[number], path = copy, str(copy.path)
            adapter, packed = self._made(path, self._targets)
            is_checked = self._is_first or not adapter.has_weights
            if is_checked and digest not in (None, adapter.digest):
                raise InvalidRequest(
                    f"{path}: the files have changed since the adapter was loaded (digest "
                    f"{adapter.digest[:8]}, then {str(digest)[:8]}); load it again"
                )
        except (RadixError, OSError, RuntimeError, MemoryError) as error:
            return partial(self._fail, number, str(error))
        return partial(self._publish, number, adapter, packed, time.perf_counter() - started_s)

    def _made(self, path: str, targets: AdapterTargets) -> tuple[Adapter, PackedAdapter]:
        adapter = read_adapter(Path(path), targets, self._limits)
        by_site = {
            self._sites[where]: of_layer
            for where, of_layer in local_parts(adapter, targets).items()
            if where in self._sites  # else another stage has the layer
        }
        return adapter, self.table.pack(by_site)

    def renew(self, model: DecoderModel) -> Callable[[], dict[int, str]]:
        """Make the adapters that depend on base weights (DoRA, whole modules) for those of
        ``model``, a copy of ours. What puts them in place between two steps; its digests by
        number."""
        targets = AdapterTargets(model, self._whole)
        known = list(self._of_base.items())  # others may come meanwhile
        made = {number: self._made(path, targets) for number, path in known}

        def publish() -> dict[int, str]:
            for n, path in self._of_base.items() - known:
                try:
                    made[n] = self._made(path, self._targets)
                except (RadixError, OSError, RuntimeError, MemoryError) as error:
                    log.error("adapter %s stays as of the old base weights: %s", path, error)
            for number, (adapter, packed) in made.items():
                if number in self._of_base:
                    self.table.drop(number)
                    self.table.put(number, packed)
                    self._facts[number] = {**self._facts[number], "digest": adapter.digest}
            return {number: one.digest for number, (one, _) in made.items()}

        return publish

    def _fail(self, number: int, why: str) -> dict[str, Any]:
        self._loading.pop(number, None)
        self._copies.pop(number, None)
        self._failed[number] = why
        raise InvalidRequest(why, "lora_path")

    def _publish(
        self, number: int, adapter: Adapter, packed: PackedAdapter, seconds: float
    ) -> dict[str, Any]:
        self._loading.pop(number, None)
        if adapter.has_weights:
            self._of_base[number] = adapter.path
        self.table.put(number, packed)
        size, took = format_bytes(adapter.num_bytes), format_seconds(seconds)
        log.info("adapter %s: rank %d, %s, in %s", adapter.path, adapter.max_rank, size, took)
        self._facts[number] = {
            "digest": adapter.digest,
            "num_bytes": adapter.num_bytes,
            "rank": adapter.max_rank,
            "invocation": adapter.config.invocation,
            "seconds": seconds,
        }
        return self._facts[number]

    def _unload(self, args: dict[str, Any]) -> None:
        """Forget adapter ``number``, which no request uses."""
        number = int(args["number"])
        self._facts.pop(number, None)
        self._of_base.pop(number, None)
        self._copies.pop(number, None)
        self._failed.pop(number, None)
        self.table.drop(number)

    def _keep(self, args: dict[str, Any]) -> None:
        """Forget all adapters but ``numbers``: an unload may have been lost with a scheduler."""
        for number in set(self._facts) - set(args["numbers"]):
            self._unload({"number": number})
