"""TreeView: the most used nodes of the radix tree, found in short slices between two steps.

A whole walk of a large tree takes longer than a step, so it goes on for ``SLICE_S`` a turn of the
loop (``IDLE_SLICE_S`` while nothing runs), and the answer comes when it has seen every node. While
nobody asks, nothing is done but a note of the time once a second.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from radixlm.memory.prefix.node import TOKEN_BYTES, Node
from radixlm.memory.prefix.radix import RadixCache
from radixlm.scheduler.control import Commands, ControlHandler
from radixlm.step.plan import Int32Array
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import Control

NUM_BEST: Final = 300
SLICE_S: Final = 40e-6
IDLE_SLICE_S: Final = 1e-3
STRIDE: Final = 8  # nodes between two looks at the clock
MAX_IDS: Final = 48  # of a node, for its text
MAX_NAMESPACES: Final = 256
SERIALS: Final = 1 << 40  # of one cache, where there are several


class TreeView(Commands):
    """Answers who asks for the tree, of all attention groups."""

    def __init__(self, handler: ControlHandler) -> None:
        caches = [part.prefix_cache for part in handler.scheduler.kv_manager.parts]
        self._caches = [cache for cache in caches if isinstance(cache, RadixCache)]
        self._clock = clock = time.monotonic
        self.verbs = {"tree": self._ask, "tree_path": self._ask_path}
        self._asked: list[str] = []
        self._with_ids = False
        self._work: Iterator[None] = iter(())
        self._answer: dict[str, Any] = {}
        # when each cache's count of calls stood where: its nodes know calls, not seconds
        self._ticks = [deque([(0, clock())], maxlen=3600) for _ in self._caches]

    @property
    def num_pending(self) -> int:
        """Calls without an answer."""
        return len(self._asked)

    def note(self, now_s: float) -> None:
        """Once a second: remember the time."""
        for cache, ticks in zip(self._caches, self._ticks, strict=True):
            ticks.append((cache.num_calls, now_s))

    def _ask(self, control: Control) -> None:
        """The most used nodes, when a walk has ended; calls that come meanwhile share it."""
        if not self._asked:
            self._with_ids, self._work = bool(control.args.get("with_ids")), self._look()
        self._asked.append(control.call_id)

    def _ask_path(self, control: Control) -> ControlReply:
        """The nodes along a prompt."""
        ids = np.asarray(control.args["ids"], np.int32)
        return ControlReply(control.call_id, True, data=self._find(ids))

    def advance(self, is_idle: bool) -> list[ControlReply]:
        """Work on for a slice; the calls that are answered by it."""
        limit_s = self._clock() + (IDLE_SLICE_S if is_idle else SLICE_S)
        for _ in self._work:
            if self._clock() >= limit_s:
                return []
        asked, self._asked = self._asked, []
        return [ControlReply(call_id, True, data=self._answer) for call_id in asked]

    def _look(self) -> Iterator[None]:
        """Make ``_answer``; each turn is short."""
        shown: list[list[Any]] = []
        num_nodes = num_tokens = 0
        for index, cache in enumerate(self._caches):
            best: list[tuple[int, int, int, Node]] = []
            stack = list(cache.tree.root.children.values())
            while stack:
                yield
                for _ in range(min(STRIDE, len(stack))):
                    node = stack.pop()
                    if not node.is_alive:
                        continue
                    stack.extend(node.children.values())
                    num_nodes += 1
                    num_tokens += len(node.tokens) // TOKEN_BYTES
                    entry = (node.num_hits, node.last_access, node.serial, node)
                    if len(best) < NUM_BEST:
                        heapq.heappush(best, entry)
                    elif entry > best[0]:
                        heapq.heapreplace(best, entry)
            done: set[Node] = set()
            for *_, node in sorted(best, reverse=True):
                yield
                while node.is_alive and node.parent is not None and node not in done:
                    done.add(node)
                    shown.append(self._row(index, node))
                    node = node.parent
        rest = num_tokens - sum(row[2] for row in shown)
        self._answer = {
            "total_tokens": num_tokens,
            "nodes": shown,
            # the tree may change while it is looked at
            "rest": {"nodes": max(0, num_nodes - len(shown)), "tokens": max(0, rest)},
        }

    def _row(self, index: int, node: Node) -> list[Any]:
        """A node: serial, its parent's (0: the root), tokens, hits, locks, seconds since its last
        use, whether its window is gone, its first token ids or None."""
        parent, first = node.parent, index * SERIALS
        assert parent is not None
        is_tombstone = self._caches[index].window is not None and node.window_pages is None
        ids = np.frombuffer(node.tokens, np.int32)[:MAX_IDS].tolist() if self._with_ids else None
        return [
            first + node.serial,
            first + parent.serial if parent.parent is not None else 0,
            len(node.tokens) // TOKEN_BYTES,
            node.num_hits,
            node.num_locks,
            self._age_s(index, node.last_access),
            is_tombstone,
            ids,
        ]

    def _age_s(self, index: int, access: int) -> float:
        """Seconds since the call ``access`` of a cache, to about a second."""
        ticks, now_s = self._ticks[index], self._clock()
        place = bisect_right(ticks, access - 1, key=lambda tick: tick[0])
        return round(now_s - ticks[max(place - 1, 0)][1], 1)

    def _find(self, ids: Int32Array) -> dict[str, Any]:
        """The nodes along the longest cached prefix of ``ids``, whosever it is."""
        path: list[int] = []
        most = 0
        for index, cache in enumerate(self._caches):
            for namespace in cache.tree.namespaces[:MAX_NAMESPACES]:
                steps = cache.tree.walk(ids, namespace)
                tokens = sum(count for _, count in steps) * cache.page_size
                if tokens > most:
                    most = tokens
                    path = [index * SERIALS + node.serial for node, _ in steps]
        return {"path": path, "tokens": most}
