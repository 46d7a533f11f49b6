"""The one loop. ``depth`` 0 is synchronous, 1 overlaps host and device, p pipelines p stages.

Messages are read at one place, the top of a tick; nobody calls back. When nothing can be done the
loop sleeps on its channel: an idle engine costs no CPU.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from radixlm.base.errors import EngineError, RadixError, RequestError, TooManyRequests
from radixlm.scheduler.commit import Committer
from radixlm.scheduler.control import ControlHandler
from radixlm.scheduler.hooks import Hooks, Mask
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.queue import WaitingQueue
from radixlm.scheduler.request import Request
from radixlm.step.plan import StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.channel import Channel
from radixlm.wire.replies import Finish, Heartbeat, LoadReport, StepReply, TokenDelta
from radixlm.wire.requests import AbortRequest, Control, Shutdown, TokenizedRequest

log = logging.getLogger(__name__)

BEAT_S = 1.0
MAX_RETRY_S = 60.0
# waiting for a hook (a grammar that compiles, an adapter that loads) polls this often
GATE_POLL_S = 0.002


class Executor(Protocol):
    """What the loop asks of the tensor side."""

    def forward(self, plan: StepPlan) -> Any:
        """Launch the step and return its handle without waiting."""
        ...

    def sample(self, step: Any, masks: dict[int, Mask]) -> None:
        """Turn the step's logits into tokens; ``masks`` by index of the item."""
        ...

    def read(self, step: Any) -> StepResult:
        """Wait for the step and return its results."""
        ...

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        """An operator's wish that concerns tensors."""
        ...


class Scheduler:
    """Requests in, deltas out."""

    def __init__(
        self,
        limits: Limits,
        executor: Executor,
        channel: Channel,
        kv_manager: KVCacheManager,
        hooks: Hooks | None = None,
        stream_interval: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.executor, self.channel, self.clock = limits, executor, channel, clock
        self.hooks = hooks or Hooks()
        self.kv_manager = kv_manager
        self.queue = WaitingQueue(limits, kv_manager.cache)
        self.planner = Planner(limits, kv_manager, self.queue, self.hooks, self._refuse)
        self.committer = Committer(limits, self.planner, self.hooks, stream_interval)
        self.planner.on_retract = self.committer.drop_prompt_outputs
        self.controls = ControlHandler(self)
        self.inflight: deque[tuple[StepPlan, Any]] = deque()
        self.deltas: list[TokenDelta] = []  # of requests that ended outside of a step
        self.is_paused = False
        self.is_stopped = False
        self.arriving: str | None = None  # the request that the features are being told of
        self.num_steps = 0
        self.sleep_s = 0.0  # the /slow_down test aid
        self._beat_s = 0.0
        self._rate = (clock(), 0)
        self._throughput = 0.0
        self._was_idle = True
        self._idle_since_s = 0.0
        self._is_checked = True
        self._timed: dict[str, Request] = {}  # those with a deadline

    # ---- the loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.is_stopped:
            self.tick()

    def tick(self, wait: bool = True) -> None:
        """Read messages, then plan, launch and commit what can be."""
        self._receive(self._patience() if wait else 0)
        now_s = self.clock()
        self._expire(now_s)
        plan = None if self.is_paused else self.planner.plan(now_s)
        step = self.executor.forward(plan) if plan else None
        while self.inflight and (len(self.inflight) >= max(self.limits.depth, 1) or step is None):
            self._commit(*self.inflight.popleft())
        if plan is not None:
            self.executor.sample(step, self.hooks.masks(plan.items))
            self.inflight.append((plan, step))
            self.num_steps += 1
            if self.limits.log_interval and self.num_steps % self.limits.log_interval == 0:
                self._log_load(now_s)
        while len(self.inflight) > self.limits.depth:
            self._commit(*self.inflight.popleft())
        self._flush(self.clock())
        if plan is None and not self.inflight:
            self._idle(self.clock())
        else:
            self._was_idle = self._is_checked = False
        if self.sleep_s and plan is not None:
            time.sleep(self.sleep_s)

    def _commit(self, plan: StepPlan, step: Any) -> None:
        reply = self.committer.commit(plan, self.executor.read(step))
        if reply.rids or reply.deltas:
            self.channel.send(reply)

    def _patience(self) -> float:
        """How long the loop may sleep on its channel."""
        if self.inflight or self.deltas:
            return 0
        if self.is_paused or not (self.planner.running or self.queue):
            return BEAT_S
        return GATE_POLL_S if self._was_idle else 0

    def _flush(self, now_s: float) -> None:
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self.channel.send(Heartbeat(self.load(now_s)))
        if self.deltas:
            self.channel.send(StepReply(self.deltas))
            self.deltas = []

    def _idle(self, now_s: float) -> None:
        """Nothing was planned. When that has lasted for a while the books are checked: not at once,
        for the next request must not wait for it."""
        if not self._was_idle:
            self._was_idle, self._idle_since_s = True, now_s
        is_due = not self._is_checked and now_s - self._idle_since_s >= BEAT_S
        if is_due and not self.planner.running and not self.queue:
            self.controls.check_invariants()
            self._is_checked = True

    # ---- messages --------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        for message in self.channel.receive(timeout_s):
            if isinstance(message, TokenizedRequest):
                self._arrive(message)
            elif isinstance(message, AbortRequest):
                self._abort(message)
            elif isinstance(message, Control):
                self.channel.send(self.controls.answer(message))
            elif isinstance(message, Shutdown):
                self.is_stopped = True

    def _arrive(self, wire: TokenizedRequest) -> None:
        eos = () if wire.sampling.ignore_eos else self.limits.eos_ids
        stop_ids = frozenset(wire.sampling.stop_token_ids or ()) | frozenset(eos)
        request = self._request(wire, stop_ids)
        if wire.rid in self.committer.requests:
            log.warning("request id %s is already in use; the newcomer is refused", wire.rid)
            return
        self.committer.begin(request)
        refused = self._refusal(request) or self._refused_by_hook(request)
        if refused is not None:
            self._refuse(request, refused)
            return
        self.queue.push(request)
        if wire.deadline_s or wire.queue_deadline_s:
            self._timed[wire.rid] = request

    def _request(self, wire: TokenizedRequest, stop_ids: frozenset[int]) -> Request:
        rope, key = self.limits.rope, wire.extra_key
        seen = [media.digest.hex() for media in wire.media if media.affects_earlier_tokens]
        if seen:
            key = "\0".join((key or "", *seen))
        if rope is None:
            return Request(wire, stop_ids, key)
        prompt_len = len(wire.input_ids) // 4 - wire.num_emitted
        variant = rope.variant(prompt_len)
        key = key if variant is None else f"{key or ''}\0{variant}"
        return Request(wire, stop_ids, key, rope.share_limit(prompt_len))

    def _refusal(self, request: Request) -> RequestError | None:
        most = self.limits.max_queued
        was_running = request.wire.is_quarantined or request.wire.num_emitted > 0
        if most is not None and len(self.queue) >= most and not was_running:
            return TooManyRequests(
                f"the queue is full ({most} requests wait, --max-queued-requests)",
                retry_after_s=self.retry_after_s(),
            )
        return self.planner.too_long(request)

    def _refused_by_hook(self, request: Request) -> RadixError | None:
        """Tell the features of a request. What none of them foresaw is blamed on it."""
        self.arriving = request.rid
        refused: RadixError | None = None
        try:
            request.has_token_hook = self.hooks.arrive(request)
        except RadixError as error:
            refused = error
        self.arriving = None
        return refused

    def _refuse(self, request: Request, error: RadixError) -> None:
        """End a waiting request: by its fault, or because something of ours it needs is broken."""
        if isinstance(error, RequestError):
            status, retry_after_s = error.status, error.retry_after_s
        else:
            status, retry_after_s = EngineError.status, None
        finish = Finish("error", message=str(error), status=status, retry_after_s=retry_after_s)
        self._drop(request, finish)

    def _drop(self, request: Request, finish: Finish, quiet: bool = False) -> None:
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

    def _abort(self, message: AbortRequest) -> None:
        rids = list(self.committer.requests) if message.all else message.rids
        for rid in rids:
            request = self.committer.requests.get(rid)
            if request is not None:
                self._drop(request, Finish("abort", message=message.message), message.quiet)

    def _expire(self, now_s: float) -> None:
        """Deadlines of waiting and running requests."""
        for rid, request in list(self._timed.items()):
            wire = request.wire
            if request.finish is not None:
                del self._timed[rid]
                continue
            if wire.deadline_s and now_s > wire.deadline_s:
                self._drop(request, Finish("abort", message="request timed out", status=408))
            elif request.is_waiting and wire.queue_deadline_s and now_s > wire.queue_deadline_s:
                late = Finish(
                    "error",
                    message="the request waited too long in the queue",
                    status=503,
                    retry_after_s=self.retry_after_s(),
                )
                self._drop(request, late)

    def retry_after_s(self) -> float:
        """When the queue will have moved: the tokens that wait over the tokens made a second."""
        tokens = sum(request.max_new_tokens for request in self.queue)
        rate = max(self._throughput, 1.0)
        return min(MAX_RETRY_S, max(1.0, tokens / rate / max(1, len(self.queue))))

    def _log_load(self, now_s: float) -> None:
        load = self.load(now_s)
        share = 100 * load.num_used_tokens / max(1, load.num_total_tokens)
        log.info(
            "step %d: %d running, %d waiting, %d tokens held (%.0f %%), %.0f tokens/s, "
            "%.0f %% of prompts cached",
            load.steps,
            load.num_running,
            load.num_waiting,
            load.num_used_tokens,
            share,
            load.gen_throughput,
            100 * load.cache_hit_rate,
        )

    # ---- figures ---------------------------------------------------------------------------

    def load(self, now_s: float) -> LoadReport:
        """What is held now."""
        since_s, counted = self._rate
        if now_s - since_s >= BEAT_S:
            generated = self.committer.num_generated
            self._throughput = (generated - counted) / (now_s - since_s)
            self._rate = (now_s, generated)
        kv_manager = self.kv_manager
        return LoadReport(
            num_running=len(self.planner.running),
            num_waiting=len(self.queue),
            num_used_tokens=kv_manager.num_used_tokens,
            num_total_tokens=kv_manager.num_total_tokens,
            gen_throughput=self._throughput,
            cache_hit_rate=kv_manager.hit_tokens / max(1, kv_manager.asked_tokens),
            num_retracted=self.planner.num_retracted,
            num_paused=len(self.planner.running) if self.is_paused else 0,
            steps=self.num_steps,
            num_breaches=self.controls.num_breaches,
        )
