"""PagePort: the page workers of all ranks as the scheduler sees them. Commands go to every rank in
the order of the plans; an answer is what all of them have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue

import msgspec

from radixlm.parallel.relay import Relay
from radixlm.tiers.base import UNANSWERED, Arrived, Command, Done, Found, Lookup, Report
from radixlm.tiers.worker import PageWorker

REPORTS = msgspec.msgpack.Decoder(Report)


class PagePort:
    """Of a replica of one rank."""

    def __init__(self, worker: PageWorker) -> None:
        self._worker = worker
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._open: set[int] = set()  # jobs without their last report

    def send(self, command: Command) -> None:
        """Begin a command; never waits."""
        if isinstance(command, Lookup) and (found := self._worker.find(command)) is not None:
            self._reports.put(found)
            return
        if not isinstance(command, UNANSWERED):
            self._open.add(command.job)
        self._worker.send(command, self._reports.put)

    def poll(self) -> list[Report]:
        """What has come since the last call."""
        found: list[Report] = []
        while not self._reports.empty():
            found.append(self._take(self._reports.get()))
        return found

    def settle(self, timeout_s: float) -> list[Report]:
        """Wait until no command is under way, but not longer; what has come meanwhile."""
        end_s, found = time.monotonic() + timeout_s, self.poll()
        try:
            while self._open:
                left_s = max(0.0, end_s - time.monotonic())
                found.append(self._take(self._reports.get(timeout=left_s)))
        except Empty:
            pass
        return found

    def _take(self, report: Report) -> Report:
        if not isinstance(report, Arrived):
            self._open.discard(report.job)
        return report


class RankedPort(PagePort):
    """Of the ranks of an attention group, each of which moves its own part of every page.
    ``worker`` is rank 0's, which may be in another group."""

    def __init__(self, worker: PageWorker, relay: Relay, group: int) -> None:
        super().__init__(worker)
        self._relay, self._group = relay, group

    def send(self, command: Command) -> None:
        is_own = self._group == self._worker.group
        if isinstance(command, Lookup) and is_own:
            found = self._worker.find(command)
            if found is not None and not found.ends:  # then it is of no use what others have
                self._reports.put(found)
                return
        theirs = self._relay.move_pages(command, self._group)
        if theirs is None:
            self._worker.follow(self._group, command, lambda report: None)
            return
        self._open.add(command.job)
        self._worker.follow(self._group, command, partial(self._take_own, theirs))

    def _take_own(self, theirs: Future[list[bytes]], mine: Report | None) -> None:
        """In a thread of this rank's worker: the others may be done or not."""
        if not isinstance(mine, Arrived):
            theirs.add_done_callback(partial(self._merge, mine))

    def _merge(self, mine: Report | None, theirs: Future[list[bytes]]) -> None:
        if theirs.exception() is not None:  # a rank is lost, and the replica with it
            return
        reports = [REPORTS.decode(packed) for packed in theirs.result() if packed]
        self._reports.put(lowest(reports if mine is None else [mine, *reports]))


def lowest(reports: Sequence[Report]) -> Report:
    """The reports of all ranks on one command: what every one of them has."""
    first, seconds = reports[0], max(getattr(report, "seconds", 0.0) for report in reports)
    if isinstance(first, Found):
        ends = [set(report.ends) for report in reports if isinstance(report, Found)]
        return Found(first.job, sorted(set.intersection(*ends)), first.tiers, seconds)
    if isinstance(first, Done):
        least = min(report.num_pages for report in reports if isinstance(report, Done))
        return Done(first.job, least, first.tiers, seconds)
    return first
