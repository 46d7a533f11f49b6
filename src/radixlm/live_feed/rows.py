"""RequestRows: the last requests with what they went through, for the page at /ui and for traces.

A row's spans follow each other: ``grammar`` (it compiles), ``queue``, ``prefill`` (one a chunk),
``decode``, ``retracted`` (it lost its pages to others), ``engine_dead``. After the last two it is
computed again, so that prefill and decode follow once more. Times are monotonic seconds.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from radixlm.intake.call import current_call
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState
from radixlm.observe.histogram import Histogram
from radixlm.observe.log_tail import LogTail
from radixlm.wire.replies import Finish, LogLine, Moment

PHASES: Final = ("queue", "grammar", "prefill", "decode", "retracted", "engine_dead")
KEEP: Final = 200
MAX_SPANS: Final = 64  # later ones are joined with the last of their kind
MAX_IDS: Final = 8192  # tokens of a prompt and of an output that are kept, for their texts
MAX_DEATHS: Final = 50
RATE_S: Final = 5
DUMP_S: Final = 1.0  # so soon after a death its dump is asked for
MINUTES: Final = {"1m": 1, "5m": 5, "60m": 60}


def row_id(rid: str) -> str:
    """A short name of a request that does not tell its id."""
    return hashlib.sha256(rid.encode()).hexdigest()[:12]


class Span:
    """One phase. ``end_s`` is None while it lasts; ``tokens``: that were computed in it."""

    __slots__ = ("end_s", "phase", "start_s", "tokens")

    def __init__(self, phase: str, start_s: float, end_s: float | None, tokens: int = 0) -> None:
        self.phase, self.start_s, self.end_s, self.tokens = phase, start_s, end_s, tokens


class Row:
    """One request. ``version`` grows with each change of any row."""

    __slots__ = (
        *("adapter", "announced", "begun_s", "cached", "ended_s", "finish", "id", "ids", "last_s"),
        *("out", "prefilled", "priority", "prompt", "rid", "route", "spans", "tenant", "version"),
    )

    def __init__(self, state: RequestState, route: str, keeps_ids: bool) -> None:
        wire = state.wire
        self.id, self.rid, self.route = row_id(state.rid), state.rid, route
        self.begun_s, self.last_s = state.arrival_s, 0.0
        self.ended_s: float | None = None
        self.prompt, self.cached, self.out = state.prompt_tokens, 0, len(state.output_ids)
        self.adapter = wire.adapter.name if wire.adapter is not None else None
        self.priority, self.tenant = wire.priority, wire.tenant and wire.tenant[:8]
        self.finish: str | None = None
        self.spans = [Span("queue", state.arrival_s, None)]
        self.version = 0
        self.prefilled = 0  # tokens of the prompt that are computed or were cached
        self.announced: list[float] = []  # begins of the chunks that are computed
        # of prompt and output, where texts may be shown
        self.ids = (wire.input_ids[: 4 * MAX_IDS], state.output_ids) if keeps_ids else None

    def enter(
        self, phase: str, start_s: float, end_s: float | None = None, tokens: int = 0
    ) -> None:
        """End the running span and begin another."""
        last = self.spans[-1]
        if last.end_s is None:
            last.end_s = max(start_s, last.start_s)
        if len(self.spans) >= MAX_SPANS and last.phase == phase:
            last.end_s, last.tokens = end_s, last.tokens + tokens
        else:
            self.spans.append(Span(phase, start_s, end_s, tokens))

    def compute(self, start_s: float, end_s: float, tokens: int, first: int) -> None:
        """A chunk of the prompt begins, or has ended (``end_s``). With steps in flight the next one
        may have begun before."""
        last = self.spans[-1]
        if end_s or last.phase == "queue":
            self.prefilled = min(first + tokens * bool(end_s), self.prompt)
        if start_s in self.announced:
            self.announced.remove(start_s)
            last.end_s = None if self.announced else end_s
            return
        if not end_s:
            self.announced.append(start_s)
        if last.phase == "prefill" and start_s < last.start_s:
            last.tokens += tokens  # the one after it was announced
        else:
            self.enter("prefill", start_s, end_s or None, tokens)

    def lose(self, phase: str, start_s: float) -> None:
        """What was computed is lost."""
        self.prefilled, self.announced = 0, []
        self.enter(phase, start_s)

    def shown(self, has_rid: bool) -> dict[str, Any]:
        """The row for the page."""
        row: dict[str, Any] = {"id": self.id, "rid": self.rid if has_rid else None}
        row |= {"begun_s": _rounded(self.begun_s), "ended_s": _rounded(self.ended_s)}
        for name in ("prompt", "cached", "out", "adapter", "priority", "tenant", "finish", "route"):
            row[name] = getattr(self, name)
        row["spans"] = [
            [span.phase, _rounded(span.start_s), _rounded(span.end_s), span.tokens]
            for span in self.spans
        ]
        return row


class Death:
    """An engine that was lost. ``went_on``: rows that had a token again, and after how long."""

    def __init__(self, time_s: float, why: str, num_held: int) -> None:
        self.time_s, self.why, self.num_held = time_s, why, num_held
        self.went_on: list[tuple[str, float]] = []
        self.dump: str | None = None
        self.version = 0

    def shown(self) -> dict[str, Any]:
        """The death for the page."""
        went_on = [[name, _rounded(seconds)] for name, seconds in self.went_on]
        return {
            "t": _rounded(self.time_s),
            "why": self.why,
            "held": self.num_held,
            "went_on": went_on,
            "dump": self.dump,
        }


class RequestRows(Observer):
    """The rows of the last ``KEEP`` requests, those that run before those that have ended; times
    and rates, and deaths.

    ``on_end`` is called with each row that has ended, and its request."""

    def __init__(
        self,
        keeps_ids: bool = False,
        hidden: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        tail: LogTail | None = None,
    ) -> None:
        """``keeps_ids``: texts may be shown. ``hidden``: how ids begin of requests without rows.
        ``tail``: takes what the engines log."""
        self._keeps_ids, self._hidden, self._clock = keeps_ids, hidden, clock
        self._tail = tail
        self.rows: dict[str, Row] = {}  # by id of the request, oldest first
        self._live: dict[str, Row] = {}
        self._held: dict[str, Death] = {}
        self.deaths: deque[Death] = deque(maxlen=MAX_DEATHS)
        self.num_deaths = 0
        self.version = 0
        self.times = {name: Histogram(clock) for name in ("ttft", "itl", "e2e")}
        self._seconds: deque[list[int]] = deque(maxlen=RATE_S + 1)  # second, tokens in, out
        self.accepted: Counter[int] = Counter()  # verified drafts by the number accepted
        self.on_end: list[Callable[[RequestState, Row], None]] = []

    def _changed(self, row: Row) -> None:
        self.version += 1
        row.version = self.version

    def submitted(self, state: RequestState) -> None:
        if self._hidden is not None and state.rid.startswith(self._hidden):
            return
        call = current_call()
        row = Row(state, call.route if call is not None else "", self._keeps_ids)
        self.rows.pop(state.rid, None)
        self.rows[state.rid] = self._live[state.rid] = row
        if call is not None:
            call.rids.append(state.rid)
        if len(self.rows) > KEEP:
            ended = (rid for rid in self.rows if rid not in self._live)
            del self.rows[next(ended, next(iter(self.rows)))]
        self._changed(row)

    def scheduled(self, state: RequestState, moment: Moment) -> None:
        row = self._live.get(state.rid)
        if row is None:
            return
        _, kind, start_s, end_s, tokens, first = moment
        last = row.spans[-1]
        if kind == "prefill":
            if last.phase == "decode":
                return  # tokens that a grammar forces
            if last.phase == "queue":
                row.cached = first
            row.compute(start_s, end_s, tokens, first)
        elif kind == "grammar" and last.phase == "queue":
            row.spans[:] = [Span("grammar", last.start_s, end_s), Span("queue", end_s, None)]
        elif kind == "retracted":
            row.lose("retracted", start_s)
        self._changed(row)

    def progressed(self, state: RequestState, num_tokens: int) -> None:
        row = self._live.get(state.rid)
        if row is None or not num_tokens:
            return
        now_s, last = state.last_token_s, row.spans[-1]
        if last.phase != "decode":
            row.enter("decode", now_s if last.end_s is None else last.end_s)
            last = row.spans[-1]
            if (death := self._held.pop(state.rid, None)) is not None:
                death.went_on.append((row.id, now_s - death.time_s))
                self.version += 1
                death.version = self.version
        last.tokens += num_tokens
        row.out = len(state.output_ids)
        prompt = 0
        if row.last_s:
            self.times["itl"].add((now_s - row.last_s) / num_tokens, num_tokens)
        else:
            prompt, row.cached = row.prompt, state.last_delta.cached_tokens
            self.times["ttft"].add(now_s - row.begun_s)
        row.last_s = now_s
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += prompt
        self._seconds[-1][2] += num_tokens
        self._changed(row)

    def ended(self, state: RequestState, finish: Finish) -> None:
        row = self._live.pop(state.rid, None)
        self._held.pop(state.rid, None)
        if row is None:
            return
        row.ended_s, row.finish = state.finished_s, finish.kind
        row.out, last = len(state.output_ids), row.spans[-1]
        if row.ids is not None:
            row.ids = (row.ids[0], state.output_ids[:MAX_IDS])
        if last.end_s is None:
            last.end_s = max(row.ended_s, last.start_s)
        self.times["e2e"].add(row.ended_s - row.begun_s)
        rounds = state.last_delta.draft_rounds or ()
        self.accepted.update({index: count for index, count in enumerate(rounds) if count})
        self._changed(row)
        for call in self.on_end:
            call(state, row)

    def held(self, states: Sequence[RequestState], why: str) -> None:
        now_s = self._clock()
        rows = [row for state in states if (row := self._live.get(state.rid)) is not None]
        death = Death(now_s, why, len(rows))
        self.num_deaths += 1
        self.deaths.append(death)
        for row in rows:
            row.lose("engine_dead", now_s)
            self._held[row.rid] = death
            self._changed(row)
        self.version += 1
        death.version = self.version

    def logged(self, lines: Sequence[LogLine]) -> None:
        if self._tail is not None:
            self._tail.extend(lines)

    def changed(self, since: int) -> Iterator[Row]:
        """The kept rows that have changed since a version, oldest first."""
        return (row for row in self.rows.values() if row.version > since)

    def changed_deaths(self, since: int) -> list[Death]:
        """Deaths that came or changed since a version."""
        return [death for death in self.deaths if death.version > since]

    def note_dump(self, asked_s: float, name: str) -> None:
        """A crash dump was asked for at ``asked_s`` and is written."""
        for death in self.deaths:
            if death.dump is None and death.time_s <= asked_s < death.time_s + DUMP_S:
                self.version += 1
                death.dump, death.version = name, self.version

    def of(self, rid: str) -> Row | None:
        """The row of a request that runs, or is among the last."""
        return self._live.get(rid) or self.rows.get(rid)

    def find(self, name: str) -> Row | None:
        """The row of this id, or of the request id."""
        found = self.rows.get(name)
        return found or next((row for row in self.rows.values() if row.id == name), None)

    def rates(self) -> tuple[float, float]:
        """Tokens a second, in and out, over the last whole seconds."""
        now = int(self._clock())
        recent = [one for one in self._seconds if now - RATE_S <= one[0] < now]
        return sum(one[1] for one in recent) / RATE_S, sum(one[2] for one in recent) / RATE_S

    def percentiles(self) -> dict[str, dict[str, list[float] | None]]:
        """p50, p95 and p99 in seconds, by kind and span of time."""
        return {
            kind: {span: found.percentiles(minutes) for span, minutes in MINUTES.items()}
            for kind, found in self.times.items()
        }

    def adapters(self) -> Counter[str]:
        """Running and waiting requests by adapter."""
        return Counter(row.adapter for row in self._live.values() if row.adapter)


def _rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 4)
