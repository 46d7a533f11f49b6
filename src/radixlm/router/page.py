"""The gateway's page: the files at /ui, and /live/events with the topics head and workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from radixlm import __version__
from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.base.lazy import load
from radixlm.router.answer import Answer, json_answer
from radixlm.router.call import Call
from radixlm.router.worker import State, Worker
from radixlm.router.workers_api import shown

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

TOPICS = ("head", "workers")
MAX_VIEWERS = 8
MAX_TENANTS = 50  # that a frame shows: those with the most requests
PERIOD_S = 1.0
_BREAKERS = {0.0: "closed", 1.0: "open", 2.0: "half open"}
_SSE = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_FILES = ("/ui", "/ui/", "/ui/{a}", "/ui/{a}/{b}", "/ui/{a}/{b}/{c}", "/favicon.ico")


def attach(gateway: Gateway) -> None:
    """Serve the page, unless --disable-ui."""
    if gateway.options.disable_ui:
        return
    page, add = Page(gateway), gateway.routes.add
    gateway.page = page
    for path in _FILES:
        add("GET", path, page.file, "open")
    add("GET", "/", page.root, "open")
    add("GET", "/ui/info", page.info, "open")
    add("GET", "/live/events", page.events)


class Page:
    """The handlers. Nothing is computed while nobody looks."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.began_s = time.monotonic()
        self.num_viewers = 0

    async def root(self, call: Call) -> Answer:
        """The page for browsers, else the gateway's name."""
        if b"text/html" in (call.header(b"accept") or b""):
            return await self.file(call)
        return Answer(200, f"RadixLM {__version__} gateway\n".encode(), "text/plain")

    async def file(self, call: Call) -> Answer:
        """A file of the page: the same that servers have, read with their code."""
        # imports FastAPI, which the gateway needs for nothing else
        answer = await asyncio.to_thread(load, "radixlm.entrypoints.http.ui:answer")
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in call.headers}
        status, sent, body = answer(call.path, headers)
        kind = sent.pop("Content-Type", "text/plain")
        return Answer(status, body, kind, [(k.encode(), v.encode()) for k, v in sent.items()])

    async def info(self, call: Call) -> Answer:
        """What the page must know before it has a key."""
        options = self.gateway.options
        has_key = bool(options.api_key)
        models = sorted({one.model_id for one in self.gateway.registry if one.model_id})
        is_told = not has_key and len(models) == 1
        return json_answer(
            {
                "version": __version__,
                "model": models[0] if is_told else None,
                "is_gateway": True,
                "has_key": bool(has_key or options.admin_keys or options.jwt_issuer),
                "needs_key": has_key,
                "show_text": False,
            }
        )

    async def events(self, call: Call) -> Answer:
        """GET /live/events?topics=head,workers: server-sent events, one frame a second."""
        asked = ",".join(parse_qs(call.query).get("topics", [",".join(TOPICS)]))
        topics = [one for one in asked.split(",") if one]
        if unknown := set(topics) - set(TOPICS):
            name = sorted(unknown)[0]
            raise InvalidRequest(f"topics: {name!r:.80} is none of {', '.join(TOPICS)}", "topics")
        if self.num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers look already", retry_after_s=5)
        return Answer(200, self._stream(topics), "text/event-stream", [*_SSE])

    async def _stream(self, topics: list[str]) -> AsyncIterator[bytes]:
        """Frames, until the viewer leaves or the gateway drains."""
        self.num_viewers += 1
        try:
            yield _event("hello", self._hello())
            while not self.gateway.is_draining:
                made = {"head": self.head, "workers": self.workers}
                yield b"".join(_event(topic, made[topic]()) for topic in topics) or b": beat\n\n"
                await asyncio.sleep(PERIOD_S)
        finally:
            self.num_viewers -= 1

    def _hello(self) -> dict[str, Any]:
        times = {"now_s": round(time.monotonic(), 4), "unix_s": round(time.time(), 4)}
        fields: dict[str, Any] = {"version": 1, **times, "phases": [], "step_fields": []}
        return fields | {"show_text": False, "model": None}

    def head(self) -> dict[str, Any]:
        """The gateway in one line; rates are what the workers last told."""
        workers = list(self.gateway.registry)
        state = "ready" if any(one.is_available for one in workers) else "starting"
        loads = [one.load for one in workers if one.load is not None]
        return {
            "t": round(time.monotonic(), 4),
            "state": "draining" if self.gateway.is_draining else state,
            "uptime_s": round(time.monotonic() - self.began_s, 1),
            "running": sum(one.num_inflight for one in workers),
            "waiting": self.gateway.admission.num_waiting,
            "out_per_s": sum(one.tokens_per_s for one in loads) if loads else None,
        }

    def workers(self) -> dict[str, Any]:
        """All workers, tenants with requests, and what the policy has chosen."""
        gateway, index = self.gateway, self.gateway.index
        registry, metrics = gateway.registry, gateway.metrics
        tenants = sorted(gateway.admission.tenants, key=lambda t: -(t.num_inflight + t.num_waiting))
        chosen = metrics.selections()
        return {
            "workers": [self._row(one) for one in registry],
            "failed": [{"url": url, "why": why} for url, why in registry.failed.values()],
            "index_tokens": sum(index.index.held_tokens(one.name) for one in registry)
            if index else None,
            "index_bytes": index.index.num_bytes if index else None,
            "policy": gateway.options.policy,
            "choices": [{"policy": p, "worker": w, "model": m, "count": n}
                        for (_, _, m, p, w), n in chosen.items()],
            "moved": metrics.moves(),
            "tenants": [{"name": one.name, "running": one.num_inflight, "waiting": one.num_waiting,
                         "weight": one.limits.weight, "deficit": round(one.deficit)}
                        for one in tenants[:MAX_TENANTS]],
        }  # fmt: skip

    def _row(self, worker: Worker) -> dict[str, Any]:
        """A worker as /workers shows it, with what changes from second to second."""
        gateway, load_ = self.gateway, worker.load
        problem = gateway.registry.problem(worker) if worker.state is State.JOINING else ""
        index = gateway.index
        row = shown(worker, problem)
        return {
            **{name: row[name] for name in ("id", "url", "worker_type", "state", "priority")},
            "model": row["model_id"],
            "since_s": round(time.monotonic() - worker.state_since_s, 1),
            "running": worker.num_inflight,
            "tokens": worker.num_tokens,
            "routed": worker.num_routed,
            "streams": len(worker.streams),
            "breaker": _BREAKERS.get(gateway.metrics.breaker(worker), "open"),
            "waiting_tokens": load_.num_queued_tokens if load_ else None,
            "kv_usage": load_.kv_usage if load_ else None,
            "tokens_per_s": load_.tokens_per_s if load_ else None,
            "cache_tokens": index.index.held_tokens(worker.name) if index else None,
            "problem": problem,
        }


def _event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"
