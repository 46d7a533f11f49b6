"""TokenizerManager: prompts in, text out. It keeps every unfinished request whole, so that it can
be sent again to another engine process when one dies (``recovery.py``).
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from radixlm.base.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    QueueFull,
)
from radixlm.base.record import replace
from radixlm.intake.call import Call, current_call
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.identity import identity
from radixlm.intake.interfaces import Journal, Outputs, Preload, Share, WindowOf
from radixlm.intake.observer import Observer
from radixlm.intake.records import (
    GenerateRequest,
    Output,
    check_names,
    in_client_words,
)
from radixlm.intake.recovery import LiveRequests
from radixlm.intake.replicas import Replica
from radixlm.intake.request_state import RequestState, merge_outputs, stop_checker
from radixlm.intake.tokenized import detokenizer, tokenized
from radixlm.intake.validation import ENDLESS, RequestValidator, bad_word_ids
from radixlm.observe.ring import StepRing
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.link import Link
from radixlm.wire.replies import (
    ControlReply,
    Failed,
    Finish,
    Heartbeat,
    Ready,
    StepReply,
    ToIntake,
    TokenDelta,
)
from radixlm.wire.requests import (
    ABORTED,
    AbortRequest,
    StreamingWindow,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# ids of requests that ended here, of which the engine may still send tokens, before it is asked
MAX_ENDED = 1024
# longest time that a sweep counts as unread: this process itself may have stood still
MAX_SWEEP_S = 2.0


class TokenizerManager(LiveRequests):
    """One for each HTTP process or offline engine; ``requests`` holds the unfinished ones by id.

    ``attach`` sets what ``intake/interfaces.py`` asks for: ``outputs`` and others."""

    outputs: Outputs
    preload: Preload
    streaming_window: WindowOf

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        facts: IntakeFacts,
        link: Link | Sequence[Link],
        observers: Iterable[Observer] = (),
        method: str = "round_robin",
        options: Any = None,
    ) -> None:
        """``link``: the way to the engine, or to each of several (--dp-size), among which
        requests are spread by ``method`` (``intake/replicas.py``). ``options``: of ``attach``."""
        links = link if isinstance(link, Sequence) else (link,)
        super().__init__(links, method, facts, tuple(observers))
        self.tokenizer = tokenizer
        self.run_folders: tuple[Path, ...] = ()  # of the engines' processes on this machine
        self.rings: tuple[StepRing, ...] = ()  # of engines inside this process
        self.token_s = 0.0  # when a token last came
        self._swept_s = 0.0
        self._ended: dict[str, None] = {}  # ids of requests that ended here: see ``_settle``
        self._settling: asyncio.Task[None] | None = None
        self.attach(options)

    def attach(self, options: Any) -> None:
        """Set what ``intake/interfaces.py`` asks for."""
        raise NotImplementedError

    @property
    def is_accepting(self) -> bool:
        """Whether requests may come."""
        return not self.leaving.is_set()

    @property
    def journal(self) -> Journal | None:
        """Of the running call; None: its answer begins and ends here."""
        return None

    def start(self) -> None:
        """Start to receive messages from the engines; call it inside the event loop."""
        self.replicas.start(self._handle)

    # ---- requests --------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, share: Share | None = None) -> list[RequestState]:
        """Check, tokenise and send; one RequestState a sample. RequestError if it cannot be
        served. ``share``: of the call's journal, which may have begun on another server."""
        if not self.is_accepting:
            raise Overloaded("the server is shutting down", retry_after_s=1.0)
        if request.emitted or (share is not None and share.is_resumed):
            self._check_queue()
        began_s = time.monotonic()
        try:
            ids, sampling, streaming = self._checked(request)
        except InvalidRequest as error:
            raise in_client_words(error, request.names) from None
        prompt, event = (ids, pack_ids(np.asarray(ids))), asyncio.Event()
        request.rid = request.rid or self._free_rid(request.default_rid, sampling.n)
        states = [
            self._live(request, sampling, streaming, prompt, i, event)
            for i in range(max(1, sampling.n))
        ]
        if request.emitted:
            self.preload(states, request.emitted, self.facts.vocab)
        if share is not None:
            share.begin(states, self.facts.vocab)
        try:
            self._begin(states, began_s)
        except Exception as error:  # each new engine would be sent it again
            self.leave(state for state in states if state.rid in self.requests)
            if isinstance(error, OverflowError):
                raise InvalidRequest("a whole number has more than 64 bits; try less") from None
            raise
        return states

    def _begin(self, states: Iterable[RequestState], began_s: float) -> None:
        for state in states:
            if state.ended:
                continue
            self.requests[state.rid], state.began_s = state, began_s
            for observer in self.observers:
                observer.submitted(state)
            # or all are sent when an engine is ready
            has_begun = state.output_ids or state.is_quarantined
            self._dispatch(state, state.resume_request() if has_begun else state.wire)

    def _check_queue(self) -> None:
        """QueueFull for a request that says it has run elsewhere: the scheduler takes those at any
        length of the queue, and only administrators, such as a gateway, are believed."""
        most = self.facts.max_queued
        if most is not None and self.load.num_waiting >= most and not identity().is_admin:
            raise QueueFull("The request queue is full.", retry_after_s=1.0)

    def _free_rid(self, wanted: str | None, num_samples: int) -> str:
        """``wanted``, or another id while a request has it."""
        if wanted is None:
            return secrets.token_hex(16)
        rids = _rids_of(wanted, num_samples)
        is_used = any(rid in self.requests or rid in self._ended for rid in rids)
        return f"{wanted}-{secrets.token_hex(4)}" if is_used else wanted

    def _checked(
        self, request: GenerateRequest
    ) -> tuple[list[int], SamplingParams, StreamingWindow | None]:
        check_names(request)
        checks = RequestValidator(self.facts, self.tokenizer, self.outputs.check)
        checks.kind(request)
        self.replicas.check(request.replica)
        streaming = self.streaming_window(self.facts, request)
        if streaming is not None:
            checks = replace(checks, facts=replace(self.facts, context_len=ENDLESS))
        ids = checks.prompt_ids(request)
        return ids, checks.sampling(request, len(ids)), streaming

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Output]:
        """Outputs of all samples as they come; leaving early aborts what still runs."""
        call, count = current_call() or Call(), max(1, request.sampling.n)
        size, journal = self.facts.slice_size, self.journal
        share = journal.share(request) if journal is not None else None
        if journal is not None and journal.is_resumed:
            size = 1 << 30  # a replay must not wait for its turn
        await self.occupation.is_open.wait()
        await self.weights.admit()
        async with call.turn(count, size):
            if any(rid in self._ended for rid in _rids_of(request.rid or "", count)):
                await self._settle()
            await self.adapters.prepare(request.adapter)
            states = self.submit(request, share)
            try:
                if share is not None and share.is_resumed:
                    async for output in share.replayed(states):
                        yield output
                # some may have ended elsewhere, and others since
                left = [state for state in states if state.pending is not None or not state.ended]
                async for output in merge_outputs(left):
                    if share is not None:
                        share.note(states[output.index])
                    yield output
            finally:
                self.leave(states)

    async def collect(self, request: GenerateRequest) -> list[Output]:
        """The finished samples, in order."""
        whole: dict[int, Output] = {}
        async for output in self.stream(request):
            if output.index in whole:
                whole[output.index].absorb(output)
            else:
                whole[output.index] = output
        return [whole[i] for i in sorted(whole)]

    def leave(self, states: Iterable[RequestState]) -> None:
        """Abort the requests that still run, as their client has left."""
        gone = tuple(state.rid for state in states if not state.ended)
        for rid in gone:
            self.requests[rid].fail(Finish("abort", message="the client left", status=499))
            self._forget(rid)
        self._abort_quietly(gone)

    def _abort_quietly(self, rids: Sequence[str]) -> None:
        """Tell the engines of requests that have ended here."""
        if not rids:
            return
        self.replicas.send(AbortRequest(rids=tuple(rids), quiet=True))
        self._ended.update(dict.fromkeys(rids))
        if len(self._ended) > MAX_ENDED and (self._settling is None or self._settling.done()):
            self._settling = asyncio.ensure_future(self._settle())

    async def _settle(self) -> None:
        """Wait until no engine sends tokens of requests that have ended here: a new one of the same
        id would take them for its own."""
        ended = tuple(self._ended)
        with contextlib.suppress(Overloaded):  # a new engine knows none of them
            await self.control("ping")
        for rid in ended:
            self._ended.pop(rid, None)

    def abort(self, rid: str, message: str = ABORTED) -> int:
        """End the client's request ``rid`` (and its samples); the number of sequences ended."""
        return self._abort([r for r in self._seen() if _is_of(r, rid)], message)

    def abort_all(self, message: str = ABORTED) -> int:
        """End all requests of the client, in other HTTP processes too; an administrator's are all
        requests. The number of sequences of this process."""
        owner, rids = None if identity().is_admin else identity().owner, self._seen()
        for rid in rids:
            self.requests[rid].abort_message = message
        for replica in self.replicas.ready:
            replica.link.send(AbortRequest(all=True, message=message, owner=owner))
        self._end_aborted({rid for rid in rids if not self._is_with_engine(rid)})
        return len(rids)

    def _seen(self) -> list[str]:
        return [rid for rid, s in self.requests.items() if identity().may_see(s.wire.owner)]

    def _abort(self, rids: list[str], message: str) -> int:
        """Abort by the engine, or at once where none has the request. ``abort_message`` stays set,
        so that a request is not sent again if its engine dies before it has read the message."""
        for rid in rids:
            self.requests[rid].abort_message = message
        known = tuple(rid for rid in rids if self._is_with_engine(rid))
        if known:
            self.replicas.send(AbortRequest(rids=known, message=message))
        self._end_aborted(set(rids) - set(known))
        return len(rids)

    def _live(
        self,
        request: GenerateRequest,
        sampling: SamplingParams,
        streaming: StreamingWindow | None,
        prompt: tuple[list[int], bytes],
        index: int,
        event: asyncio.Event,
    ) -> RequestState:
        base, (ids, packed) = request.rid or "", prompt
        rid = base if sampling.n <= 1 else f"{base}#{index}"
        if rid in self.requests:
            raise InvalidRequest(f"rid: Duplicate request ID detected: {rid}", param="rid")
        wire = tokenized(
            request,
            sampling,
            self.facts,
            index,
            rid=rid,
            input_ids=packed,
            adapter=self.adapters.ref(request.adapter, packed),
            bad_words=bad_word_ids(sampling.bad_words, self.tokenizer),
            streaming=streaming,
        )
        if request.embeds is not None:
            ids = []
        elif request.prompt is not None:
            ids = request.prompt.plain.tolist()
        text = detokenizer(self.tokenizer, sampling, ids)
        state = RequestState(wire, index, text, stop_checker(sampling), event)
        state.replica = request.replica
        state.rows = self.outputs.rows(wire, request.routed_from, self.facts)
        return state

    # ---- the end --------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing new and wait for what runs; False if some had to be dropped."""
        self.leaving.set()
        if self.requests:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), timeout_s)
            except TimeoutError:
                message = "the server shut down"
                late = Finish("error", message=message, status=503, retry_after_s=1.0)
                for state in list(self.requests.values()):
                    self._fail(state, late)
                return False
        return True

    # ---- replies ---------------------------------------------------------------------------

    def _handle(self, replica: Replica, message: ToIntake) -> None:
        if isinstance(message, StepReply):
            self._apply_step(message, replica)
        elif isinstance(message, Heartbeat):
            replica.load, replica.beat_s = message.load, time.monotonic()
            if message.lines:
                for observer in self.observers:
                    observer.logged(message.lines)
            if message.num_orphans:
                for observer in self.observers:
                    observer.orphaned(message.num_orphans)
            # another HTTP process may have paused it
            self.note_paused()
            self.occupation.note()
            self._sweep(replica.beat_s)
        elif isinstance(message, Ready):
            if replica.is_ready:  # it has lost its state, not its process
                poison_rid = message.facts.get("poison_rid")
                self.lose_engine(poison_rid, replica.index, "a step failed")
            self.become_ready(message.facts, replica.index)
        elif isinstance(message, ControlReply):
            self.weights.note(replica, message)
            self.answered(message)
        elif isinstance(message, Failed):
            self.give_up(message, replica.index)

    def _apply_step(self, reply: StepReply, replica: Replica) -> None:
        stopped: list[str] = []
        self.token_s = time.monotonic()
        for moment in reply.moments:
            state = self.requests.get(moment[0])
            if state is not None and self.replicas.is_of(moment[0], replica):
                for observer in self.observers:
                    observer.scheduled(state, moment)
        ones: Iterable[tuple[str, int | TokenDelta]] = zip(reply.rids, reply.tokens, strict=False)
        for rid, news in chain(ones, ((delta.rid, delta) for delta in reply.deltas)):
            state = self.requests.get(rid)
            if state is None or not self.replicas.is_of(rid, replica):
                continue
            state.weight_version = replica.version
            if self._apply_delta(state, news):
                stopped.append(rid)
            num_tokens = 1 if isinstance(news, int) else len(news.tokens)
            for observer in self.observers:
                observer.progressed(state, num_tokens)
            if state.ended:
                self._forget(rid)
        self._abort_quietly(stopped)

    def _apply_delta(self, state: RequestState, news: int | TokenDelta) -> bool:
        """Whether intake has ended the request, so that the scheduler must abort it. An error with
        one text must not affect other requests."""
        try:
            return state.apply_delta(news) is not None
        except Exception as error:
            log.exception("request %s: its text cannot be made", state.rid)
            message = f"the output cannot be turned into text: {type(error).__name__}: {error}"
            state.fail(Finish("error", message=message, status=EngineError.status))
            return isinstance(news, int) or news.finish is None

    def _sweep(self, now_s: float) -> None:
        """End requests whose client has stopped reading, as they keep slots in the engine."""
        since_s = min(now_s - self._swept_s, MAX_SWEEP_S)
        self._swept_s = now_s
        limit_s = self.facts.stall_timeout_s
        stalled: list[str] = []
        for state in list(self.requests.values()):
            state.unread_s += since_s if state.pending is not None else 0.0
            if state.unread_s > limit_s:
                stalled.append(state.rid)
                message = f"the client read nothing for {limit_s:.0f} s"
                self._fail(state, Finish("abort", message=message, status=408))
        if stalled:
            log.warning("%d requests ended: their clients read nothing", len(stalled))
            self._abort_quietly(stalled)


def _rids_of(rid: str, num_samples: int) -> Sequence[str]:
    """The ids that a request and its parallel samples may have."""
    return (rid, *(f"{rid}#{i}" for i in range(num_samples)))


def _is_of(rid: str, asked: str) -> bool:
    """Whether ``rid`` is the request ``asked`` or one of its parallel samples."""
    return rid == asked or rid.rpartition("#")[:2] == (asked, "#")
