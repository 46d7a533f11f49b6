"""A replica: groups of requests that step together, each with a scheduler of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from radixlm.wire.replies import TokenDelta
from radixlm.wire.requests import TokenizedRequest
from simulate.layout import StepTime, Work
from simulate.worker import Worker

Told = Callable[["Unit", Worker, float, Sequence[str], Sequence[TokenDelta]], None]


class Unit:
    """All groups begin a step at once, and the slowest says when it ends. ``ends_s``: ends of the
    steps that were begun; a group that plans nothing waits for the next.

    ``tell(unit, worker, now_s, first, deltas)``: requests that got their first token, and news."""

    def __init__(
        self, time: StepTime, workers: Sequence[Worker], draw: np.random.Generator, tell: Told
    ) -> None:
        self.time, self.workers, self._draw, self._tell = time, list(workers), draw, tell
        self.ends_s = np.zeros(0)
        self.version = 0  # events of earlier versions are void
        self.busy_s = 0.0
        self.num_steps = self.num_prompt_tokens = 0
        self.num_row_steps = 0
        self.is_up = True

    @property
    def next_s(self) -> float | None:
        """When something will have happened here."""
        return float(self.ends_s[-1]) if len(self.ends_s) else None

    def send(self, worker: Worker, request: TokenizedRequest, now_s: float) -> None:
        """A request has come. Steps that were begun together end with the one that runs now, if the
        scheduler may take the request up then."""
        worker.inbox.append(request)
        if not len(self.ends_s):
            self._begin(now_s)
        elif len(self.ends_s) > 1 and worker.can_admit:
            self.ends_s = self.ends_s[: int(np.searchsorted(self.ends_s, now_s)) + 1]
            self.version += 1

    def step(self, now_s: float) -> None:
        """The steps have ended."""
        self._pass(len(self.ends_s), now_s)
        self._begin(now_s)

    def _pass(self, num: int, now_s: float) -> None:
        """So many steps have passed: commit what has ended, or what has to plan anew."""
        if num:
            self.busy_s += float(self.ends_s[num - 1]) - self._start_s
            self.num_steps += num
        self.ends_s = np.zeros(0)
        for worker in self.workers:
            if worker.items is None:
                continue
            worker.done, worker.left = worker.done + num, worker.left - num
            self.num_row_steps += num * len(worker.items.starts)
            if worker.left <= 0 or worker.inbox:
                first = [item.rid for item in worker.items.prefills if item.emit]
                self._tell(self, worker, now_s, first, worker.finish())

    def _begin(self, now_s: float) -> None:
        for worker in self.workers:
            if worker.items is None:
                worker.begin()
        busy = [worker for worker in self.workers if worker.items is not None]
        self.version += 1
        if not busy:
            return
        self._start_s = now_s
        num = min(worker.left for worker in busy)
        self.ends_s = now_s + np.cumsum(self.time.seconds(self._work(num), self._draw))

    def _work(self, num: int) -> Work:
        """The next ``num`` steps of all groups."""
        size = len(self.workers)
        rows, chunks, ends = np.zeros((3, size), np.int64)
        pairs, cached_GM = np.zeros(size), np.zeros((size, num))
        for g, worker in enumerate(self.workers):
            if worker.items is not None:
                rows[g], chunks[g], ends[g] = worker.rows, worker.chunk, worker.ends
                pairs[g] = worker.pairs
                cached_GM[g] = worker.cached + worker.rows * (worker.done + np.arange(num))
        self.num_prompt_tokens += int(chunks.sum())
        return Work(rows, chunks, pairs, ends, cached_GM)

    def die(self, now_s: float) -> None:
        """Steps that had ended count; the one that ran is lost."""
        num = int(np.searchsorted(self.ends_s, now_s, "right"))
        for worker in self.workers:
            if worker.items is not None and worker.items.drafts is not None and num:
                worker.done, worker.left = worker.done + num, 0
        self.ends_s, self.version, self.is_up = np.zeros(0), self.version + 1, False
        for worker in self.workers:
            if worker.items is not None and worker.items.drafts is not None and worker.done:
                self._tell(self, worker, now_s, (), worker.finish())
