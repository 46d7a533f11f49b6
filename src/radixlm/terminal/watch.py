"""Watch: asks one server or gateway how it does, by the routes that monitoring uses, and keeps the
last minute, of which rates and percentiles are."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from radixlm.base.record import Record, replace
from radixlm.terminal.api import Api, Refused
from radixlm.terminal.scrape import Histogram, Scrape
from radixlm.terminal.snapshot import (
    COUNTERS,
    HISTOGRAMS,
    Percentiles,
    Snapshot,
    dicts,
    number,
    with_gauges,
    with_info,
    with_loads,
)

WAIT_S = 2.0  # for each answer
RATE_S = 5.0  # over which rates are taken
INFO_S = 5.0  # between two looks at /server_info, which asks the engine
MAX_HISTORY = 600
_OF_ANY_WORKER = ("served_model_name", "model_path", "version")
_GATEWAY = ("smg_", "sgl_router_", "radix_router_")


class _Marks(Record):
    """Counters and histograms at one time."""

    time_s: float
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]


_NOTHING = _Marks(0.0, {}, {})


class Watch:
    """``poll`` looks once; not from two threads at once. ``window_s``: of percentiles."""

    def __init__(
        self, api: Api, window_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.api, self._window_s, self._clock = api, window_s, clock
        self.rates: deque[float] = deque(maxlen=MAX_HISTORY)  # tokens/s out, for a graph
        self._marks: deque[_Marks] = deque()
        self._info: dict[str, Any] = {}
        self._info_s, self._state = float("-inf"), ""
        self._pids: dict[int, Any] = {}
        self._uptime_s: float | None = None
        self._engine_restarts = self._server_restarts = 0
        self._is_gateway = False
        self._events: deque[str] = deque(maxlen=8)

    # ---- asking --------------------------------------------------------------------------------

    def poll(self) -> Snapshot:
        """A look. A server that does not answer, or refuses all, is "down" with the reason."""
        state, why = self._readiness()
        scrape, loads, hint = None, [], ""
        if state != "down":
            try:
                scrape = self._scrape()
            except Refused as error:
                hint = self._hint(error)
            loads = self._loads()
            self._look_at_info(state)
            if scrape is None and not loads and not self._info:
                state, why = "down", hint
        if self._state not in ("", state):
            self._tell(f"{state}: {why}" if why else state)
        self._state = state
        got = Snapshot(self.api.url, state=state, reason=why, hint="" if why == hint else hint)
        if state == "down":
            self._marks.clear()
            self._info, self._info_s = {}, float("-inf")
        else:
            got = with_loads(with_info(got, self._info), loads)
            if scrape is not None:
                got = self._with_rates(with_gauges(got, scrape), scrape)
        self.rates.append(got.tokens_out_per_s or 0.0)
        return replace(
            got,
            kind="gateway" if self._is_gateway else "server",
            engine_restarts=self._engine_restarts,
            server_restarts=self._server_restarts,
            events=tuple(self._events),
        )

    def _readiness(self) -> tuple[str, str]:
        try:
            self.api.read("/ready", WAIT_S)
        except Refused as error:
            if not error.status:
                return "down", str(error).removeprefix(f"{self.api.url} ")
            return ("not ready", str(error)) if error.status == 503 else ("up", "")
        return "ready", ""

    def _hint(self, error: Refused) -> str:
        """What to do where /metrics is not to be had."""
        if error.status in (401, 403):
            return f"{error}: give its key with --api-key"
        if error.status == 404 and (self._info or self._json("/v1/models")):
            return "it has no /metrics: start it with --enable-metrics for latencies and tokens in"
        if error.status == 404:
            return "it has neither /metrics nor /server_info: is this a model server?"
        return str(error)

    def _scrape(self) -> Scrape:
        text = self.api.read("/metrics", WAIT_S).decode("utf-8", "replace")
        try:
            scrape = Scrape(text)
            self._is_gateway = any(name.startswith(_GATEWAY) for name in scrape.samples)
            if self._is_gateway:
                with contextlib.suppress(Refused):  # no worker has metrics
                    more = self.api.read("/engine_metrics", WAIT_S).decode("utf-8", "replace")
                    scrape = Scrape(f"{text}\n{more}")
        except ValueError as error:
            raise Refused(f"/metrics is not Prometheus' text: {error}") from error
        return scrape

    def _json(self, path: str) -> Any:
        try:
            return json.loads(self.api.read(path, WAIT_S))
        except (Refused, ValueError):
            return None

    def _loads(self) -> list[dict[str, Any]]:
        if self._is_gateway:
            return []
        found = self._json("/v1/loads?include=all") or self._json("/get_load")
        return dicts(found.get("loads") if isinstance(found, dict) else found)

    def _look_at_info(self, state: str) -> None:
        now_s = self._clock()
        if now_s - self._info_s < INFO_S and state == self._state:
            return
        found = self._json("/server_info") or self._json("/get_server_info")
        self._info_s = now_s
        if not isinstance(found, dict):
            return
        self._info = found
        if self._is_gateway:  # the rest is of any of its workers
            self._info = {n: found[n] for n in _OF_ANY_WORKER if n in found}
            return
        replicas = dicts(found.get("replicas"))
        pids = {i: one["pid"] for i, one in enumerate(replicas) if "pid" in one}
        uptime_s = number(found, "uptime_s")
        if None not in (uptime_s, self._uptime_s) and uptime_s < self._uptime_s:  # type: ignore[operator]
            self._server_restarts += 1
            self._marks.clear()
            self._tell("the server was restarted")
        else:
            for index in [i for i, pid in pids.items() if self._pids.get(i, pid) != pid]:
                self._engine_restarts += 1
                self._tell(f"the engine of replica {index} was restarted")
        self._pids, self._uptime_s = pids, uptime_s

    def _tell(self, text: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')} {text}")

    # ---- rates ---------------------------------------------------------------------------------

    def _with_rates(self, got: Snapshot, scrape: Scrape) -> Snapshot:
        """Rates of the last seconds and percentiles of the window."""
        totals = {name: scrape.total(*names) for name, names in COUNTERS.items()}
        found = {name: scrape.histogram(*names) for name, names in HISTOGRAMS.items()}
        now = _Marks(
            self._clock(),
            {name: value for name, value in totals.items() if value is not None},
            {name: value for name, value in found.items() if value is not None},
        )
        marks = self._marks
        marks.append(now)
        while len(marks) > 2 and marks[1].time_s <= now.time_s - self._window_s:
            marks.popleft()
        oldest, is_first = marks[0], len(marks) == 1
        recent = next(mark for mark in marks if is_first or mark.time_s >= now.time_s - RATE_S)
        if recent is now and not is_first:
            recent = marks[-2]
        rate, gain = _Change(recent, now), _Change(_NOTHING if is_first else oldest, now)
        return replace(
            got,
            is_first=is_first,
            tokens_in_per_s=rate.per_s("tokens_in"),
            tokens_out_per_s=_either(rate.tokens_out(), got.tokens_out_per_s),
            requests_per_s=rate.per_s("requests"),
            latency={name: _percentiles(gain.histogram(name)) for name in now.histograms},
            cached_share=_either(gain.share("cached", "looked_up"), got.cached_share),
            accept_rate=_either(gain.share("accepted", "drafted"), got.accept_rate),
            accept_length=_either(gain.accept_length(), got.accept_length),
        )


class _Change:
    """What came between two marks. A server that counts from 0 again: all that it has counted."""

    def __init__(self, before: _Marks, after: _Marks) -> None:
        self._before, self._after = before, after
        self._seconds = after.time_s - before.time_s

    def gain(self, name: str) -> float | None:
        """The growth of a counter; None where there is none."""
        now = self._after.counters.get(name)
        then = self._before.counters.get(name, 0.0)
        return None if now is None else now - then if now >= then else now

    def histogram(self, name: str) -> Histogram:
        """What was added to a histogram."""
        now, then = self._after.histograms[name], self._before.histograms.get(name)
        return now.since(then) if then is not None else now

    def per_s(self, name: str) -> float | None:
        """Its growth a second; None at the first look."""
        gain = self.gain(name)
        return None if gain is None or self._seconds <= 0 else gain / self._seconds

    def share(self, part: str, whole: str) -> float | None:
        """The growth of one over that of the other."""
        some, of = self.gain(part), self.gain(whole)
        return some / of if some is not None and of else None

    def accept_length(self) -> float | None:
        """Tokens of a verification: those accepted, and one of the model's own."""
        mean = self.share("accepted", "verified")
        return None if mean is None else 1.0 + mean

    def tokens_out(self) -> float | None:
        """Tokens a second: by vLLM's counter, which goes with the tokens, else by the latencies of
        tokens: SGLang's counter goes when requests end."""
        if self._seconds <= 0 or "tokens_out" in self._after.counters:
            return self.per_s("tokens_out")
        if "itl" not in self._after.histograms:
            return None
        names = [name for name in ("ttft", "itl") if name in self._after.histograms]
        return sum(self.histogram(name).count for name in names) / self._seconds


def _either(new: float | None, old: float | None) -> float | None:
    return old if new is None else new


def _percentiles(values: Histogram) -> Percentiles:
    finite = [bound for bound in values.bounds if bound != float("inf")]
    low, high, highest = (values.quantile(share) for share in (0.5, 0.95, 0.99))
    return Percentiles(low, high, highest, finite[-1] if finite else 0.0)
