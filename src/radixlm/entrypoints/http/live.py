"""/live: the feed of the page at /ui and of `radixlm top`: one stream of server-sent events.

A viewer holds places (how far it has been told), not a queue: each frame is made of what is new
when the connection takes it, so a slow reader gets fewer frames and holds no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from radixlm.base.errors import InvalidRequest, NotFound, Overloaded
from radixlm.entrypoints.http.admin.health import PROBE_PREFIX
from radixlm.entrypoints.http.admin.info import accept_rate
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import SSE_HEADERS, named_event
from radixlm.intake.identity import identity
from radixlm.intake.replicas import Replica
from radixlm.intake.rows import PHASES, RequestRows
from radixlm.observe.ring import COUNTS, FIELDS, TIMES, StepRing

router = APIRouter(tags=["admin"])

VERSION: Final = 1
MAX_VIEWERS: Final = 8
MAX_RATE: Final = 10.0
HEAD_S: Final = 1.0
BEAT_S: Final = 5.0
FIRST_STEPS: Final = 600
TOPICS: Final = ("head", "requests", "steps")
_DIGITS: Final = dict.fromkeys(TIMES, 3) | {"start_s": 4} | dict.fromkeys(COUNTS, 0)


class Viewer:
    """Whom a stream tells what. ``steps``: the next step by replica."""

    def __init__(self, topics: tuple[str, ...], rate: float, has_rids: bool) -> None:
        self.topics, self.rate, self.has_rids = topics, rate, has_rids
        self.rows = 0
        self.steps: dict[int, int] = {}
        self.head_s = 0.0


class LiveFeed:
    """What viewers share. Nothing is computed for the feed while nobody looks."""

    def __init__(self, state: ServerState, rows: RequestRows) -> None:
        self.state, self.rows = state, rows
        self.shows_text = state.config.serve.ui_show_text
        self.viewers: set[Viewer] = set()
        self.closed = asyncio.Event()
        self._rings: dict[int, StepRing] = dict(enumerate(state.intake.rings))
        self._head: tuple[float, dict[str, Any]] = (0.0, {})
        self._was_ready = False

    def join(self, topics: tuple[str, ...], rate: float) -> Viewer:
        """A new viewer; Overloaded if there are too many."""
        if len(self.viewers) >= MAX_VIEWERS or self.closed.is_set():
            why = "the server stops" if self.closed.is_set() else f"{MAX_VIEWERS} viewers look"
            raise Overloaded(f"no live events: {why} already", retry_after_s=BEAT_S)
        serve = self.state.config.serve
        has_keys = bool(serve.admin_api_key or serve.api_key or serve.api_key_file)
        has_rids = self.shows_text or (has_keys and identity().is_admin)
        viewer = Viewer(topics, rate, has_rids)
        self.viewers.add(viewer)
        return viewer

    async def stream(self, viewer: Viewer) -> AsyncIterator[bytes]:
        """Frames until the server stops."""
        yield named_event("hello", self.hello())
        beat_s = time.monotonic()
        while True:
            frame = b"".join(self.news(viewer))
            now_s = time.monotonic()
            if not frame and now_s - beat_s >= BEAT_S:
                frame = b": beat\n\n"
            if frame:
                beat_s = now_s
                yield frame
            if self.closed.is_set():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.closed.wait(), 1.0 / viewer.rate)

    def hello(self) -> dict[str, Any]:
        """The first event."""
        return {
            "version": VERSION,
            "now_s": round(time.monotonic(), 4),
            "unix_s": round(time.time(), 4),
            "phases": PHASES,
            "step_fields": FIELDS,
            "show_text": self.shows_text,
            "model": self.state.model_name,
        }

    def news(self, viewer: Viewer) -> list[bytes]:
        """What the viewer has not been told, as events; it counts as told from now on."""
        made: list[bytes] = []
        now_s = time.monotonic()
        if "head" in viewer.topics and now_s - viewer.head_s >= HEAD_S:
            viewer.head_s = now_s
            made.append(named_event("head", self.head(now_s)))
        if "requests" in viewer.topics and viewer.rows < self.rows.version:
            rows = [row.shown(viewer.has_rids) for row in self.rows.changed(viewer.rows)]
            viewer.rows = self.rows.version
            if rows:
                made.append(named_event("requests", {"rows": rows}))
        if "steps" in viewer.topics:
            for replica in self.state.intake.replicas:
                if (steps := self._steps(viewer, replica.index)) is not None:
                    made.append(named_event("steps", steps))
        return made

    def ring(self, index: int) -> StepRing | None:
        """The ring of a replica, once its engine has made one."""
        folders = self.state.intake.run_folders
        if index not in self._rings and index < len(folders):
            found = StepRing.find(folders[index])
            if found is not None:
                self._rings[index] = found
        return self._rings.get(index)

    def _steps(self, viewer: Viewer, index: int) -> dict[str, Any] | None:
        ring = self.ring(index)
        if ring is None:
            return None
        end = ring.end
        records = list(ring.read(viewer.steps.get(index, end - FIRST_STEPS)))
        if not records:
            return None
        viewer.steps[index] = int(records[-1][0]) + 1
        columns = [list(column) for column in zip(*records, strict=True)]
        named = {
            name: [round(value, _DIGITS[name]) for value in column]
            for name, column in zip(FIELDS, columns[1:], strict=True)
        }
        return {"replica": index, "first": columns[0][0], "index": columns[0], "columns": named}

    def head(self, now_s: float) -> dict[str, Any]:
        """The figures of the whole server, made once a second for all viewers."""
        if now_s - self._head[0] >= HEAD_S:
            self._head = (now_s, self._make_head(now_s))
        return self._head[1]

    def _make_head(self, now_s: float) -> dict[str, Any]:
        intake, rows = self.state.intake, self.rows
        load, (in_per_s, out_per_s) = intake.load, rows.rates()
        pages = load.pages
        requests = rows.adapters()
        return {
            "t": round(now_s, 4),
            "state": self._status(),
            "uptime_s": round(now_s - self.state.began_s, 1),
            "running": load.num_running,
            "waiting": load.num_waiting,
            "in_per_s": round(in_per_s, 1),
            "out_per_s": round(out_per_s, 1),
            "kv_used": load.num_used_tokens,
            "kv_total": load.num_total_tokens,
            "hit_rate": round(load.cache_hit_rate, 4),
            "percentiles": rows.percentiles(),
            "pages": None
            if pages is None
            else {
                "size": pages.size,
                "total": pages.total,
                "running": pages.total - pages.free - pages.cached,
                "cached_free": pages.cached - pages.locked,
                "cached_locked": pages.locked,
                "free": pages.free,
                "window": pages.window_used,
                "window_total": pages.window_total,
                "states_used": pages.states_used,
                "states_total": pages.states_total,
            },
            "retracted": load.num_retracted,
            "evicted": load.num_evicted_tokens,
            "deaths": rows.num_deaths,
            "speculation": self._speculation(),
            "adapters": [
                {"name": one.name, "requests": requests[one.name], "pinned": one.is_pinned}
                for one in intake.adapters.entries
            ],
            "replicas": [_card(replica) for replica in intake.replicas],
        }

    def _status(self) -> str:
        intake = self.state.intake
        is_ready = intake.ready.is_set()
        self._was_ready |= is_ready
        if intake.leaving.is_set():
            return "draining"
        if not is_ready:
            return "recovering" if self._was_ready or self.rows.num_deaths else "starting"
        if intake.load.released:
            return "released"
        return "paused" if intake.is_paused else "ready"

    def _speculation(self) -> dict[str, Any] | None:
        load, drafter = self.state.intake.load, self.state.config.speculate.speculative_algorithm
        if drafter is None or load.drafts is None:
            return None
        accepted = self.rows.accepted
        histogram = [accepted[i] for i in range(max(accepted, default=-1) + 1)]
        rate = round(accept_rate(load), 4)
        return {"drafter": drafter, "accept_rate": rate, "accept_histogram": histogram}


def _card(replica: Replica) -> dict[str, Any]:
    load = replica.load
    return {
        "index": replica.index,
        "ready": replica.is_ready,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "kv_used": load.num_used_tokens,
        "kv_total": load.num_total_tokens,
        "out_per_s": round(load.gen_throughput, 1),
        "steps": load.steps,
    }


class _Stream(StreamingResponse):
    """A stream that tells when it is over, also one that the client leaves before it begins."""

    def __init__(self, body: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(body, media_type="text/event-stream", headers=SSE_HEADERS)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def install(state: ServerState) -> None:
    """Observe requests from now on, unless --disable-ui."""
    if state.config.serve.disable_ui:
        return
    rows = RequestRows(state.config.serve.ui_show_text, PROBE_PREFIX)
    state.intake.observers = (*state.intake.observers, rows)
    state.extras[RequestRows] = rows
    state.extras[LiveFeed] = LiveFeed(state, rows)


def close(state: ServerState) -> None:
    """End the streams: viewers never leave by themselves."""
    feed = state.extras.get(LiveFeed)
    if feed is not None:
        feed.closed.set()


def feed_of(request: Request) -> LiveFeed:
    """The feed; NotFound with --disable-ui."""
    feed = state_of(request).extras.get(LiveFeed)
    if feed is None:
        raise NotFound("there is no live feed: the server runs with --disable-ui")
    found: LiveFeed = feed
    return found


@router.get("/live/events")
async def events(request: Request, topics: str = ",".join(TOPICS), rate: float = 10.0) -> Response:
    """Server-sent events of ``topics``, at most ``rate`` frames a second."""
    asked = tuple(topic.strip() for topic in topics.split(",") if topic.strip())
    unknown = set(asked) - set(TOPICS)
    if unknown:
        raise InvalidRequest(
            f"topics: {sorted(unknown)[0]!r:.80} is none of {', '.join(TOPICS)}", "topics"
        )
    if not 0 < rate <= MAX_RATE:
        raise InvalidRequest(f"rate must be above 0 and at most {MAX_RATE:g}", "rate")
    feed = feed_of(request)
    viewer = feed.join(asked, max(rate, 0.1))
    return _Stream(feed.stream(viewer), lambda: feed.viewers.discard(viewer))
