"""A tier in a dict, the pages of a fake executor as bytes, and a page worker whose threads run only
when the test lets them: each turn up to the next call of a tier, so that the same seed gives the
same order."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np

from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.features.page_arrivals import PageArrivals
from radixlm.engine.features.page_puts import WritePolicy
from radixlm.parallel.page_port import PagePort
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.tiers.base import (
    UNANSWERED,
    Command,
    Get,
    Hint,
    Lookup,
    PageRecord,
    Payload,
    Report,
    Tier,
)  # fmt: skip
from radixlm.tiers.worker import PageWorker, _Task
from tests.fakes.executor import FakeExecutor

LIMIT_S = 20.0


class DictTier(Tier):
    """Keeps everything; ``lose`` forgets, ``short`` makes gets give fewer pages than were found."""

    def __init__(self, name: Literal["host", "storage", "peer"] = "host") -> None:
        self.name, self.medium = name, "CPU_PINNED"
        self.pages: dict[bytes, PageRecord] = {}
        self.num_got = self.num_put = 0
        self.short = lambda count: count
        self.breaks = False

    def contains(self, keys: Sequence[bytes], hint: Hint | None = None) -> int:
        self._fail()
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, keys: Sequence[bytes], out: Sequence[Payload], hint: Hint | None = None) -> int:
        self._fail()
        count = self.short(self.contains(keys))
        for key, row in zip(keys[:count], out, strict=False):
            row[:] = self.pages[key].payload
        for row in out[count:]:
            row[:] = 0xFF
        self.num_got += count
        return count

    def put(self, records: Sequence[PageRecord]) -> None:
        self._fail()
        for record in records:
            old = self.pages.setdefault(record.key, record)
            assert np.array_equal(old.payload, record.payload), "one key, two contents"
            assert np.array_equal(old.tokens, record.tokens) and old.parent == record.parent
            self.num_put += 1

    def recent(self, count: int) -> list[bytes]:
        return list(self.pages)[-count:]

    def used(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self.pages:
                self.pages[key] = self.pages.pop(key)

    def lose(self, rng: random.Random, share: float) -> None:
        self.pages = {key: one for key, one in self.pages.items() if rng.random() > share}

    def clear(self) -> None:
        self.pages.clear()

    def stats(self) -> dict[str, float]:
        return {"pages": len(self.pages)}

    def close(self) -> None:
        """Nothing to give up."""

    def _fail(self) -> None:
        if self.breaks:
            raise OSError("the disk is gone")


class FakePages:
    """The pages of an executor as bytes."""

    is_on_host = True

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor

    def _rows(self, space: int) -> Any:
        return (self.executor.kv, self.executor.window_kv)[space]

    def nbytes(self, space: int) -> int:
        return 8 * self.executor.page_size if len(self._rows(space)) else 0

    def fence(self) -> None:
        return None

    def read(
        self, space: int, pages: Any, out: Sequence[Payload], fence: Any = None,
        *, is_team: bool = False,
    ) -> None:  # fmt: skip
        for row, page in zip(out, pages.tolist(), strict=True):
            row[:] = self._rows(space)[page].view(np.uint8)

    def write(
        self, space: int, pages: Any, data: Sequence[Payload], fence: Any = None,
        *, is_team: bool = False,
    ) -> None:  # fmt: skip
        for row, page in zip(data, pages.tolist(), strict=True):
            assert page, "page 0 is nobody's"
            self._rows(space)[page] = row.view(np.int64)


class _Forgotten(BaseException):
    """The test is over and has left a thread waiting."""


class _Turn:
    """A thread that runs only between ``go`` and its next ``pause``."""

    def __init__(self, work: Any) -> None:
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over, self.error = False, None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Any) -> None:
        try:
            self._wait()
            work(self.pause)
        except _Forgotten:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._theirs.release()

    def pause(self) -> None:
        self._theirs.release()
        self._wait()

    def _wait(self) -> None:
        if not self._mine.acquire(timeout=LIMIT_S):
            raise _Forgotten

    def go(self) -> None:
        self._mine.release()
        assert self._theirs.acquire(timeout=LIMIT_S), "a thread of the worker hangs"
        if self.error is not None:
            raise self.error


class TurnPort(PagePort):
    """``eagerness``: how likely a job goes on for a turn at each poll; ``at_once``: how likely a
    command is carried out before ``send`` returns."""

    at_once = 0.0

    def __init__(self, worker: PageWorker, rng: random.Random, eagerness: float = 0.5) -> None:
        super().__init__(worker)
        self._rng, self.eagerness = rng, eagerness
        self._turns: list[_Turn] = []
        self.log: list[Command] = []
        self._local = threading.local()
        # only one thread runs at a time, and a lock would be held while it pauses
        worker._tier_locks = {id(tier): nullcontext() for tier in worker.tiers}  # type: ignore[misc]
        for tier in worker.tiers:
            for name in ("get", "put", "contains"):
                setattr(tier, name, self._paused(getattr(tier, name)))

    def _paused(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            if (pause := getattr(self._local, "pause", None)) is not None:
                pause()
            return method(*args)

        return call

    def send(self, command: Command) -> None:
        self.log.append(command)
        worker = self._worker
        if isinstance(command, UNANSWERED):
            worker.send(command, self._reports.put)
            return
        self._open.add(command.job)
        task = _Task(command, self._reports.put, worker._epoch, None)

        if self.at_once and self._rng.random() < self.at_once:
            task.answer(worker._do(task))
            return

        def work(pause: Any) -> None:
            self._local.pause = pause
            task.answer(worker._do(task))

        self._turns.append(_Turn(work))

    def poll(self) -> list[Report]:
        for turn in self._turns:
            if self._rng.random() < self.eagerness:
                turn.go()
        self._turns = [turn for turn in self._turns if not turn.is_over]
        return super().poll()

    def settle(self, timeout_s: float) -> list[Report]:
        eagerness, self.eagerness = self.eagerness, 1.0
        found: list[Report] = []
        while self._turns:
            found += self.poll()
        self.eagerness = eagerness
        return found + super().poll()


def make_arrivals(
    executor: FakeExecutor,
    kv_manager: KVCacheManager,
    tiers: Sequence[Tier],
    rng: random.Random,
    feature: PageArrivals,
    eagerness: float = 0.5,
) -> TurnPort:
    """Binds the feature to a scheduler over a fake executor."""
    port = make_port(executor, tiers, rng, feature, eagerness)
    feature.bind(kv_manager, [port])
    return port


def make_port(
    executor: FakeExecutor,
    tiers: Sequence[Tier],
    rng: random.Random,
    feature: PageArrivals,
    eagerness: float = 0.5,
) -> TurnPort:
    """The worker of an attention group over its fake executor."""
    pages, size = FakePages(executor), executor.page_size
    worker = PageWorker(tiers, pages, size, feature.options.window_pages)
    return TurnPort(worker, rng, eagerness)


def new_feature(
    page_size: int, window: int = 0, write_policy: WritePolicy | None = None, **options: Any
) -> PageArrivals:
    """``window``: tokens of windows (1: states)."""
    some = ArrivalOptions(
        page_size,
        page_bytes=(8 * page_size, 8 * page_size),
        window_pages=-(-window // page_size),
        **{"policy": "wait_complete", **options},
    )
    return PageArrivals(b"m" * 32, some, write_policy)


SHARED: list[Tier] = []  # of the engines of a test


def shared_tiers(config: Any, manifest: Any) -> list[Tier]:
    """For ``engine.tiers.SOURCES``: of each rank a part of its own."""
    return [RankTier(tier, manifest.storage_digest) for tier in SHARED]


class RankTier(DictTier):
    """A tier that several ranks and engines use, with the pages of one rectangle and layout."""

    def __init__(self, whole: Any, digest: bytes) -> None:
        super().__init__(whole.name)
        self._whole, self._digest = whole, digest
        self.parts: dict[bytes, DictTier] = whole.__dict__.setdefault("parts", {})
        mine = self.parts.setdefault(digest, self)
        self.pages = mine.pages

    def get(self, keys: Any, out: Any, hint: Any = None) -> int:
        count = super().get(keys, out, hint)
        self._whole.num_got += count
        return count

    def put(self, records: Any) -> None:
        super().put(records)
        self._whole.num_put += len(records)


__all__ = ["DictTier", "Get", "Lookup", "TurnPort", "make_arrivals", "new_feature"]
