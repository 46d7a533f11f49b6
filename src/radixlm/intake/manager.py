"""Intake: prompts in, text out. It keeps every live request whole, so that an engine process may
die and another go on (``again_all``)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from radixlm.base.errors import (
    EngineError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RadixError,
)
from radixlm.intake.checks import Checks
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.link import Link
from radixlm.intake.records import GenerateRequest, Output, check_names
from radixlm.intake.stream import Live, merged, stop_checker
from radixlm.text.detokenize import Detokenizer
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import (
    Beat,
    ControlReply,
    Failed,
    Finish,
    LoadReport,
    Ready,
    StepReply,
    ToIntake,
    TokenDelta,
)
from radixlm.wire.requests import (
    AbortRequest,
    Control,
    GrammarSpec,
    TokenizedRequest,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams, parallel_seed

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0
# a request that was computed alone when the engine died so often is failed alone
MAX_KILLS = 2
# a sweep that comes late, since this process stood still, blames no reader for it
MAX_SWEEP_S = 2.0


class Observer:
    """Told of what happens to requests; the metrics and the request log listen."""

    def submitted(self, live: Live) -> None: ...

    def progressed(self, live: Live, num_tokens: int) -> None: ...

    def ended(self, live: Live, finish: Finish) -> None: ...


class Intake:
    """One per HTTP process, or per offline engine."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        facts: IntakeFacts,
        link: Link,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.tokenizer, self.facts, self.link = tokenizer, facts, link
        self.observers = tuple(observers)
        self.live: dict[str, Live] = {}
        self.load = LoadReport()
        self.engine_facts: dict[str, Any] = {}
        self.beat_s = 0.0
        self.token_s = 0.0  # when a token last came
        self.is_accepting = True
        self.is_paused = False
        self.ready = asyncio.Event()
        self.failure: Failed | None = None
        self.on_failed: Callable[[Failed], None] | None = None
        self._calls: dict[str, asyncio.Future[ControlReply]] = {}
        self._drained = asyncio.Event()
        self._swept_s = 0.0

    def start(self) -> None:
        """Listen to the scheduler; call inside the event loop."""
        self.link.start(self._handle)

    # ---- requests --------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> list[Live]:
        """Check, tokenise and send; one Live a sample. RequestError if it cannot be served."""
        if not self.is_accepting:
            raise Overloaded("the server is shutting down", retry_after_s=1.0)
        check_names(request)
        checks = Checks(self.facts, self.tokenizer)
        ids = checks.prompt_ids(request)
        sampling = checks.sampling(request, len(ids))
        packed, event = pack_ids(np.asarray(ids)), asyncio.Event()
        lives = [
            self._live(request, sampling, (ids, packed), i, event)
            for i in range(max(1, sampling.n))
        ]
        for live in lives:
            self.live[live.rid] = live
            for observer in self.observers:
                observer.submitted(live)
            if self.ready.is_set():
                self.link.send(live.wire)  # else all are sent when the engine is ready
        return lives

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Output]:
        """Outputs of all samples as they come; leaving early aborts what still runs."""
        lives = self.submit(request)
        try:
            async for output in merged(lives):
                yield output
        finally:
            self.leave(lives)

    async def collect(self, request: GenerateRequest) -> list[Output]:
        """The finished samples, in order."""
        whole: dict[int, Output] = {}
        async for output in self.stream(request):
            if output.index in whole:
                whole[output.index].absorb(output)
            else:
                whole[output.index] = output
        return [whole[i] for i in sorted(whole)]

    def leave(self, lives: Iterable[Live]) -> None:
        """Nobody reads these any more: those that run are aborted."""
        gone = tuple(live.rid for live in lives if not live.ended)
        for rid in gone:
            self.live[rid].fail(Finish("abort", message="the client left", status=499))
            self._forget(rid)
        if gone:
            self.link.send(AbortRequest(rids=gone, quiet=True))

    def abort(self, rid: str, message: str = "aborted by request") -> int:
        """End the request ``rid`` (and its samples); the number of sequences ended."""
        return self._abort([r for r in self.live if _is_of(r, rid)], message)

    def abort_all(self, message: str = "aborted by request") -> int:
        return self._abort(list(self.live), message)

    def _abort(self, rids: list[str], message: str) -> int:
        """An engine that dies before it has heard of it must not make them live again."""
        for rid in rids:
            self.live[rid].abort_message = message
        if self.ready.is_set():
            if rids:
                self.link.send(AbortRequest(rids=tuple(rids), message=message))
        else:
            self._end_aborted()
        return len(rids)

    def _end_aborted(self) -> None:
        for live in list(self.live.values()):
            if live.abort_message is not None:
                self._fail(live, Finish("abort", message=live.abort_message))

    def _fail(self, live: Live, finish: Finish) -> None:
        """End a request without the scheduler."""
        live.fail(finish)
        self._forget(live.rid)

    def _live(
        self,
        request: GenerateRequest,
        sampling: SamplingParams,
        prompt: tuple[list[int], bytes],
        index: int,
        event: asyncio.Event,
    ) -> Live:
        ids, packed = prompt
        base = request.rid or secrets.token_hex(16)
        rid = base if sampling.n <= 1 else f"{base}#{index}"
        if rid in self.live:
            raise InvalidRequest(f"rid: {rid!r} is already in use", param="rid")
        now_s = time.monotonic()
        timeout_s = request.timeout_s or self.facts.request_timeout_s
        wire = TokenizedRequest(
            rid=rid,
            input_ids=packed,
            sampling=msgspec.structs.replace(
                sampling, n=1, sampling_seed=parallel_seed(sampling.sampling_seed or 0, index)
            ),
            logprobs=request.logprobs,
            return_hidden_states=request.return_hidden_states,
            extra_key=request.extra_key,
            priority=request.priority,
            arrival_s=now_s,
            deadline_s=now_s + timeout_s if timeout_s else 0.0,
            queue_deadline_s=(
                now_s + self.facts.max_queue_time_s if self.facts.max_queue_time_s else 0.0
            ),
            grammar=request.grammar or grammar_of(sampling),
            embeds=request.embeds,
            adapter=request.adapter,
            processor=request.processor,
            pooling=request.pooling,
            fair_key=request.fair_key,
            stream=request.stream,
        )
        text = self._detokenizer(sampling, () if request.embeds is not None else ids)
        return Live(wire, index, text, stop_checker(sampling), event)

    def _detokenizer(
        self, sampling: SamplingParams, prompt_ids: Sequence[int]
    ) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        return Detokenizer(
            self.tokenizer,
            sampling.skip_special_tokens,
            sampling.spaces_between_special_tokens,
            prompt_ids,
        )

    # ---- control ---------------------------------------------------------------------------

    async def control(self, verb: str, **args: Any) -> ControlReply:
        """Ask the scheduler or the executor; Overloaded while no engine answers."""
        if not self.ready.is_set():
            raise Overloaded("no engine serves yet", retry_after_s=2.0)
        call_id = secrets.token_hex(8)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.link.send(Control(call_id, verb, args))
            return await asyncio.wait_for(future, CONTROL_TIMEOUT_S)
        except TimeoutError as error:
            raise Overloaded(f"the engine did not answer {verb!r}", retry_after_s=5.0) from error
        finally:
            self._calls.pop(call_id, None)

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing new and wait for what runs; False if some had to be dropped."""
        self.is_accepting = False
        if self.live:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), timeout_s)
            except TimeoutError:
                late = Finish(
                    "error", message="the server shut down", status=503, retry_after_s=1.0
                )
                for live in list(self.live.values()):
                    self._fail(live, late)
                return False
        return True

    # ---- replies ---------------------------------------------------------------------------

    def _handle(self, message: ToIntake) -> None:
        if isinstance(message, StepReply):
            self._take(message)
        elif isinstance(message, Beat):
            self.load, self.beat_s = message.load, time.monotonic()
            self._sweep(self.beat_s)
        elif isinstance(message, Ready):
            self.become_ready(message.facts)
        elif isinstance(message, ControlReply):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Failed):
            self.give_up(message)

    def become_ready(self, facts: dict[str, Any]) -> None:
        """An engine serves: send it every live request, from where it stands."""
        self.engine_facts = facts
        self.beat_s = time.monotonic()
        total = int(facts.get("max_total_num_tokens", 0))
        context = min(self.facts.context_len, int(facts.get("context_len", 1 << 40)))
        self.facts = replace(self.facts, max_total_tokens=total, context_len=context)
        self.ready.set()
        if self.is_paused:
            self.link.send(Control("pause again", "pause", {"mode": "in_place"}))
        # what was blamed before goes last: a second death by chance strikes another
        for live in sorted(self.live.values(), key=lambda live: live.kills):
            self.link.send(live.again())

    def lose_engine(self, culprit: str | None = None) -> None:
        """The engine died: nothing is sent until the next is ready. All requests become suspects,
        whose prompts are computed one by one; ``culprit`` was alone when the engine died again."""
        self.ready.clear()
        self._fail_calls(Overloaded("the engine restarts", retry_after_s=2.0))
        self._end_aborted()
        for live in list(self.live.values()):
            live.is_suspect = True
            live.kills += live.rid == culprit
            if live.kills >= MAX_KILLS:
                message = f"the engine died {live.kills} times while it computed this request"
                self._fail(live, Finish("error", message=message, status=EngineError.status))

    def _fail_calls(self, error: Overloaded) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def give_up(self, failure: Failed) -> None:
        """There will be no engine any more. The first reason given is the one that counts."""
        if self.failure is not None:
            return
        self.failure = failure
        self.is_accepting = False
        self.ready.clear()
        self._fail_calls(Overloaded(failure.message, retry_after_s=10.0))
        for live in list(self.live.values()):
            gone = Finish("error", message=failure.message, status=503, retry_after_s=10.0)
            self._fail(live, gone)
        if self.on_failed is not None:
            self.on_failed(failure)

    def _take(self, reply: StepReply) -> None:
        stopped: list[str] = []
        self.token_s = time.monotonic()
        for delta in reply.deltas:
            live = self.live.get(delta.rid)
            if live is None:
                continue
            if self._give(live, delta):
                stopped.append(delta.rid)
            for observer in self.observers:
                observer.progressed(live, len(delta.tokens))
            if live.ended:
                self._forget(delta.rid)
        if stopped:
            self.link.send(AbortRequest(rids=tuple(stopped), quiet=True))

    def _give(self, live: Live, delta: TokenDelta) -> bool:
        """Whether intake ended the request, so that the scheduler must be told. Whatever goes
        wrong with one text must not cost the others theirs."""
        try:
            return live.take(delta) is not None
        except Exception as error:
            log.exception("request %s: its text cannot be made", live.rid)
            message = f"the output cannot be turned into text: {type(error).__name__}: {error}"
            live.fail(Finish("error", message=message, status=EngineError.status))
            return delta.finish is None

    def _sweep(self, now_s: float) -> None:
        """End what nobody reads: a client that stopped reading must not keep its slot."""
        since_s = min(now_s - self._swept_s, MAX_SWEEP_S)
        self._swept_s = now_s
        limit_s = self.facts.stall_timeout_s
        stalled: list[str] = []
        for live in list(self.live.values()):
            live.unread_s += since_s if live.pending is not None else 0.0
            if live.unread_s > limit_s:
                stalled.append(live.rid)
                message = f"the client read nothing for {limit_s:.0f} s"
                self._fail(live, Finish("abort", message=message, status=408))
        if stalled:
            log.warning("%d requests ended: nobody reads them", len(stalled))
            self.link.send(AbortRequest(rids=tuple(stalled), quiet=True))

    def _forget(self, rid: str) -> None:
        live = self.live.pop(rid, None)
        if live is not None and live.pending is not None and live.pending.finish is not None:
            for observer in self.observers:
                observer.ended(live, live.pending.finish)
        if not self.live:
            self._drained.set()


def grammar_of(sampling: SamplingParams) -> GrammarSpec | None:
    """The grammar that the sampling parameters name."""
    for kind in ("json_schema", "regex", "ebnf", "structural_tag"):
        value = getattr(sampling, kind)
        if value is not None:
            return GrammarSpec(kind, value)
    return None


def _is_of(rid: str, asked: str) -> bool:
    """Whether ``rid`` is the request ``asked`` or one of its parallel samples."""
    base, mark, _ = rid.rpartition("#")
    return rid == asked or (bool(mark) and base == asked)


def require_live(intake: Intake, rid: str) -> None:
    """NotFound unless a request of this id runs."""
    if not any(_is_of(r, rid) for r in intake.live):
        raise NotFound(f"no running request has the id {rid!r}", param="rid")


__all__ = ["Intake", "Observer", "RadixError", "grammar_of", "require_live"]
