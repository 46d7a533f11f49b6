"""PageWorker: moves pages between a rank's pools and its tiers, in threads of its own, or at once.

The scheduler says which pages (commands), the worker moves bytes and reports. Bytes of a tier go to
the pool only when they are verified and the job is not cancelled, page by page from the start. A
fault of a tier is a miss: it is counted and logged once, never raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import InvalidRequest
from radixlm.tiers.at_once import get_at_once, put_at_once, rows_at_once
from radixlm.tiers.background import LOW_PRIORITY, Background, be_nice
from radixlm.tiers.base import (
    UNANSWERED,
    Admin,
    Arrived,
    Cancel,
    Command,
    Done,
    Found,
    Get,
    Lasting,
    Lookup,
    PageRecord,
    Pages,
    PageStore,
    Payload,
    Put,
    Report,
    Room,
    Rooms,
    Rows,
    Tier,
    Told,
    Used,
    failed,
    is_lasting,
    is_lending,
)
from radixlm.tiers.keys import window_key
from radixlm.tiers.operations import administer
from radixlm.tiers.prefault import Spans, prefault
from radixlm.tiers.row_memory import RowMemory
from radixlm.wire.transfer import Hint

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 16 << 20  # moved between two looks at whether a job was cancelled
MAX_ENDS: Final = 4  # of a prefix with windows or states, how many places are reported
BEHIND_BYTES: Final = 4 << 20  # the same, of pages that nobody waits for
PEER_THREADS: Final = 32  # pulls that wait for other engines at the same time
STOP_WAIT_S: Final = 5.0

Answer = Callable[[Report], None]


class _Task:
    """A command on its way through the worker."""

    def __init__(self, command: Command, answer: Answer, epoch: int, fence: Any) -> None:
        self.command, self.answer, self.epoch, self.fence = command, answer, epoch, fence
        self.start_s = time.perf_counter()
        self.rows: list[Payload] | None = None  # of the host tier, for the thread of the steps
        self.moved: dict[str, list[float]] = {}  # by tier: pages, bytes, seconds

    def note(self, tier: str, pages: int, num_bytes: int, seconds: float) -> None:
        entry = self.moved.setdefault(tier, [0, 0, 0.0])
        for i, value in enumerate((pages, num_bytes, seconds)):
            entry[i] += value

    def done(self, num_pages: int) -> Done:
        tiers = [(name, int(p), int(b), s) for name, (p, b, s) in self.moved.items()]
        job = self.command.job
        return Done(job, num_pages, tiers, time.perf_counter() - self.start_s)


class PageWorker:
    """Owns ``tiers``, asked in their order; ``pages``: the pools; ``window_pages``: how many pages
    of space 1 the end of a prefix needs (0: there is no such space); ``group``: of data-parallel
    attention, whose pages it moves."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        pages: PageStore,
        page_size: int,
        window_pages: int = 0,
        group: int = 0,
    ) -> None:
        self.tiers, self.group = list(tiers), group
        self._pages, self._page_size, self._window_pages = pages, page_size, window_pages
        if not pages.nbytes(1):
            self._window_pages = 0  # another rank has such layers
        self._queues: dict[str, SimpleQueue[_Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # held while the pools are written
        self._tier_locks: dict[int, threading.Lock] = {}
        self._maker = Background("radixlm-memory", LOW_PRIORITY)
        self.staging: RowMemory | None = None  # for pages on their way to or from other engines
        self._epoch, self._cancelled = 0, set[int]()
        self.errors: Counter[str] = Counter()  # by tier
        self.facts: dict[str, Any] = {}  # of the pages, for operators
        self.attach: Callable[[str, Any], Tier] | None = None  # makes a storage
        # told of pages that come to another group: (group, pages)
        self.others_get: Callable[[int, Pages], None] = lambda group, pages: None

    # ---- called by the executor's thread ---------------------------------------------------------

    def send(self, command: Command, answer: Answer) -> None:
        """Begin a command, behind all steps that this thread has launched. ``answer`` is called
        here or by a thread of the worker, once or, of a Get, several times."""
        if isinstance(command, Cancel):
            self._cancelled.add(command.job)
            return
        if isinstance(command, Used):
            for tier in self.lasting():
                tier.used(command.keys)
            return
        if isinstance(command, Room):
            for room in (tier for tier in self.tiers if isinstance(tier, Rooms)):
                (room.open_room if command.is_open else room.close_room)(command.room)
            return
        task = _Task(command, answer, self._epoch, self._pages.fence())
        if isinstance(command, (Get, Put)):
            task.rows = rows_at_once(command, self.tiers, self._pages)
            if task.rows is not None:
                self._carry_out(task)
                return
        name, count = "gets", 1
        if isinstance(command, Put | Admin):
            name = "puts"
        elif command.hint is not None:
            name, count = "pulls", PEER_THREADS
        if name not in self._queues:
            self._queues[name] = SimpleQueue()
            for _ in range(count):
                args = self._queues[name], name
                thread = threading.Thread(target=self._run, args=args, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queues[name].put(task)

    def follow(self, group: int, command: Command, answer: Callable[[Report | None], None]) -> None:
        """``send`` a command of a group, if it is this rank's; else the answer is None at once."""
        if group == self.group:
            self.send(command, answer)
            return
        if isinstance(command, Get):
            self.others_get(group, np.frombuffer(command.pages, np.int32))
        if not isinstance(command, UNANSWERED):
            answer(None)

    def find(self, command: Lookup) -> Found | None:
        """The answer to a lookup at once, by any thread; None where a tier must be waited for."""
        if all(tier.has_index for tier in self.tiers):
            return self._look_up(command, _Task(command, lambda report: None, self._epoch, None))
        return None

    def lasting(self) -> list[Lasting]:
        """The tiers that outlive the server."""
        return [tier for tier in self.tiers if is_lasting(tier)]

    def prefault(self, spans: Spans, free_bytes: int) -> None:
        """Make the memory of ``staging`` and of the pools while the engine is idle."""

        def work() -> None:
            if self.staging is not None:
                self.staging.make(self._maker.rest)
            prefault(spans, free_bytes, lambda: not self._maker.rest())

        self._maker.submit(work)

    def reset(self) -> None:
        """A new scheduler has the pools: when this returns, no older job writes to them."""
        with self._lock:
            self._epoch += 1
        self._cancelled.clear()

    def close(self) -> None:
        """End the threads, then close the tiers."""
        self.reset()
        self._maker.close(STOP_WAIT_S)
        for name, queue in self._queues.items():
            for _ in range(PEER_THREADS if name == "pulls" else 1):
                queue.put(None)
        deadline_s = time.monotonic() + STOP_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._queues, self._threads = {}, []
        for tier in self.tiers:
            self.guarded(tier, tier.close, None)

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Operators' commands: "tiers" with ``action`` and its arguments; and, on ranks that
        follow, "pages": the scheduler's commands, and "close_tiers"."""
        return {
            "tiers": self._control,
            "pages": self._follow,
            "close_tiers": lambda args: self.close(),
        }

    def _control(self, args: dict[str, Any]) -> Future[Callable[[], Any]]:
        future: Future[Callable[[], Any]] = Future()

        def settle(report: Report) -> None:
            assert isinstance(report, Told)
            if report.error:
                future.set_exception(InvalidRequest(report.error))
            else:
                future.set_result(lambda: report.data)

        rest = {name: value for name, value in args.items() if name != "action"}
        self.send(Admin(-1, str(args.get("action")), rest), settle)
        return future

    def _follow(self, args: dict[str, Any]) -> None:
        self.follow(args["group"], args["command"], args["answer"])

    # ---- threads ---------------------------------------------------------------------------------

    def _run(self, queue: SimpleQueue[_Task | None], name: str) -> None:
        if name == "puts":
            be_nice(LOW_PRIORITY)
        while (task := queue.get()) is not None:
            self._carry_out(task)
            del task

    def _carry_out(self, task: _Task) -> None:
        try:
            report = self._do(task)
        except Exception as error:
            log.exception("moving pages failed")
            report = failed(task.command, error)
        self._cancelled.discard(task.command.job)
        task.answer(report)

    def _do(self, task: _Task) -> Report:
        command = task.command
        if task.rows is not None:
            return self._move_at_once(task, task.rows)
        if isinstance(command, Lookup):
            return self._look_up(command, task)
        if isinstance(command, Get):
            return task.done(self._get(command, task))
        if isinstance(command, Put):
            return task.done(self._put(command, task))
        assert isinstance(command, Admin)
        return Told(command.job, administer(self, command))

    def _move_at_once(self, task: _Task, rows: Rows) -> Done:
        command, start_s, tier = task.command, time.perf_counter(), self.tiers[0]
        assert isinstance(command, (Get, Put)) and is_lending(tier)
        if isinstance(command, Put):
            count = put_at_once(command, rows, tier, self._pages)
        else:
            count = get_at_once(command, rows, partial(self._write, task))
        task.note(tier.name, len(rows), sum(map(len, rows)), time.perf_counter() - start_s)
        return task.done(count)

    def _is_over(self, task: _Task) -> bool:
        return task.epoch != self._epoch or task.command.job in self._cancelled

    def guarded(self, tier: Tier, call: Callable[..., Any], default: Any, *args: Any) -> Any:
        """The result of a tier's method; ``default`` if it fails."""
        is_free = tier.name == "peer" or is_lending(tier) or call == tier.contains
        locks = self._tier_locks
        try:
            with nullcontext() if is_free else locks.setdefault(id(tier), threading.Lock()):
                return call(*args)
        except Exception as error:
            self.errors[tier.name] += 1
            if self.errors[tier.name] == 1:
                log.warning("the %s tier failed (%s); more faults are only counted", tier.name,
                            error, exc_info=error)  # fmt: skip
            return default

    # ---- lookups ---------------------------------------------------------------------------------

    def _look_up(self, command: Lookup, task: _Task) -> Found:
        keys, hint = command.keys, command.hint
        if self._is_over(task):
            return Found(command.job, [])
        reached, tiers = self._reach(keys, hint)
        ends = list(range(1, reached + 1))
        if self._window_pages:
            ends = self._ends(keys[:reached], hint)
        return Found(command.job, ends, tiers, time.perf_counter() - task.start_s)

    def _reach(self, keys: Sequence[bytes], hint: Hint | None) -> tuple[int, list[tuple[str, int]]]:
        """How many leading keys the tiers have together, and how many each adds."""
        reached = 0
        found: list[tuple[str, int]] = []
        for tier in self.tiers:
            count = 0
            if reached < len(keys):
                count = self.guarded(tier, tier.contains, 0, keys[reached:], hint)
            found.append((tier.name, count))
            reached += count
        return reached, found

    def _ends(self, keys: Sequence[bytes], hint: Hint | None) -> list[int]:
        """The last few numbers of pages at which a prefix has its window or state."""
        ends: list[int] = []
        end = len(keys)
        while end > 0 and len(ends) < MAX_ENDS:
            first = max(0, end - self._window_pages)
            wanted = [window_key(key) for key in keys[first:end]]
            reached, _ = self._reach(wanted, hint)
            if reached == len(wanted):
                ends.append(end)
                end -= 1
            else:
                end = first + reached
        return ends[::-1]

    # ---- gets ------------------------------------------------------------------------------------

    def _get(self, command: Get, task: _Task) -> int:
        """Brings pages; how many leading ones are usable."""
        pages = np.frombuffer(command.pages, np.int32)
        count = self._bring(task, 0, command.keys, pages, command.hint)
        if command.windows:
            keys = [window_key(command.keys[i]) for i in command.windows]
            row = np.frombuffer(command.window_pages, np.int32)
            is_whole = count == len(pages)
            if self._pages.nbytes(1):
                is_whole = is_whole and self._bring(task, 1, keys, row, command.hint) == len(row)
            return count if is_whole else 0
        return count

    def _bring(
        self, task: _Task, space: int, keys: Sequence[bytes], pages: Pages, hint: Hint | None
    ) -> int:
        """Fills leading pages of a space from the tiers; how many."""
        command, nbytes, done = task.command, self._pages.nbytes(space), 0
        assert isinstance(command, Get)
        batch_bytes = BEHIND_BYTES if command.is_behind else BATCH_BYTES
        step = max(1, batch_bytes // max(1, nbytes))
        is_last_round = not nbytes
        while done < len(keys) and not is_last_round:
            is_last_round = True
            for number, tier in enumerate(self.tiers):
                while done < len(keys) and not self._is_over(task):
                    batch, start_s = slice(done, done + step), time.perf_counter()
                    data, is_end = self._rows(tier, keys[batch], nbytes, hint)
                    got = len(data)
                    if not got or not self._write(task, space, pages[batch][:got], data):
                        break
                    task.note(tier.name, got, got * nbytes, time.perf_counter() - start_s)
                    self._promote(task, space, number, done, data)
                    done, is_last_round = done + got, False
                    if space == 0 and not self._window_pages:
                        task.answer(Arrived(command.job, done))
                    if is_end:
                        break
        return done if nbytes else len(keys)

    def _rows(
        self, tier: Tier, keys: Sequence[bytes], nbytes: int, hint: Hint | None
    ) -> tuple[Rows, bool]:
        """Leading pages of a tier, and whether it has no more of them."""
        lent: Rows = tier.lend(keys) if is_lending(tier) else []
        if lent := list(takewhile(lambda row: len(row) == nbytes, lent)):
            return lent, False
        rows = self._new_rows(len(keys), nbytes)
        got: int = self.guarded(tier, tier.get, 0, keys, rows, hint)
        return rows[:got], got < len(rows)

    def _write(self, task: _Task, space: int, pages: Pages, data: Rows) -> bool:
        """Writes verified bytes to the pool, unless the job was cancelled meanwhile."""
        with self._lock:
            if self._is_over(task):
                return False
            self._pages.write(space, pages, data, task.fence, is_team=task.rows is not None)
        return True

    def _promote(self, task: _Task, space: int, number: int, first: int, data: Rows) -> None:
        """Also keeps what a lower tier gave in the host tier, if there is one above it."""
        command, host = task.command, self.tiers[0]
        assert isinstance(command, Get)
        if not number or host.name != "host" or not command.tokens:
            return
        tokens = np.frombuffer(command.tokens, np.int32).reshape(-1, self._page_size)
        index = range(first, first + len(data))
        if space == 1:
            index = command.windows[first : first + len(data)]  # type: ignore[assignment]
        records = [
            _record(command.keys, [command.parent, *command.keys], tokens, i, row, space)
            for i, row in zip(index, data, strict=True)
        ]
        self.guarded(host, host.put, None, records)

    # ---- puts ------------------------------------------------------------------------------------

    def _put(self, command: Put, task: _Task) -> int:
        """Gives pages to every tier that lacks them; how many were read."""
        tokens = np.frombuffer(command.tokens, np.int32).reshape(-1, self._page_size)
        pages = np.frombuffer(command.pages, np.int32)
        row = np.frombuffer(command.window_pages, np.int32)
        windows = [window_key(command.keys[i]) for i in command.windows]
        count = self._keep(task, 0, command.keys, range(len(pages)), pages, tokens)
        self._keep(task, 1, windows, command.windows, row, tokens)
        return count

    def _keep(
        self, task: _Task, space: int, keys: Sequence[bytes], index: Sequence[int], pages: Pages,
        tokens: NDArray[np.int32],
    ) -> int:  # fmt: skip
        """Reads pages of a space and hands them to the tiers."""
        command, nbytes = task.command, self._pages.nbytes(space)
        assert isinstance(command, Put)
        takers = [tier for tier in self.tiers if tier.takes_puts]
        have = [self.guarded(tier, tier.contains, 0, keys) for tier in takers]
        done, step = min(have, default=len(keys)), max(1, BATCH_BYTES // max(1, nbytes))
        while nbytes and done < len(keys) and not self._is_over(task):
            batch = range(done, min(done + step, len(keys)))
            data = self._new_rows(len(batch), nbytes)
            self._pages.read(space, pages[batch.start : batch.stop], data, task.fence)
            if task.epoch != self._epoch:  # another scheduler may have written there meanwhile
                return done
            records = [
                _record(command.keys, command.parents, tokens, index[i], line, space, command.hint)
                for i, line in zip(batch, data, strict=True)
            ]
            for tier, known in zip(takers, have, strict=True):
                if new := records[max(0, known - done) :]:
                    start_s = time.perf_counter()
                    self.guarded(tier, tier.put, None, new)
                    seconds = time.perf_counter() - start_s
                    task.note(tier.name, len(new), len(new) * nbytes, seconds)
            done = batch.stop
        return done

    def _new_rows(self, count: int, nbytes: int) -> Rows:
        """Memory for pages, in arrays of their own: the tiers keep them one by one."""
        rows, staging = list[Payload](), self.staging
        if self.tiers and is_lending(self.tiers[0]):
            rows = self.tiers[0].new_rows(count, nbytes)
        elif staging is not None and staging.row_bytes == nbytes:
            rows = staging.take(count)
        return rows or [np.empty(nbytes, np.uint8) for _ in range(count)]


def _record(
    keys: Sequence[bytes],
    parents: Sequence[bytes],
    tokens: NDArray[np.int32],
    index: int,
    payload: Payload,
    space: int,
    hint: Hint | None = None,
) -> PageRecord:
    key, parent = keys[index], parents[index]
    if space == 1:
        key, parent = window_key(key), key
    return PageRecord(key, parent, tokens[index], payload, space, hint)
