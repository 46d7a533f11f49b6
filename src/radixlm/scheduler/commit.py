"""What becomes of a step's results: tokens become known, requests end, deltas are made."""

from __future__ import annotations

from collections.abc import Iterable

from radixlm.base.errors import RequestError
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item, StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.wire.replies import Finish, Logprobs, TokenDelta

# a request whose client does not stream reports every so many tokens: enough for recovery
UNSTREAMED_INTERVAL = 16


def merged(parts: Iterable[Logprobs | None]) -> Logprobs | None:
    """Log-probabilities of consecutive places, joined."""
    found = [p for p in parts if p is not None]
    if not found:
        return None
    whole = Logprobs(chosen=[], top=[], asked=[])
    for part in found:
        whole.chosen.extend(part.chosen)
        whole.top.extend(part.top)
        whole.asked.extend(part.asked)
    return whole


class Unsent:
    """What a request has produced since its last delta."""

    __slots__ = ("hidden", "logprobs", "prompt")

    def __init__(self) -> None:
        self.logprobs: list[Logprobs | None] = []
        self.prompt: list[Logprobs | None] = []
        self.hidden: list[bytes] = []


class Committer:
    """Turns StepResults into known tokens and TokenDeltas."""

    def __init__(
        self, limits: Limits, planner: Planner, hooks: Hooks, stream_interval: int = 1
    ) -> None:
        self.limits, self.planner, self.hooks = limits, planner, hooks
        self.stream_interval = stream_interval
        self.requests: dict[str, Request] = {}
        self._unsent: dict[str, Unsent] = {}
        self.num_generated = 0
        self._has_window = planner.ledger.window is not None

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Deltas for intake, in the order of the plan."""
        deltas: list[TokenDelta] = []
        requests = self.requests
        for item, got in zip(plan.items, result.items, strict=True):
            request = requests.get(item.rid)
            if request is None or request.slot != item.slot:
                continue
            request.inflight -= 1
            if request.finish is None:
                request.done = item.start + item.count
                if item.tokens is not None or got.error is not None:
                    delta = self._advance(request, item, got)
                else:
                    if self._has_window and request.done % self.limits.page_size == 0:
                        self.planner.ledger.slide(request)
                    if got.logprobs is not None or got.hidden_states is not None:
                        self._keep(request, got)
                    delta = self._emit(request, got)
                if delta is not None:
                    deltas.append(delta)
            if request.finish is not None and not request.inflight:
                self.retire(request)
        return deltas

    def _advance(self, request: Request, item: Item, got: ItemResult) -> TokenDelta | None:
        """A part of the prompt was computed."""
        if got.error is not None:
            request.done = item.start  # what this step wrote is not shared
            return self.end(request, Finish("error", message=got.error, status=500))
        self.planner.ledger.insert(request)
        self.planner.ledger.slide(request)
        self._keep(request, got)
        if got.pooled is not None:
            return self.end(request, Finish("stop"), pooled=got.pooled)
        if got.tokens:
            return self._emit(request, got)
        if request.done == request.base and not item.emit and not request.wire.pooling:
            return self.end(request, Finish("length"))
        return None

    def _emit(self, request: Request, got: ItemResult) -> TokenDelta | None:
        """Tokens were sampled; runs once a request a step, so the common delta is made here."""
        finish = self._append(request, got.tokens)
        if finish is None and self.hooks.has_forced:
            finish = self._jump(request)
        if finish is not None:
            return self.end(request, finish)
        fresh = request.fresh
        if len(fresh) < request.interval:
            return None
        if self._unsent:
            return self.delta(request)
        request.fresh = []
        return TokenDelta(
            request.rid, fresh, None, request.prompt_len, request.num_cached, request.retractions
        )

    def interval(self, request: Request) -> int:
        """Tokens between two deltas."""
        wire = request.wire
        if wire.stream:
            return wire.sampling.stream_interval or self.stream_interval
        return 1 if wire.sampling.stop or wire.sampling.stop_regex else UNSTREAMED_INTERVAL

    def _append(self, request: Request, tokens: tuple[int, ...]) -> Finish | None:
        finish: Finish | None = None
        count = 0
        for token in tokens:
            request.append(token)
            count += 1
            known = request.num_known
            if token in request.stop_ids and known - request.prompt_len >= request.min_new:
                finish = Finish("stop", matched=token)
                break
            if known >= request.full_at:
                finish = Finish("length")
                break
        self.num_generated += count
        if self.hooks.has_committed:
            try:
                self.hooks.committed(request, tokens[:count])
            except RequestError as error:
                return Finish("error", message=str(error), status=error.status)
        return finish

    def _jump(self, request: Request) -> Finish | None:
        """Append what must come next. The next step computes it as a piece of prompt; if there are
        no pages for it, it is sampled token by token."""
        tokens = () if request.inflight else self.hooks.forced(request)
        tokens = tokens[: request.full_at - request.num_known]
        if not tokens or not self.planner.ledger.take(request, request.num_known + len(tokens)):
            return None
        finish = self._append(request, tuple(tokens))
        request.base, request.num_planned = request.num_known, request.num_output
        return finish

    def _keep(self, request: Request, got: ItemResult) -> None:
        if got.logprobs is None and got.prompt_logprobs is None and got.hidden_states is None:
            return
        unsent = self._unsent.setdefault(request.rid, Unsent())
        unsent.logprobs.append(got.logprobs)
        unsent.prompt.append(got.prompt_logprobs)
        if got.hidden_states is not None:
            unsent.hidden.append(got.hidden_states)

    def forget_prompt(self, request: Request) -> None:
        """The request was retracted: what it kept of its prompt will be made again."""
        if not request.num_output:
            self._unsent.pop(request.rid, None)

    def delta(self, request: Request, pooled: list[float] | None = None) -> TokenDelta:
        """All that is new since the last delta."""
        tokens, request.fresh = request.fresh, []
        unsent = self._unsent.pop(request.rid, None) if self._unsent else None
        return TokenDelta(
            rid=request.rid,
            tokens=tokens,
            finish=request.finish,
            prompt_tokens=request.prompt_len,
            cached_tokens=request.num_cached,
            retractions=request.retractions,
            prompt_logprobs=merged(unsent.prompt) if unsent else None,
            logprobs=merged(unsent.logprobs) if unsent else None,
            hidden_states=unsent.hidden or None if unsent else None,
            pooled=pooled,
            queue_time_s=max(0.0, request.started_s - request.queued_s),
        )

    def end(
        self, request: Request, finish: Finish, pooled: list[float] | None = None
    ) -> TokenDelta:
        """The request is over; what it holds is freed once no step in flight touches it."""
        request.finish = finish
        return self.delta(request, pooled)

    def retire(self, request: Request) -> None:
        """Share what was computed, give back slot and pages, forget the request."""
        if request in self.planner.running:
            self.planner.leave(request)
        self._unsent.pop(request.rid, None)
        self.requests.pop(request.rid, None)
        self.hooks.release(request)
