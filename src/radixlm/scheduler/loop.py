"""Scheduler: the loop that reads messages, plans steps, launches them and commits their results.

``depth`` is the number of steps in flight while the next is planned: 0 is synchronous, 1 overlaps
host and device. Messages are read only at the top of a tick. When there is nothing to do, the loop
waits on its channel and uses no CPU.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from radixlm.base.errors import EngineError, InvalidRequest, QueueFull, RadixError, RequestError
from radixlm.base.record import replace
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.observe.loads import count_keys
from radixlm.scheduler.commit import Committer
from radixlm.scheduler.control import Commands, ControlHandler
from radixlm.scheduler.drafting import Drafting
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.interfaces import (
    ChunkPacer,
    ContinuousDecoding,
    Deadlines,
    Launch,
    StepLog,
    StepRecorder,
)
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.queue import WaitingQueue
from radixlm.scheduler.request import UNLIMITED, Request
from radixlm.step.masks import Masks
from radixlm.step.plan import Items, StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.channel import Channel
from radixlm.wire.replies import Finish, Heartbeat, LoadReport, StepReply, TokenDelta
from radixlm.wire.requests import (
    KV_CACHE,
    MEMORY_TAGS,
    AbortRequest,
    Control,
    Shutdown,
    TokenizedRequest,
)

log = logging.getLogger(__name__)

BEAT_S = 1.0
MAX_RETRY_S = 60.0
# how often requests are polled that wait for a feature (a grammar that compiles)
GATE_POLL_S = 0.001


class Executor(Protocol):
    """What the scheduler calls of the tensor side."""

    def forward(self, plan: StepPlan) -> Any:
        """Launch the step and return its handle without waiting."""

    def sample(self, step: Any, masks: Masks) -> None:
        """Launch the sampling of the step's tokens; ``masks`` by index of the item."""

    def read(self, step: Any) -> StepResult:
        """Wait for the step and return its results."""

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        """Run an operator's command that concerns tensors."""


class Scheduler:
    """Turns the requests that come over ``channel`` into steps of ``executor`` and into deltas."""

    def __init__(
        self,
        limits: Limits,
        executor: Executor,
        channel: Channel,
        kv_manager: KVCacheManager,
        hooks: Hooks | None = None,
        stream_interval: int = 1,
        clock: Callable[[], float] = time.monotonic,
        drafting: Drafting | None = None,
        recorder: StepRecorder | None = None,
        commands: Sequence[Callable[[ControlHandler], Commands]] = (),
        pacer: ChunkPacer | None = None,
        continuous: ContinuousDecoding | None = None,
        queue: WaitingQueue | None = None,
    ) -> None:
        self.limits, self.executor, self.channel, self.clock = limits, executor, channel, clock
        self.hooks = hooks or Hooks()
        self.kv_manager = kv_manager
        self.queue = queue if queue is not None else WaitingQueue()
        self.drafting = drafting
        self.planner = Planner(limits, kv_manager, self.queue, self.hooks, self._refuse, drafting)
        self.committer = Committer(limits, self.planner, self.hooks, stream_interval, drafting)
        self.planner.on_retract = self._on_retract
        self.planner.on_slide = self._slide
        self.planner.pacer, self.planner.continuous = pacer, continuous
        self.recorder = recorder
        if recorder is not None:
            recorder.follow(self.planner, self.committer, clock)
        self.controls = ControlHandler(self, commands)
        self.inflight: deque[tuple[StepPlan, Any]] = deque()
        self._step_start_s = self._step_end_s = 0.0  # of the last step that ran
        self._model_s = 0.0  # that the last launch of the model took; 0: not known
        self.deltas: list[TokenDelta] = []  # unsent, of requests that ended outside of a step
        self.is_paused = False
        self.released: tuple[str, ...] = ()
        self.is_stopped = False
        self.arriving: str | None = None  # the request that the features' arrive hooks look at
        self.num_steps = 0
        self.sleep_s = 0.0  # after each step: /slow_down, a help for tests
        self._heartbeat_s = 0.0
        self._rate_start = (clock(), 0)
        self._throughput = 0.0
        self.step_log = StepLog()
        self._num_waited = 0  # requests that the last plan left in the queue
        self._was_idle = True
        self._idle_since_s = 0.0
        self._is_checked = True
        self.deadlines: Deadlines | None = None

    # ---- the loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.is_stopped:
            self.tick()

    def tick(self, wait: bool = True) -> None:
        """Read messages, then plan, launch and commit what can be."""
        self._receive(self._max_wait_s() if wait else 0)
        self.hooks.tick()
        now_s = self.clock()
        plan = None if self.is_held else self.planner.plan(now_s)
        step, times = self._launch(plan, now_s) if plan else (None, None)
        num_inflight = len(self.inflight)
        while self.inflight and len(self.inflight) >= max(self.limits.depth, 1):
            self._commit(*self.inflight.popleft())
        if step is None and self.inflight and len(self.inflight) == num_inflight:
            self._commit(*self.inflight.popleft())
        if plan is not None:
            self._step_start_s = now_s
            self.step_log.resume(now_s)
            sample_s = self.clock() if times else 0.0
            self.executor.sample(step, self.hooks.masks(plan.items))
            if times and self.recorder is not None:
                self.recorder.launched(times, sample_s)
            self.inflight.append((plan, step))
            self.num_steps += 1
        while len(self.inflight) > self.limits.depth:
            self._commit(*self.inflight.popleft())
        if plan is not None:
            self.step_log.stepped(self.clock())
        if not self.inflight and (plan is None or not self.planner.running):
            self.step_log.rest(self.clock())
        if self.deadlines is not None:  # behind the plan: what finds a place at once has not waited
            self.deadlines.expire(self.clock())
        self._send_pending(self.clock())
        if plan is None and not self.inflight:
            self._on_idle(self.clock())
        else:
            self._was_idle = self._is_checked = False
        if self.sleep_s and plan is not None:
            time.sleep(self.sleep_s)

    def _launch(self, plan: StepPlan, now_s: float) -> tuple[Any, Launch | None]:
        """Launch a step; its handle, and when it was planned, its model launched and all of it."""
        recorder, planned_s = self.recorder, self.clock()
        if recorder is not None and recorder.announce(plan, planned_s):
            self.channel.send(StepReply([], moments=recorder.take()))
        step = self.executor.forward(plan)
        launched_s, forward_s = getattr(step, "launched_s", 0.0), self.clock()
        self._model_s = forward_s - launched_s if launched_s else 0.0
        launch = now_s, planned_s, launched_s, forward_s
        return step, None if recorder is None else launch

    @property
    def is_held(self) -> bool:
        """Whether no step may be planned: an operator has paused it, or taken its memory."""
        return self.is_paused or bool(self.released)

    def set_released(self, tags: Collection[str]) -> None:
        """Plan no step while memory of ``tags`` is away; none: all of it is there."""
        self.released = tuple(tag for tag in MEMORY_TAGS if tag in tags)
        for part in self.kv_manager.parts:
            part.reservations.is_closed = KV_CACHE in self.released

    def commit_inflight(self) -> None:
        """Wait for all steps in flight and commit them."""
        while self.inflight:
            self._commit(*self.inflight.popleft())

    def _commit(self, plan: StepPlan, step: Any) -> None:
        recorder = self.recorder
        wait_s = self.clock() if recorder is not None else 0.0
        result = self.executor.read(step)
        read_s = self.clock()
        self._observe_step(plan, result, read_s - max(self._step_start_s, self._step_end_s))
        self._step_end_s = read_s
        reply = self.committer.commit(plan, result)
        if recorder is not None:
            recorder.committed(plan, result, wait_s, read_s)
            if recorder.moments:
                reply.moments = recorder.take()
        if reply.rids or reply.deltas or reply.moments:
            self.channel.send(reply)

    def _observe_step(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        items = Items.of(plan.items)
        if not items.prefills and (items.drafts is None or items.drafts.continues):
            continuous = self.planner.continuous
            if continuous is not None:
                seconds = continuous.observe(items, result, seconds, self._model_s, self.sleep_s)
        if self.drafting is not None:
            self.drafting.observe_step(plan, seconds)
        if self.planner.pacer is not None:
            num_tokens = sum(item.count for item in items.prefills)
            self.planner.pacer.observe(len(items.starts), num_tokens, seconds)

    def _max_wait_s(self) -> float:
        """How long the loop may wait on its channel, in seconds."""
        if self.inflight or self.deltas:
            return 0
        is_waiting = not self.is_held and (self.planner.running or self.queue)
        if not is_waiting and not self.controls.num_pending:
            return BEAT_S
        return GATE_POLL_S if self._was_idle else 0

    def _send_pending(self, now_s: float) -> None:
        """Send a heartbeat when one is due, and deltas that no step carries."""
        if now_s - self._heartbeat_s >= BEAT_S:
            self._heartbeat_s = now_s
            self.controls.note(now_s)
            self.channel.send(Heartbeat(self.load(now_s)))
        if self.deltas:
            self.channel.send(StepReply(self.deltas))
            self.deltas = []

    def _on_idle(self, now_s: float) -> None:
        """Nothing was planned. When that has lasted for a while, the invariants are checked: not at
        once, as the next request would wait for the check."""
        if not self._was_idle:
            self._was_idle, self._idle_since_s = True, now_s
        is_due = not self._is_checked and now_s - self._idle_since_s >= BEAT_S
        if is_due and not self.planner.running and not self.queue:
            self.controls.idle()
            self._is_checked = True

    # ---- messages --------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        self._num_waited = len(self.queue)
        for message in self.channel.receive(timeout_s):
            if isinstance(message, TokenizedRequest):
                self._add_request(message)
            elif isinstance(message, AbortRequest):
                self.abort(message)
            elif isinstance(message, Control):
                reply = self.controls.answer(message)
                if reply is not None:
                    self.channel.send(reply)
            elif isinstance(message, Shutdown):
                self.is_stopped = True
        for reply in self.controls.finished():
            self.channel.send(reply)

    def _add_request(self, wire: TokenizedRequest) -> None:
        eos = () if wire.sampling.ignore_eos else self.limits.eos_ids
        stop_ids = frozenset(wire.sampling.stop_token_ids or ()) | frozenset(eos)
        request = Request(wire, stop_ids, CacheNamespace())
        last = self.committer.requests.get(wire.rid)
        if last is not None and last.finish is not None:
            self.commit_inflight()  # a step of an ended request still runs
        if wire.rid in self.committer.requests:
            log.warning("request id %s is already in use; the second request is dropped", wire.rid)
            return
        self.committer.register(request)
        self._slide(request)
        refused = self._why_refused(request) or self._call_arrive_hooks(request)
        if refused is not None:
            self._refuse(request, refused)
            return
        self.queue.push(request)
        if self.deadlines is not None:
            self.deadlines.add(request)

    def _slide(self, request: Request) -> None:
        """Drop what has left the request's streaming window, and set what others may share."""
        count = request.slide()
        if count and self.drafting is not None:
            self.drafting.slide(request, count)
        wire, rope, prompt_len = request.wire, self.limits.rope, request.prompt_len
        adapter = wire.adapter
        # tokens before it are the base model's
        start = request.place(adapter.start) if adapter is not None else 0
        request.namespace = CacheNamespace(
            weights_version=self.limits.weights_version,
            kv_layout=self.limits.kv_layout,
            adapter=adapter.digest if adapter is not None and not start else None,
            tenant=wire.tenant,
            cache_salt=wire.cache_salt,
            extra_key=wire.extra_key,
            rope_variant=rope.variant(prompt_len) if rope is not None else None,
            earlier_media=tuple(m.digest for m in wire.media if m.affects_earlier_tokens),
        )
        limits = [start] if start else []
        if rope is not None:
            limits.append(rope.share_limit(prompt_len))
        if self.limits.first_sparse is not None:
            limits.append(max(prompt_len, self.limits.first_sparse))
        request.share_limit = min(limits, default=UNLIMITED)

    def _why_refused(self, request: Request) -> RequestError | None:
        refused = too_long(request, self.kv_manager)
        was_running = request.wire.is_quarantined or request.wire.num_emitted > 0
        if refused or was_running or not self._is_queue_full():
            return refused
        retry_after_s = self.retry_after_s()
        outranked = self.queue.outranked_by(request)
        if outranked is None:
            return QueueFull("The request queue is full.", retry_after_s=retry_after_s)
        message = "The request is aborted by a higher priority request."
        self._refuse(outranked, QueueFull(message, retry_after_s=retry_after_s))
        return None

    def _is_queue_full(self) -> bool:
        """Requests that come together and find free slots at once do not wait."""
        most = self.limits.max_queued
        if most is None:
            return False
        if not self._num_waited and not self.is_held:
            most += max(0, self.limits.max_running - len(self.planner.running))
        return len(self.queue) >= most

    def _call_arrive_hooks(self, request: Request) -> RadixError | None:
        """Tell the features about a request; the error of one that refuses it. Any other exception
        leaves ``arriving`` set, so that the request is blamed for it."""
        self.arriving = request.rid
        refused: RadixError | None = None
        try:
            self.hooks.arrive(request)
        except RadixError as error:
            refused = error
        self.arriving = None
        return refused

    def _on_retract(self, request: Request) -> None:
        """All of its tokens will be computed again, by the weights that are served now."""
        if self.recorder is not None:
            self.recorder.retracted(request)
        version = self.limits.weights_version
        if request.namespace.weights_version != version:
            request.namespace = replace(request.namespace, weights_version=version)

    def _refuse(self, request: Request, error: RadixError) -> None:
        """End a waiting request with an error: of the request, or of the engine."""
        if isinstance(error, RequestError):
            status, retry_after_s, code = error.status, error.retry_after_s, error.code
        else:
            status, retry_after_s, code = EngineError.status, None, None
        finish = Finish("error", None, str(error), status, retry_after_s, code)
        self.end_request(request, finish)

    def end_request(self, request: Request, finish: Finish, quiet: bool = False) -> None:
        """End a request wherever it is."""
        if request.finish is not None:
            return
        delta = self.committer.end(request, finish)
        if not quiet:
            self.deltas.append(delta)
        if request in self.queue:
            self.queue.remove(request)
            self.committer.retire(request)
        elif not request.inflight:
            self.committer.retire(request)

    def abort(self, message: AbortRequest) -> None:
        """End the requests that the message names."""
        rids = list(self.committer.requests) if message.all else message.rids
        for rid in rids:
            request = self.committer.requests.get(rid)
            if request is not None and message.owner in (None, request.wire.owner):
                finish = Finish("abort", message=message.text(request.is_waiting))
                self.end_request(request, finish, message.quiet)

    def retry_after_s(self) -> float:
        """Seconds until the queue has moved, estimated from the tokens generated a second."""
        tokens = sum(request.max_len - request.prompt_len for request in self.queue)
        rate = max(self._throughput, 1.0)
        return min(MAX_RETRY_S, max(1.0, tokens / rate / max(1, len(self.queue))))

    # ---- figures ---------------------------------------------------------------------------

    def load(self, now_s: float) -> LoadReport:
        """What the scheduler holds now, and its rates."""
        since_s, counted = self._rate_start
        if now_s - since_s >= BEAT_S:
            generated = self.committer.num_generated
            self._throughput = (generated - counted) / (now_s - since_s)
            self._rate_start = (now_s, generated)
        elif not self._throughput and now_s > since_s:  # the first tokens after a rest
            self._throughput = (self.committer.num_generated - counted) / (now_s - since_s)
        kv_manager, stats = self.kv_manager, self.hooks.stats()
        return LoadReport(
            num_running=len(self.planner.running),
            num_waiting=len(self.queue),
            num_used_tokens=kv_manager.num_used_tokens,
            num_total_tokens=kv_manager.num_total_tokens,
            gen_throughput=self._throughput,
            cache_hit_rate=kv_manager.cache_hit_rate,
            num_evicted_tokens=kv_manager.num_evicted_tokens,
            num_retracted=self.planner.num_retracted,
            num_prefilled=self.recorder.num_prefilled if self.recorder is not None else 0,
            num_hits=sum(part.num_hit_tokens for part in kv_manager.parts),
            num_generated=self.committer.num_generated,
            num_paused=len(self.planner.running) if self.is_paused else 0,
            is_paused=self.is_paused,
            released=self.released,
            steps=self.num_steps,
            num_breaches=self.controls.num_breaches,
            spec_accept_length=self.drafting.counts.accept_len if self.drafting else 0.0,
            drafts=self.drafting.counts.totals if self.drafting else None,
            num_grammar_queue=int(stats.get("grammar_queue", 0)),
            tiers=stats,
            pages=self.recorder.pages() if self.recorder is not None else None,
            forward_s=dict(self.recorder.forward_s) if self.recorder is not None else {},
            cpu_s=time.process_time() if self.recorder is not None else 0.0,
            routing_keys=count_keys(
                (request.wire.routing_key for request in self.planner.running),
                (request.wire.routing_key for request in self.queue),
            ),
        )


def too_long(request: Request, kv_manager: KVCacheManager) -> RequestError | None:
    """Why the request can never run, if so."""
    # the pages of one attention group must do
    capacity = max(part.num_total_tokens for part in kv_manager.parts)
    if request.prefill_len + 1 > capacity:
        return InvalidRequest(
            f"the prompt has {request.prefill_len} tokens, the KV cache holds {capacity}: "
            "raise --max-total-tokens or --mem-fraction-static",
            param="input_ids",
        )
    need, capacity = kv_manager.max_span_pages(request), kv_manager.num_window_pages
    if need > capacity:
        return InvalidRequest(
            f"an image of this prompt needs {need} pages of the window layers' cache at once, "
            f"which has {capacity}: raise --max-total-tokens or --swa-full-tokens-ratio",
            param="messages",
        )
    return None
