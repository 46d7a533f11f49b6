"""Traces of sequences (--enable-trace): a span each, and its phases below it.

A sequence's spans are made when it ends, of the row that ``RequestRows`` kept, so an engine that is
killed takes none with it. Attributes follow OpenTelemetry's GenAI conventions; prompts and outputs
are never in them. Without the flag nothing here is imported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.live_feed.rows import RequestRows, Row
from radixlm.observe.tracing import Attribute, Span, Tracer, open_tracer

_SERVICE = "radixlm"
call_span: ContextVar[Span | None] = ContextVar("span", default=None)
"""The span of the call that the running task works for."""
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/generate": "generate_content",
    "/v1/embeddings": "embeddings",
}
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


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
    """One sequence: its span, and the pids of the engines that computed it, one after another."""

    def __init__(self, span: Span, operation: str) -> None:
        self.span, self.operation = span, operation
        self.pids: list[int] = []
        self.text: _TimedText | None = None


class TraceObserver(Observer):
    """Makes the spans of sequences, of the rows of ``RequestRows``."""

    def __init__(
        self, tracer: Tracer, intake: TokenizerManager, model: str, hidden: str | None = None
    ) -> None:
        """``hidden``: how ids begin of requests that are not traced."""
        self._tracer, self._intake, self._model, self._hidden = tracer, intake, model, hidden
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: set[str] = set()  # for the first token of an engine

    def submitted(self, state: RequestState) -> None:
        if self._hidden is not None and state.rid.startswith(self._hidden):
            return
        parent, begun_s = call_span.get(), state.began_s or state.arrival_s
        if parent is None:
            span = self._tracer.begin("", kind="internal", start_s=begun_s)
        else:
            span = self._tracer.child(parent, "", begun_s)
        if not span.is_sampled:
            return
        path = str(parent.attributes.get("url.path")) if parent is not None else "/generate"
        kind = "embeddings" if state.wire.pooling is not None else _OPERATIONS.get(path, "chat")
        span.name = f"{kind} {self._model}"
        sequence = self._sequences[state.rid] = _Sequence(span, kind)
        self._waiting.add(state.rid)
        if state.detokenizer is not None:
            sequence.text = _TimedText(state.detokenizer)
            state.detokenizer = sequence.text  # type: ignore[assignment]

    def progressed(self, state: RequestState, num_tokens: int) -> None:
        if num_tokens and state.rid in self._waiting:
            self._waiting.discard(state.rid)
            self._sequences[state.rid].pids.append(self._pid(state.rid))

    def held(self, states: Sequence[RequestState], why: str) -> None:
        for state in states:
            if (sequence := self._sequences.get(state.rid)) is not None:
                if state.rid in self._waiting:  # it has computed no token
                    sequence.pids.append(0)
                self._waiting.add(state.rid)

    def row_ended(self, state: RequestState, row: Row) -> None:
        """Export the spans of a sequence that is over."""
        self._waiting.discard(state.rid)
        sequence = self._sequences.pop(state.rid, None)
        if sequence is None:
            return
        span, tracer = sequence.span, self._tracer
        if state.began_s:
            tracer.end(tracer.child(span, "tokenize", state.began_s), state.arrival_s)
        self._end_phases(sequence, row)
        text = sequence.text
        if text is not None and text.first_s:
            made = tracer.child(span, "detokenize", text.first_s)
            made.attributes["radixlm.busy_seconds"] = round(text.seconds, 6)
            tracer.end(made, text.last_s)
        if state.first_token_s:
            span.events.append(("first token", state.first_token_s))
        span.attributes = self._about(sequence, state, row)
        if row.finish == "error":
            span.error = "the request ended with an error"
        tracer.end(span, row.ended_s)

    def _pid(self, rid: str) -> int:
        """Of the engine that computes a request; 0 where it is not known."""
        replicas = self._intake.replicas
        owner = next((replica for replica in replicas if replicas.is_of(rid, replica)), None)
        return int(owner.facts.get("pid", 0)) if owner is not None else 0

    def _end_phases(self, sequence: _Sequence, row: Row) -> None:
        """The spans of the phases. What follows the loss of an engine, or of the sequence's pages,
        is linked to it."""
        pids, broken = iter(sequence.pids), None
        pid = next(pids, 0)
        for phase in row.spans:
            span = self._tracer.child(sequence.span, phase.phase, phase.start_s)
            if phase.phase == "engine_dead":
                span.error, pid = "the engine died", next(pids, 0)
            elif pid and phase.phase in ("prefill", "decode"):
                span.attributes["radixlm.engine.pid"] = pid
            if phase.tokens:
                span.attributes["radixlm.tokens"] = phase.tokens
            if broken is not None:
                span.links.append((broken, "after"))
            broken = span if phase.phase in ("engine_dead", "retracted") else None
            self._tracer.end(span, phase.end_s if phase.end_s is not None else row.ended_s)

    def _about(self, sequence: _Sequence, state: RequestState, row: Row) -> dict[str, Attribute]:
        """The attributes of a sequence, by the GenAI conventions; times also as vLLM names them."""
        sampling, model, last = state.wire.sampling, self._model, state.last_delta
        span = sequence.span
        about: dict[str, Attribute] = {
            "gen_ai.operation.name": sequence.operation,
            "gen_ai.provider.name": "radixlm",
            "gen_ai.request.model": state.wire.adapter.name if state.wire.adapter else model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": state.name,
            "gen_ai.response.finish_reasons": [row.finish or "stop"],
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


def trace_intake(
    intake: TokenizerManager,
    endpoint: str,
    model: str,
    rows: RequestRows | None = None,
    hidden: str | None = None,
) -> Tracer:
    """Trace the requests of ``intake`` from now on. ``rows``: its observer, if there is one.
    ConfigError: a package is missing."""
    tracer = open_tracer(endpoint, _SERVICE)
    observer = TraceObserver(tracer, intake, model, hidden)
    if rows is None:
        rows = RequestRows(hidden=hidden)
        intake.observers = (*intake.observers, rows)
    intake.observers = (*intake.observers, observer)
    rows.on_end.append(observer.row_ended)
    return tracer
