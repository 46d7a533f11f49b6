"""Intake: prompts in, text out. It keeps every live request whole, so that an engine process may
die and another go on (``again_all``)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from radixlm.base.errors import (
    EngineError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PromptTooLong,
    RadixError,
)
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.link import Link
from radixlm.intake.records import GenerateRequest, Output
from radixlm.intake.stream import Live
from radixlm.text.detokenize import Detokenizer
from radixlm.text.stop import StopChecker
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
)
from radixlm.wire.requests import (
    AbortRequest,
    Control,
    GrammarSpec,
    TokenizedRequest,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0
# a request that was computed alone when the engine died so often is failed alone
MAX_KILLS = 2


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

    def start(self) -> None:
        """Listen to the scheduler; call inside the event loop."""
        self.link.start(self._handle)

    # ---- requests --------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> list[Live]:
        """Check, tokenise and send; one Live a sample. RequestError if it cannot be served."""
        if not self.is_accepting:
            raise Overloaded("the server is shutting down", retry_after_s=1.0)
        ids = self._ids(request)
        sampling = self._sampling(request, len(ids))
        lives = [self._live(request, sampling, ids, i) for i in range(max(1, sampling.n))]
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
            async for output in _merged(lives):
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
        found = [r for r in self.live if r == rid or r.rpartition("#")[0] == rid]
        if found:
            self.link.send(AbortRequest(rids=tuple(found), message=message))
        return len(found)

    def abort_all(self, message: str = "aborted by request") -> int:
        count = len(self.live)
        self.link.send(AbortRequest(all=True, message=message))
        return count

    def _ids(self, request: GenerateRequest) -> list[int]:
        if request.embeds is not None:
            ids = [0] * request.num_embeds
        elif request.input_ids is not None:
            ids = request.input_ids
            bad = next((i for i in ids if not 0 <= i < self.facts.vocab), None)
            if bad is not None:
                raise InvalidRequest(
                    f"input_ids: {bad} is not a token id; the vocabulary has {self.facts.vocab}",
                    param="input_ids",
                )
        elif request.text is not None:
            if self.tokenizer is None:
                raise InvalidRequest(
                    "text: the server runs with --skip-tokenizer-init; send input_ids",
                    param="text",
                )
            ids = self.tokenizer.encode(request.text, request.add_special_tokens)
        else:
            raise InvalidRequest("one of text, input_ids and input_embeds is needed", param="text")
        if not ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="text")
        return self._fit(ids)

    def _fit(self, ids: list[int]) -> list[int]:
        most = self.facts.context_len - 1
        if len(ids) <= most:
            return ids
        if self.facts.allow_auto_truncate:
            return ids[:most]
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens; the context is {self.facts.context_len} tokens "
            "and at least one is needed for the answer",
            param="prompt",
        )

    def _sampling(self, request: GenerateRequest, num_prompt: int) -> SamplingParams:
        sampling = request.sampling
        sampling.validate(self.facts.vocab)
        room = self.facts.context_len - num_prompt
        asked = sampling.max_new_tokens
        if asked is not None and asked > room and not self.facts.allow_auto_truncate:
            raise PromptTooLong(
                f"max_tokens: {num_prompt} prompt tokens and {asked} new ones are more than the "
                f"context of {self.facts.context_len} tokens; ask for {room} or fewer",
                param="max_tokens",
            )
        count = room if asked is None else min(asked, room)
        if request.return_hidden_states and not self.facts.hidden_states_enabled:
            raise InvalidRequest(
                "return_hidden_states needs --enable-return-hidden-states",
                param="return_hidden_states",
            )
        if request.logprobs and request.logprobs.top > self.facts.vocab:
            raise InvalidRequest(
                f"top_logprobs: {request.logprobs.top} exceeds the vocabulary of "
                f"{self.facts.vocab}",
                param="top_logprobs",
            )
        seed = sampling.sampling_seed
        if seed is None:
            seed = secrets.randbits(62)
        return msgspec.structs.replace(sampling, max_new_tokens=count, sampling_seed=seed)

    def _live(
        self, request: GenerateRequest, sampling: SamplingParams, ids: list[int], index: int
    ) -> Live:
        base = request.rid or secrets.token_hex(16)
        rid = base if sampling.n <= 1 else f"{base}#{index}"
        if rid in self.live:
            raise InvalidRequest(f"rid: {rid!r} is already in use", param="rid")
        now_s = time.monotonic()
        timeout_s = request.timeout_s or self.facts.request_timeout_s
        wire = TokenizedRequest(
            rid=rid,
            input_ids=pack_ids(np.asarray(ids)),
            sampling=msgspec.structs.replace(
                sampling, n=1, sampling_seed=(sampling.sampling_seed or 0) + index
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
        return Live(wire, index, self._detokenizer(sampling), _stop_checker(sampling))

    def _detokenizer(self, sampling: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        return Detokenizer(
            self.tokenizer,
            sampling.skip_special_tokens,
            sampling.spaces_between_special_tokens,
        )

    # ---- control ---------------------------------------------------------------------------

    async def control(self, verb: str, **args: Any) -> ControlReply:
        """Ask the scheduler or the executor; Overloaded while no engine answers."""
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
                    live.fail(late)
                    self._forget(live.rid)
                return False
        return True

    # ---- replies ---------------------------------------------------------------------------

    def _handle(self, message: ToIntake) -> None:
        if isinstance(message, StepReply):
            self._take(message)
        elif isinstance(message, Beat):
            self.load, self.beat_s = message.load, time.monotonic()
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
        self.facts = _replaced(self.facts, max_total_tokens=total, context_len=context)
        self.ready.set()
        for live in list(self.live.values()):
            self.link.send(live.again())

    def lose_engine(self, culprit: str | None = None) -> None:
        """The engine died: nothing is sent until the next is ready. All requests become suspects,
        whose prompts are computed one by one; ``culprit`` was alone when the engine died again."""
        self.ready.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Overloaded("the engine restarts", retry_after_s=2.0))
        for live in list(self.live.values()):
            live.is_suspect = True
            live.kills += live.rid == culprit
            if live.kills >= MAX_KILLS:
                message = f"the engine died {live.kills} times while it computed this request"
                live.fail(Finish("error", message=message, status=EngineError.status))
                self._forget(live.rid)

    def give_up(self, failure: Failed) -> None:
        """There will be no engine any more."""
        self.failure = failure
        self.is_accepting = False
        for live in list(self.live.values()):
            live.fail(Finish("error", message=failure.message, status=503, retry_after_s=10.0))
            self._forget(live.rid)
        if self.on_failed is not None:
            self.on_failed(failure)

    def _take(self, reply: StepReply) -> None:
        stopped: list[str] = []
        self.token_s = time.monotonic()
        for delta in reply.deltas:
            live = self.live.get(delta.rid)
            if live is None:
                continue
            if live.take(delta) is not None:
                stopped.append(delta.rid)
            for observer in self.observers:
                observer.progressed(live, len(delta.tokens))
            if live.ended:
                self._forget(delta.rid)
        if stopped:
            self.link.send(AbortRequest(rids=tuple(stopped), quiet=True))

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


def _stop_checker(sampling: SamplingParams) -> StopChecker | None:
    if not sampling.stop and not sampling.stop_regex:
        return None
    return StopChecker(sampling.stop, sampling.stop_regex, trim=not sampling.no_stop_trim)


def _replaced(facts: IntakeFacts, **changes: Any) -> IntakeFacts:
    values = {name: getattr(facts, name) for name in facts.__slots__} | changes
    return IntakeFacts(**values)


async def _merged(lives: list[Live]) -> AsyncIterator[Output]:
    """Outputs of several samples as they come, until all have ended."""
    if len(lives) == 1:
        while True:
            output = await lives[0].next()
            yield output
            if output.finish is not None:
                return
    queue: asyncio.Queue[Output] = asyncio.Queue()

    async def pump(live: Live) -> None:
        while True:
            output = await live.next()
            await queue.put(output)
            if output.finish is not None:
                return

    tasks = [asyncio.create_task(pump(live)) for live in lives]
    try:
        left = len(lives)
        while left:
            output = await queue.get()
            left -= output.finish is not None
            yield output
    finally:
        for task in tasks:
            task.cancel()


def require_live(intake: Intake, rid: str) -> None:
    """NotFound unless a request of this id runs."""
    if not any(r == rid or r.rpartition("#")[0] == rid for r in intake.live):
        raise NotFound(f"no running request has the id {rid!r}", param="rid")


__all__ = ["Intake", "Observer", "RadixError", "grammar_of", "require_live"]
