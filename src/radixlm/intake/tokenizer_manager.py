"""TokenizerManager: prompts in, text out. It keeps every unfinished request whole, so that it can
be sent again to another engine process when one dies (``become_ready``).
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from radixlm.base.errors import (
    EngineError,
    InvalidRequest,
    InvariantError,
    Overloaded,
    QueueFull,
)
from radixlm.base.record import replace
from radixlm.intake.call import Call, current_call
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.identity import identity
from radixlm.intake.interfaces import Adapters, Journal, Occupation, Outputs, Share, Weights
from radixlm.intake.observer import Observer
from radixlm.intake.records import (
    GenerateRequest,
    Output,
    check_names,
    grammar_of,
    in_client_words,
)
from radixlm.intake.replicas import Replica, Replicas
from radixlm.intake.request_state import RequestState, merge_outputs, preload, stop_checker
from radixlm.intake.validation import ENDLESS, RequestValidator, bad_word_ids
from radixlm.observe.ring import StepRing
from radixlm.text.detokenize import Detokenizer
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.link import Link
from radixlm.wire.media import of_tenant
from radixlm.wire.replies import (
    ControlReply,
    Failed,
    Finish,
    Heartbeat,
    LoadReport,
    Ready,
    StepReply,
    ToIntake,
    TokenDelta,
)
from radixlm.wire.requests import (
    AbortRequest,
    Control,
    StreamingWindow,
    TokenizedRequest,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams, parallel_seed

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0
# engine deaths while a request was computed alone after which that request is failed
MAX_CRASHES = 2
# ids of requests that ended here, of which the engine may still send tokens, before it is asked
MAX_ENDED = 1024
# longest time that a sweep counts as unread: this process itself may have stood still
MAX_SWEEP_S = 2.0


class TokenizerManager:
    """One for each HTTP process or offline engine; ``requests`` holds the unfinished ones by id.

    ``attach`` sets ``adapters``, ``weights``, ``occupation`` and ``outputs``."""

    adapters: Adapters
    weights: Weights
    occupation: Occupation
    outputs: Outputs

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
        self.tokenizer, self.facts = tokenizer, facts
        self._model_context = facts.context_len  # the engine may have room for less
        self.replicas = Replicas(link if isinstance(link, Sequence) else (link,), method)
        self.observers = tuple(observers)
        self.run_folders: tuple[Path, ...] = ()  # of the engines' processes on this machine
        self.rings: tuple[StepRing, ...] = ()  # of engines inside this process
        self.requests: dict[str, RequestState] = {}
        self.token_s = 0.0  # when a token last came
        self.leaving = asyncio.Event()  # the server shuts down, or its engine has failed
        self._is_paused = False
        self.ready = asyncio.Event()
        self.failure: Failed | None = None
        self.on_failed: Callable[[Failed], None] | None = None
        self._calls: dict[str, tuple[Replica, asyncio.Future[ControlReply]]] = {}
        self._drained = asyncio.Event()
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
    def is_paused(self) -> bool:
        """Whether an operator has paused the engines."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        """All engines have answered; their last heartbeats may be older."""
        self._is_paused = is_paused
        for replica in self.replicas.ready:
            replica.load.is_paused = is_paused

    @property
    def journal(self) -> Journal | None:
        """Of the running call; None: its answer begins and ends here."""
        return None

    def start(self) -> None:
        """Start to receive messages from the engines; call it inside the event loop."""
        self.replicas.start(self._handle)

    @property
    def load(self) -> LoadReport:
        """The load of all replicas together."""
        return self.replicas.load()

    @property
    def num_held(self) -> int:
        """Requests that no engine has: it died, and the next one starts."""
        return sum(not self.replicas.is_computed(rid) for rid in self.requests)

    @property
    def engine_facts(self) -> dict[str, Any]:
        """The facts of the first engine that has sent some."""
        return next((r.facts for r in self.replicas if r.facts), {})

    @property
    def beat_s(self) -> float:
        """When the last heartbeat of an engine came."""
        return max(replica.beat_s for replica in self.replicas)

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
            preload(states, request.emitted, self.facts.vocab)
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

    def _dispatch(self, state: RequestState, wire: TokenizedRequest) -> None:
        num_tokens = state.prompt_tokens + len(state.output_ids)
        replica = self.replicas.assign(state.rid, state.replica, num_tokens)
        if replica is not None:
            replica.link.send(wire)

    def _checked(
        self, request: GenerateRequest
    ) -> tuple[list[int], SamplingParams, StreamingWindow | None]:
        check_names(request)
        checks = RequestValidator(self.facts, self.tokenizer, self.outputs.check)
        checks.kind(request)
        self.replicas.check(request.replica)
        streaming = checks.streaming(request)
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

    def abort(self, rid: str, message: str = "aborted by request") -> int:
        """End the client's request ``rid`` (and its samples); the number of sequences ended."""
        return self._abort([r for r in self._seen() if _is_of(r, rid)], message)

    def abort_all(self, message: str = "aborted by request") -> int:
        """End all requests of the client, in other HTTP processes too; an administrator's are all
        requests. The number of sequences of this process."""
        owner, rids = None if identity().is_admin else identity().owner, self._seen()
        for rid in rids:
            self.requests[rid].abort_message = message
        for replica in self.replicas.ready:
            replica.link.send(AbortRequest(all=True, message=message, owner=owner))
        self._end_aborted({rid for rid in rids if not self._is_with_engine(rid)})
        return len(rids)

    def _is_with_engine(self, rid: str) -> bool:
        return self.ready.is_set() and self.replicas.is_computed(rid)

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

    def _end_aborted(self, among: set[str]) -> None:
        for state in list(self.requests.values()):
            if state.rid in among and state.abort_message is not None:
                self._fail(state, Finish("abort", message=state.abort_message))

    def _fail(self, state: RequestState, finish: Finish) -> None:
        """End a request without the scheduler."""
        state.fail(finish)
        self._forget(state.rid)

    def _live(
        self,
        request: GenerateRequest,
        sampling: SamplingParams,
        streaming: StreamingWindow | None,
        prompt: tuple[list[int], bytes],
        index: int,
        event: asyncio.Event,
    ) -> RequestState:
        ids, packed = prompt
        media, tenant, call = request.prompt, identity().tenant, current_call()
        base = request.rid or ""
        rid = base if sampling.n <= 1 else f"{base}#{index}"
        if rid in self.requests:
            raise InvalidRequest(f"rid: Duplicate request ID detected: {rid}", param="rid")
        now_s, max_queue_s = time.monotonic(), self.facts.max_queue_time_s
        timeout_s = request.timeout_s or self.facts.request_timeout_s
        wire = TokenizedRequest(
            rid=rid,
            input_ids=packed,
            sampling=msgspec.structs.replace(
                sampling, n=1, sampling_seed=parallel_seed(sampling.sampling_seed or 0, index)
            ),
            logprobs=request.logprobs,
            return_hidden_states=request.return_hidden_states,
            return_routed_experts=request.return_routed_experts,
            cache_salt=request.cache_salt,
            extra_key=request.extra_key,
            tenant=tenant,
            owner=identity().owner,
            priority=self.facts.priority_of(request.priority),
            arrival_s=now_s,
            deadline_s=now_s + timeout_s if timeout_s else 0.0,
            queue_deadline_s=now_s + max_queue_s if max_queue_s else 0.0,
            grammar=request.grammar or grammar_of(sampling),
            embeds=request.embeds,
            media=of_tenant(media.media, tenant) if media is not None else (),
            rope_ids=media.packed_rope_ids() if media is not None else None,
            adapter=self.adapters.ref(request.adapter, packed),
            processor=request.processor,
            pooling=request.pooling,
            fair_key=request.fair_key,
            call_key=call.key if call else None,
            routing_key=request.routing_key or (call.routing_key if call else None),
            stream=request.stream,
            bad_words=bad_word_ids(sampling.bad_words, self.tokenizer),
            prediction=pack_ids(request.prediction),
            hint=request.hint,
            streaming=streaming,
            reasoning_bound=request.reasoning_bound,
        )
        if request.embeds is not None:
            ids = []
        elif media is not None:
            ids = media.plain.tolist()
        text = self._detokenizer(sampling, ids)
        state = RequestState(wire, index, text, stop_checker(sampling), event)
        state.replica = request.replica
        state.rows = self.outputs.rows(wire, request.routed_from, self.facts)
        return state

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
        """Ask the scheduler or the executor; Overloaded while no engine answers. Of several
        replicas all are asked: the first that refuses answers for them, else the first."""
        replies = await self.control_each(verb, **args)
        return next((reply for reply in replies if not reply.ok), replies[0])

    async def control_each(self, verb: str, **args: Any) -> list[ControlReply]:
        """The answers of all replicas that serve, in order; Overloaded if one does not answer."""
        ready = self.replicas.ready
        if not ready:
            raise Overloaded("no engine serves yet", retry_after_s=2.0)
        calls = [self.ask(replica, verb, args) for replica in ready]
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), CONTROL_TIMEOUT_S)
        except TimeoutError as error:
            raise Overloaded(f"the engine did not answer {verb!r}", retry_after_s=5.0) from error
        finally:
            for call in calls:
                call.cancel()

    def ask(
        self, replica: Replica, verb: str, args: dict[str, Any]
    ) -> asyncio.Future[ControlReply]:
        """Send a command to one engine; its answer to come. Overloaded if the engine dies."""
        call_id = secrets.token_hex(8)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (replica, future)
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        replica.link.send(Control(call_id, verb, args))
        return future

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

    def _handle(self, message: ToIntake, replica: Replica) -> None:
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
            self._is_paused = any(replica.load.is_paused for replica in self.replicas.ready)
            self.occupation.note()
            self._sweep(replica.beat_s)
        elif isinstance(message, Ready):
            if replica.is_ready:  # it has lost its state, not its process
                poison_rid = message.facts.get("poison_rid")
                self.lose_engine(poison_rid, replica.index, "a step failed")
            self.become_ready(message.facts, replica.index)
        elif isinstance(message, ControlReply):
            self.weights.note(replica, message)
            _, future = self._calls.get(message.call_id, (None, None))
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Failed):
            self.give_up(message, replica.index)

    def become_ready(self, facts: dict[str, Any], index: int = 0) -> None:
        """An engine serves: send it every request that no other engine has, from where it was."""
        replica = self.replicas[index]
        if not self.weights.is_current(facts):
            self.weights.bring(replica, facts)
            return
        total, context_len = facts.get("max_total_num_tokens", 0), facts.get("context_len")
        context_len = self._model_context if context_len is None else context_len
        if int(total) < 0 or int(context_len) < 1:
            raise InvariantError(f"an engine with {total} tokens and a context of {context_len}")
        self.facts = replace(
            self.facts,
            max_total_tokens=int(total),
            context_len=min(self._model_context, int(context_len)),
            model_context_len=self._model_context,
            slice_size=2 * int(facts.get("max_running", 0)) or self.facts.slice_size,
        )
        replica.facts, replica.beat_s = facts, time.monotonic()
        replica.is_ready, replica.is_gone = True, False
        self.weights.served_by(replica)
        self.adapters.restore(replica)
        self.occupation.restore(replica)
        if self.is_paused:
            replica.link.send(Control("pause again", "pause", {"mode": "in_place"}))
        self.replicas.orphans(replica)
        self._send_again()

    def _send_again(self) -> None:
        """Send the requests that no engine has. Those with crashes go last, so that another death
        by chance counts against another request."""
        for state in sorted(self.requests.values(), key=lambda state: state.crash_count):
            if not self.replicas.is_computed(state.rid):
                self._dispatch(state, state.resume_request())

    def lose_engine(
        self, poison_rid: str | None = None, index: int = 0, why: str = "the engine died"
    ) -> None:
        """An engine died, as ``why`` says: its requests go to the other engines at once, or wait
        for the next one. All of them are quarantined, so that their prompts are computed one by
        one; ``poison_rid`` was computed alone when the engine died."""
        replica = self.replicas[index]
        was_serving = replica.is_ready
        replica.is_ready, replica.beat_s, replica.load = False, 0.0, LoadReport()
        lost = self.replicas.orphans(replica)
        if not self.replicas.ready:
            self.ready.clear()
        self._fail_calls(Overloaded("the engine restarts", retry_after_s=2.0), replica)
        self._end_aborted(lost)
        for state in [state for state in self.requests.values() if state.rid in lost]:
            state.is_quarantined = True
            state.crash_count += state.rid == poison_rid
            if state.crash_count >= MAX_CRASHES:
                message = (
                    f"the engine died {state.crash_count} times while it computed this request"
                )
                self._fail(state, Finish("error", message=message, status=EngineError.status))
        held = [one for rid in lost if (one := self.requests.get(rid)) is not None]
        for observer in self.observers:
            observer.held(held, why)
        self._send_again()
        for observer in self.observers if was_serving else ():
            observer.engine_lost("the engine died")

    def _fail_calls(self, error: Overloaded, replica: Replica | None = None) -> None:
        for asked, future in list(self._calls.values()):
            if not future.done() and replica in (None, asked):
                future.set_exception(error)

    def give_up(self, failure: Failed, index: int = 0) -> None:
        """There will be no engine for this replica any more. Without other replicas, or before it
        has served, this ends intake; the first failure is the one that is reported."""
        replica = self.replicas[index]
        others = [r for r in self.replicas if r is not replica and not r.is_gone]
        replica.is_gone, had_served = True, bool(replica.facts)
        if self.failure is not None:
            return
        if others and had_served:
            log.error("replica %d is gone for good: %s", index, failure.message)
            return
        self.failure = failure
        self.leaving.set()
        self.ready.clear()
        self._fail_calls(Overloaded(failure.message, retry_after_s=10.0))
        for state in list(self.requests.values()):
            gone = Finish("error", message=failure.message, status=503, retry_after_s=10.0)
            self._fail(state, gone)
        for observer in self.observers:
            observer.engine_lost(failure.message)
        if self.on_failed is not None:
            self.on_failed(failure)

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

    def _forget(self, rid: str) -> None:
        state = self.requests.pop(rid, None)
        self.replicas.forget(rid)
        if state is not None and state.pending is not None and state.pending.finish is not None:
            for observer in self.observers:
                observer.ended(state, state.pending.finish)
        if not self.requests:
            self._drained.set()


def _rids_of(rid: str, num_samples: int) -> Sequence[str]:
    """The ids that a request and its parallel samples may have."""
    return (rid, *(f"{rid}#{i}" for i in range(num_samples)))


def _is_of(rid: str, asked: str) -> bool:
    """Whether ``rid`` is the request ``asked`` or one of its parallel samples."""
    return rid == asked or rid.rpartition("#")[:2] == (asked, "#")
