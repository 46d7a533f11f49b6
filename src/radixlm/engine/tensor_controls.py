"""TensorControls: operators' commands that concern tensors: memory in use, weights, profiles."""

from collections.abc import Callable
from typing import Any

import psutil
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.engine.profile import Profiler
from radixlm.wire.replies import GRAPH_KINDS


class TensorControls:
    """Commands that the scheduler passes to the executor. ``weight`` returns a parameter by its
    name in the checkpoint, None if there is none of that name."""

    def __init__(
        self,
        weight: Callable[[str], Tensor | None],
        weight_bytes: int,
        kv_bytes: int,
        token_capacity: int,
        free_bytes: int,
        profiler: Profiler,
        waited_s: Callable[[], float] = float,
        window_capacity: int | None = None,
    ) -> None:
        """``free_bytes``: what this rank might take before it loaded anything. ``waited_s``:
        seconds that it has waited for others since the last call. ``window_capacity``: tokens in
        the pools of layers with a sliding window, None without such pools."""
        self._weight, self._profiler, self._take_waited_s = weight, profiler, waited_s
        self._waited_s = 0.0
        self._pool_bytes: Callable[[], int] | None = None
        self._pending_pages: Callable[[], int] | None = None
        self._memory: dict[str, Any] = {
            "weight": round(weight_bytes / 2**30, 3),
            "kvcache": round(kv_bytes / 2**30, 3),
            "startup_available": round(free_bytes / 2**30, 3),
            "token_capacity": token_capacity,
            "token_capacity_swa": window_capacity,
            "graph": dict.fromkeys(GRAPH_KINDS, 0.0),
        }

    def note_graphs(self, num_bytes: int) -> None:
        """Set the memory that the recorded graphs use. All kinds use the same, which is told as
        that of the graphs of decode steps."""
        self._memory["graph"]["decode"] = round(max(0, num_bytes) / 2**30, 3)

    def note_mapped(self, num_bytes: int) -> None:
        """Set the bytes of weights that lie in a mapped file, part of ``weight``."""
        self._memory["weight_mapped"] = round(num_bytes / 2**30, 3)

    def note_pools(self, resident_bytes: Callable[[], int]) -> None:
        """Set what tells how much of ``kvcache`` is in memory."""
        self._pool_bytes = resident_bytes

    def note_kept(self, pending_pages: Callable[[], int]) -> None:
        """Set what tells how many cached pages a kill now would lose (--warm-restart)."""
        self._pending_pages = pending_pages

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "memory_usage": self._memory_usage,
            "weights_by_name": self._weights_by_name,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
        }

    def _memory_usage(self, args: dict[str, Any]) -> dict[str, Any]:
        self._waited_s += self._take_waited_s()
        info = psutil.Process().memory_info()
        # of ``rss_bytes``, what is in files and shared memory; Linux alone tells it
        own = {"rss_bytes": info.rss, "rss_shared_bytes": getattr(info, "shared", 0)}
        # half a millisecond for each GB of the pools
        if self._pool_bytes is not None and not args.get("is_brief"):
            own["kvcache_resident_bytes"] = self._pool_bytes()
        if self._pending_pages is not None:
            own["kvcache_pending_pages"] = self._pending_pages()
        return {**self._memory, **own, "wait_seconds": self._waited_s}

    def _weights_by_name(self, args: dict[str, Any]) -> Any:
        """The first ``truncate_size`` rows of a parameter, as nested lists."""
        name = str(args.get("name"))
        rows = max(0, int(args.get("truncate_size") or 100))
        weight = self._weight(name)
        if weight is None:
            raise InvalidRequest(f"name: the model has no parameter {name!r}", param="name")
        return weight[:rows].float().tolist()
