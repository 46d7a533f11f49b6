"""Traces of requests (--enable-trace): a span a call, one a sequence below it, and its phases.

A sequence's spans are made when it ends, from what intake knows, so an engine that is killed takes
none with it. Attributes follow OpenTelemetry's GenAI conventions; prompts and outputs are never in
them. Without the flag nothing here is imported.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from radixlm.entrypoints.http.access import QUIET_PATHS
from radixlm.entrypoints.http.admin.health import PROBE_PREFIX
from radixlm.entrypoints.http.middleware import App, Receive, Scope, Send
from radixlm.entrypoints.http.state import ServerState
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState
from radixlm.observe.tracing import Attribute, Span, Tracer, open_tracer
from radixlm.wire.replies import Finish

_SERVICE = "radixlm"
_current: ContextVar[Span | None] = ContextVar("span", default=None)
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/generate": "generate_content",
    "/v1/embeddings": "embeddings",
}
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


class TraceMiddleware:
    """Makes the span of each POST, as a child of the client's ``traceparent``."""

    def __init__(self, app: App, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        span = self._tracer.begin("POST", scope["headers"])
        span.attributes = {"http.request.method": "POST", "url.path": scope["path"][:200]}
        _current.set(span)
        status = 0

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            route = getattr(scope.get("route"), "path", None)
            span.name = f"POST {route or 'unknown'}"
            if route:
                span.attributes["http.route"] = route
            if status:
                span.attributes["http.response.status_code"] = status
            if not status or status >= 500:
                span.error = f"status {status}" if status else "no answer"
            self._tracer.end(span)


class _TimedText:
    """A detokenizer that notes when it worked, and for how long together."""

    def __init__(self, detokenizer: Any) -> None:
        self._inner = detokenizer
        self.first_s = self.last_s = self.seconds = 0.0

    def feed(self, ids: Any) -> str:
        return self._timed(self._inner.feed, ids)

    def finish(self) -> str:
        return self._timed(self._inner.finish)

    def _timed(self, work: Any, *args: Any) -> str:
        start_s = time.monotonic()
        text: str = work(*args)
        self.last_s = time.monotonic()
        self.first_s = self.first_s or start_s
        self.seconds += self.last_s - start_s
        return text


class _Sequence:
    """One sequence: its span, (phase, when it began), and the engines that computed it."""

    def __init__(self, span: Span, arrival_s: float, operation: str) -> None:
        self.span, self.operation = span, operation
        self.phases = [("queue", arrival_s)]
        self.pids: list[int] = []
        self.text: _TimedText | None = None


class TraceObserver(Observer):
    """Makes the spans of sequences."""

    def __init__(self, tracer: Tracer, state: ServerState) -> None:
        self._tracer, self._state = tracer, state
        self._sequences: dict[str, _Sequence] = {}

    def submitted(self, state: RequestState) -> None:
        if state.rid.startswith(PROBE_PREFIX):
            return
        parent, begun_s = _current.get(), state.began_s or state.arrival_s
        if parent is None:
            span = self._tracer.begin("", kind="internal", start_s=begun_s)
        else:
            span = self._tracer.child(parent, "", begun_s)
        if not span.is_sampled:
            return
        path = str(parent.attributes.get("url.path")) if parent is not None else ""
        kind = "embeddings" if state.wire.pooling is not None else _OPERATIONS.get(path, "chat")
        span.name = f"{kind} {self._state.model_name}"
        sequence = self._sequences[state.rid] = _Sequence(span, state.arrival_s, kind)
        if state.detokenizer is not None:
            sequence.text = _TimedText(state.detokenizer)
            state.detokenizer = sequence.text  # type: ignore[assignment]

    def progressed(self, state: RequestState, num_tokens: int) -> None:
        sequence = self._sequences.get(state.rid)
        if sequence is None or not num_tokens or sequence.phases[-1][0] == "decode":
            return
        if sequence.phases[-1][0] == "queue":
            queued_s = state.arrival_s + state.last_delta.queue_time_s
            sequence.phases.append(("prefill", min(queued_s, state.first_token_s)))
        sequence.phases.append(("decode", state.last_token_s))
        sequence.pids.append(self._pid(state.rid))

    def engine_lost(self, reason: str) -> None:
        now_s, requests = time.monotonic(), self._state.intake.requests
        for rid, sequence in self._sequences.items():
            lost = rid in requests and requests[rid].is_quarantined
            if lost and sequence.phases[-1][0] != "engine_dead":
                sequence.phases.append(("engine_dead", now_s))

    def ended(self, state: RequestState, finish: Finish) -> None:
        sequence = self._sequences.pop(state.rid, None)
        if sequence is None:
            return
        span, tracer = sequence.span, self._tracer
        if state.began_s:
            tracer.end(tracer.child(span, "tokenize", state.began_s), state.arrival_s)
        self._end_phases(sequence, state)
        text = sequence.text
        if text is not None and text.first_s:
            made = tracer.child(span, "detokenize", text.first_s)
            made.attributes["radixlm.busy_seconds"] = round(text.seconds, 6)
            tracer.end(made, text.last_s)
        if state.first_token_s:
            span.events.append(("first token", state.first_token_s))
        span.attributes = self._about(sequence, state, finish)
        if finish.kind == "error":
            span.error = finish.message or "error"
        tracer.end(span, state.finished_s or None)

    def _pid(self, rid: str) -> int:
        """Of the engine that computes a request; 0 where it is not known."""
        replicas = self._state.intake.replicas
        owner = next((replica for replica in replicas if replicas.is_of(rid, replica)), None)
        return int(owner.facts.get("pid", 0)) if owner is not None else 0

    def _end_phases(self, sequence: _Sequence, state: RequestState) -> None:
        """The spans of the phases: each ends where the next begins. What a new engine does is
        linked to what the one before did."""
        ends = [start_s for _, start_s in sequence.phases[1:]]
        last_s = state.finished_s or time.monotonic()
        pids, lost = iter(sequence.pids), None
        pid = next(pids, 0)
        for (name, start_s), end_s in zip(sequence.phases, [*ends, last_s], strict=True):
            span = self._tracer.child(sequence.span, name, start_s)
            if name == "engine_dead":
                span.error, pid = "the engine died", next(pids, 0)
            elif pid:
                span.attributes["radixlm.engine.pid"] = pid
            if lost is not None:
                span.links.append((lost, "recovered"))
            lost = span if name == "engine_dead" else None
            self._tracer.end(span, end_s)

    def _about(
        self, sequence: _Sequence, state: RequestState, finish: Finish
    ) -> dict[str, Attribute]:
        """The attributes of a sequence, by the GenAI conventions; times also as vLLM names them."""
        sampling, model, last = state.wire.sampling, self._state.model_name, state.last_delta
        span = sequence.span
        about: dict[str, Attribute] = {
            "gen_ai.operation.name": sequence.operation,
            "gen_ai.provider.name": "radixlm",
            "gen_ai.request.model": state.wire.adapter.name if state.wire.adapter else model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": state.name,
            "gen_ai.response.finish_reasons": [finish.kind],
            "gen_ai.usage.input_tokens": state.prompt_tokens,
            "gen_ai.usage.output_tokens": len(state.output_ids),
            "gen_ai.usage.cache_read.input_tokens": last.cached_tokens,
            "gen_ai.request.seed": sampling.sampling_seed or 0,
            "gen_ai.latency.time_in_queue": last.queue_time_s,
            "gen_ai.latency.e2e": max(0.0, state.finished_s - span.start_s),
        }
        about |= {f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING}
        if sampling.max_new_tokens is not None:
            about["gen_ai.request.max_tokens"] = sampling.max_new_tokens
        if state.first_token_s:
            about["gen_ai.latency.time_to_first_token"] = state.first_token_s - span.start_s
        if last.retractions:
            about["radixlm.retractions"] = last.retractions
        return about


def install(app: Any, state: ServerState) -> None:
    """Trace requests from now on. ConfigError: a package is missing."""
    tracer = open_tracer(state.config.observe.oltp_traces_endpoint, _SERVICE)
    install_tracer(app, state, tracer)


def install_tracer(app: Any, state: ServerState, tracer: Tracer) -> None:
    """The same with a tracer that is there."""
    state.extras[Tracer] = tracer
    app.add_middleware(TraceMiddleware, tracer=tracer)
    state.intake.observers = (*state.intake.observers, TraceObserver(tracer, state))
