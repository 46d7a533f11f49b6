"""/live: the feed of the page at /ui and of `radixlm top`: one stream of server-sent events.

A viewer holds places (how far it has been told), not a queue: each frame is made of what is new
when the connection takes it, so a slow reader gets fewer frames and holds no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from radixlm.base.errors import InvalidRequest, NotFound, Overloaded, RequestError
from radixlm.engine.crash_dump import Recorder
from radixlm.entrypoints.http.admin.health import PROBE_PREFIX
from radixlm.entrypoints.http.admin.info import accept_rate
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import SSE_HEADERS, named_event
from radixlm.intake.identity import identity
from radixlm.intake.replicas import Replica
from radixlm.live_feed.rows import KEEP, MAX_IDS, PHASES, RequestRows, Span
from radixlm.observe.log_tail import LogTail
from radixlm.observe.ring import COUNTS, FIELDS, TIMES, StepRing
from radixlm.wire.media import plain_ids

router = APIRouter(tags=["admin"])

VERSION: Final = 1
MAX_VIEWERS: Final = 8
MAX_RATE: Final = 10.0
HEAD_S: Final = 1.0
BEAT_S: Final = 5.0
FIRST_STEPS: Final = 600
TOPICS: Final = ("head", "requests", "steps", "deaths", "log", "tree")
DEFAULT_TOPICS: Final = "head,requests,steps"
REPLICA_SERIALS: Final = 1 << 46  # of the nodes of one replica's trees
_DIGITS: Final = dict.fromkeys(TIMES, 3) | {"start_s": 4} | dict.fromkeys(COUNTS, 0)


class Viewer:
    """Whom a stream tells what, and how far it has been told: changes of rows and deaths, log
    lines, the next step by replica; when the head and the tree were made that it has."""

    def __init__(self, topics: tuple[str, ...], rate: float, has_rids: bool) -> None:
        self.topics, self.rate, self.has_rids = topics, rate, has_rids
        self.rows = self.deaths = self.lines = 0
        self.steps: dict[int, int] = {}
        self.head_s = self.tree_s = 0.0

    def place(self) -> str:
        """The places as the id of an event."""
        steps = ".".join(f"{index}-{end}" for index, end in self.steps.items())
        return f"{self.rows}:{self.deaths}:{self.lines}:{steps}"

    def resume(self, place: str) -> None:
        """Go on where a stream has stopped; InvalidRequest for what ``place`` did not make."""
        try:
            rows, deaths, lines, steps = place.split(":")
            self.rows, self.deaths, self.lines = int(rows), int(deaths), int(lines)
            pairs = [one.split("-") for one in steps.split(".") if one]
            self.steps = {int(index): int(end) for index, end in pairs}
        except ValueError:
            raise InvalidRequest(
                "Last-Event-ID: not an id of this stream", "Last-Event-ID"
            ) from None


class LiveFeed:
    """What viewers share. Nothing is computed for the feed while nobody looks."""

    def __init__(self, state: ServerState, rows: RequestRows, tail: LogTail) -> None:
        self.state, self.rows, self.tail = state, rows, tail
        self.shows_text = state.config.serve.ui_show_text
        self.viewers: set[Viewer] = set()
        self.closed = asyncio.Event()
        self._rings: dict[int, StepRing] = dict(enumerate(state.intake.rings))
        self._head: tuple[float, dict[str, Any]] = (0.0, {})
        self._tree: tuple[float, dict[str, Any]] = (0.0, {})
        self._asking: asyncio.Task[None] | None = None  # the engine, for its tree
        self._asked_s = 0.0
        self._boot = secrets.token_hex(4)  # of this process: its places mean nothing to another
        self._was_ready = False

    def join(self, topics: tuple[str, ...], rate: float, last: str = "") -> Viewer:
        """A new viewer; Overloaded if there are too many. ``last``: the id of the last event that
        it has got, of this server or of one before it."""
        if len(self.viewers) >= MAX_VIEWERS or self.closed.is_set():
            why = "the server stops" if self.closed.is_set() else f"{MAX_VIEWERS} viewers look"
            raise Overloaded(f"no live events: {why} already", retry_after_s=BEAT_S)
        viewer = Viewer(topics, rate, self.has_rids)
        if last.startswith(f"{self._boot}:"):
            viewer.resume(last.partition(":")[2])
        self.viewers.add(viewer)
        return viewer

    def close(self) -> None:
        """End all streams."""
        self.closed.set()
        if self._asking is not None:
            self._asking.cancel()

    @property
    def has_rids(self) -> bool:
        """Whether who asks may know the ids of others' requests: with the admin key."""
        serve = self.state.config.serve
        has_keys = bool(serve.admin_api_key or serve.api_key or serve.api_key_file)
        return self.shows_text or (has_keys and identity().is_admin)

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
            # of several, each knows the requests that came to it
            "processes": self.state.config.serve.tokenizer_worker_num,
            "model": self.state.model_name,
        }

    def news(self, viewer: Viewer) -> list[bytes]:
        """What the viewer has not been told, as events; it counts as told from now on."""
        made: list[bytes] = []
        now_s = time.monotonic()
        if "head" in viewer.topics and now_s - viewer.head_s >= HEAD_S:
            viewer.head_s = now_s
            made.append(named_event("head", self.head(now_s)))
        if "tree" in viewer.topics and (tree := self._fresh_tree(now_s)) is not None:
            if viewer.tree_s < tree[0]:
                viewer.tree_s = tree[0]
                made.append(named_event("tree", tree[1]))
        if "requests" in viewer.topics and viewer.rows < self.rows.version:
            rows = [row.shown(viewer.has_rids) for row in self.rows.changed(viewer.rows)]
            viewer.rows = self.rows.version
            if rows:
                made.append(named_event("requests", {"rows": rows}))
        if "steps" in viewer.topics:
            for replica in self.state.intake.replicas:
                if (steps := self._steps(viewer, replica.index)) is not None:
                    made.append(named_event("steps", steps))
        made += self._reports(viewer)
        if made:  # the last event's id tells where the stream stands
            made[-1] = f"id: {self._boot}:{viewer.place()}\n".encode() + made[-1]
        return made

    def _reports(self, viewer: Viewer) -> list[bytes]:
        """New deaths and log lines."""
        made: list[bytes] = []
        recorder = self.state.extras.get(Recorder)
        if "deaths" in viewer.topics and recorder is not None and recorder.last[1]:
            self.rows.note_dump(*recorder.last)
        if "deaths" in viewer.topics and viewer.deaths < self.rows.version:
            deaths = self.rows.changed_deaths(viewer.deaths)
            viewer.deaths = self.rows.version
            made += [named_event("deaths", death.shown()) for death in deaths]
        if "log" in viewer.topics and viewer.lines < self.tail.count:
            lines, viewer.lines = self.tail.since(viewer.lines)
            made.append(named_event("log", {"lines": lines}))
        return made

    def _fresh_tree(self, now_s: float) -> tuple[float, dict[str, Any]] | None:
        """The last tree, and ask for another where it is a second old; None before the first."""
        is_due = now_s - self._asked_s >= HEAD_S and self.state.intake.ready.is_set()
        if is_due and (self._asking is None or self._asking.done()):
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._ask_tree(), name="live tree")
        return self._tree if self._tree[0] else None

    async def _ask_tree(self) -> None:
        with contextlib.suppress(RequestError):  # the engine restarts, or computes a long step
            trees = await self._told("tree", with_ids=self.shows_text)
            if trees:
                self._tree = (time.monotonic(), self._joined(trees))

    async def _told(self, verb: str, **args: Any) -> list[tuple[int, dict[str, Any]]]:
        """What the replicas that serve answer, by their number."""
        ready = list(self.state.intake.replicas.ready)
        replies = await self.state.intake.control_each(verb, **args)
        return [
            (one.index, reply.data) for one, reply in zip(ready, replies, strict=True) if reply.ok
        ]

    def _joined(self, trees: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        """The trees of all replicas, with texts in place of token ids."""
        nodes: list[list[Any]] = []
        for index, tree in trees:
            first = index * REPLICA_SERIALS
            for serial, parent, *facts, ids in tree["nodes"]:
                text = None if ids is None else self._text(np.array(ids, np.int32))
                nodes.append([first + serial, first + parent if parent else 0, *facts, text])
        return {
            "total_tokens": sum(tree["total_tokens"] for _, tree in trees),
            "nodes": nodes,
            "rest": {
                name: sum(tree["rest"][name] for _, tree in trees) for name in ("nodes", "tokens")
            },
        }

    async def find_prefix(self, ids: list[int]) -> dict[str, Any]:
        """The cached nodes along a prompt, of the replica that has most of it."""
        none: dict[str, Any] = {"path": [], "tokens": 0}
        found = [(0, none), *await self._told("tree_path", ids=ids)]
        index, best = max(found, key=lambda one: int(one[1]["tokens"]))
        path = [index * REPLICA_SERIALS + serial for serial in best["path"]]
        return {"path": path, "tokens": best["tokens"]}

    def request(self, name: str, has_rids: bool) -> dict[str, Any]:
        """A row, with the steps that ran while it was computed, by replica; NotFound."""
        row = self.rows.find(name)
        if row is None:
            raise NotFound(f"no row is called {name!r:.80}: the last {KEEP} requests have one")
        shown = row.shown(has_rids)
        spans = [s for s in row.spans if s.phase in ("prefill", "decode")]
        shown["steps"] = {}
        for replica in self.state.intake.replicas:
            ring = self.ring(replica.index)
            records = [] if ring is None else ring.read(0)
            shown["steps"][str(replica.index)] = [
                record[0] for record in records if _is_within(record, spans)
            ]
        if row.ids is not None:
            prompt, output = row.ids
            shown["prompt_text"] = self._text(np.frombuffer(prompt, "<i4", -1))
            shown["output_text"] = self._text(np.array(output, np.int32))
        return shown

    def _text(self, ids: np.ndarray[Any, Any]) -> str | None:
        """The text of the first token ids, with placeholders of media; None without tokenizer."""
        if self.state.tokenizer is None:
            return None
        plain = plain_ids(ids[:MAX_IDS]).tolist()
        return self.state.tokenizer.decode(plain, skip_special_tokens=False)

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


def _is_within(record: tuple[float, ...], spans: list[Span]) -> bool:
    """Whether a step overlaps one of the spans."""
    start_s, end_s = record[1], record[1] + sum(record[2 : 2 + len(TIMES)]) / 1e3
    return any(s.start_s < end_s and (s.end_s is None or start_s < s.end_s) for s in spans)


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
    tail = LogTail("server")
    tail.install()
    rows = RequestRows(state.config.serve.ui_show_text, PROBE_PREFIX, tail=tail)
    state.intake.observers = (*state.intake.observers, rows)
    state.extras[RequestRows] = rows
    state.extras[LiveFeed] = LiveFeed(state, rows, tail)


def close(state: ServerState) -> None:
    """End the streams: viewers never leave by themselves."""
    feed = state.extras.get(LiveFeed)
    if feed is not None:
        feed.close()


def feed_of(request: Request) -> LiveFeed:
    """The feed; NotFound with --disable-ui."""
    feed = state_of(request).extras.get(LiveFeed)
    if feed is None:
        raise NotFound("there is no live feed: the server runs with --disable-ui")
    found: LiveFeed = feed
    return found


@router.get("/live/events")
async def events(request: Request, topics: str = DEFAULT_TOPICS, rate: float = 10.0) -> Response:
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
    viewer = feed.join(asked, max(rate, 0.1), request.headers.get("last-event-id", ""))
    return _Stream(feed.stream(viewer), lambda: feed.viewers.discard(viewer))


@router.get("/live/tree")
async def tree(request: Request, text: str = "", prompt_ids: str = "") -> Response:
    """The nodes of the prefix cache along a prompt: ``text``, or ``prompt_ids`` with commas."""
    feed = feed_of(request)
    if bool(text) == bool(prompt_ids):
        raise InvalidRequest("send text or prompt_ids, one of them", "text")
    if text:
        ids = feed.state.require_tokenizer().encode(text, True)
    else:
        words = prompt_ids.split(",")
        if not all(word.strip().isdecimal() and len(word) < 10 for word in words):
            raise InvalidRequest("prompt_ids must be token ids with commas: 1,2,3", "prompt_ids")
        ids = [int(word) for word in words]
    return json_response(await feed.find_prefix(ids))


@router.get("/live/request/{name}")
async def row(request: Request, name: str) -> Response:
    """One of the last requests, with the numbers of the steps that ran while it was computed."""
    feed = feed_of(request)
    return json_response(feed.request(name, feed.has_rids))
