"""What becomes of a step's results: tokens become known, requests end, deltas are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from radixlm.base.errors import RequestError
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array
from radixlm.step.plan import Int32Array, Item, Items, StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.wire.replies import Finish, Logprobs, StepReply, TokenDelta

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
        self._stops: Counter[int] = Counter()  # how many requests end with a token
        self._unsent: dict[str, Unsent] = {}
        self._num_hidden: dict[str, int] = {}  # places whose hidden states were kept or told
        self.num_generated = 0
        self._rows = planner.kv_manager.rows
        self._has_window = planner.kv_manager.window is not None

    def begin(self, request: Request) -> None:
        """The request is there."""
        self.requests[request.rid] = request
        self._stops.update(request.stop_ids)
        wire, emit_interval = request.wire, UNSTREAMED_INTERVAL
        if wire.stream:
            emit_interval = wire.sampling.stream_interval or self.stream_interval
        elif wire.sampling.stop or wire.sampling.stop_regex or wire.is_quarantined:
            emit_interval = 1  # what an engine that dies soon has made of a suspect is kept
        request.emit_interval = emit_interval
        request.max_len = min(request.prompt_len + request.max_new_tokens, self.limits.context_len)

    def commit(self, plan: StepPlan, result: StepResult) -> StepReply:
        """What intake is to be told. A request has at most one delta in it."""
        reply, items = StepReply([]), Items.of(plan.items)
        if len(items.starts):
            self._commit_decode_batch(items, result, reply)
        for item, got in zip(items.prefills, result.prefills, strict=True):
            self._commit_prefill(self.requests[item.rid], item, got, reply)
        return reply

    # ---- rows that decode ------------------------------------------------------------------

    def _commit_decode_batch(self, items: Items, result: StepResult, reply: StepReply) -> None:
        """Each of the lineup has computed a token and drawn one."""
        rids, slots = items.decodes.rids, items.decodes.slots
        self._rows.inflight[slots] -= 1
        is_fast_path = self._rows.is_fast_path[slots]
        if result.detailed:
            is_fast_path[list(result.detailed)] = False
        if np.count_nonzero(is_fast_path) == len(slots):  # a fraction of what all() costs
            self._commit_decodes(slots, rids, items.starts, result.tokens, reply)
            return
        plain = np.flatnonzero(is_fast_path)
        if len(plain):
            names = [rids[i] for i in plain.tolist()]
            self._commit_decodes(
                slots[plain], names, items.starts[plain], result.tokens[plain], reply
            )
        for index in np.flatnonzero(~is_fast_path).tolist():
            request = self._rows.request(int(slots[index]))
            got = result.detailed.get(index) or ItemResult((int(result.tokens[index]),))
            self._commit_item(request, items[index], got, reply)

    def _commit_decodes(
        self,
        slots: Int64Array,
        rids: Sequence[str],
        starts: Int64Array,
        tokens: Int32Array,
        reply: StepReply,
    ) -> None:
        """A token of each row becomes known, and nothing else has to be done with it."""
        rows = self._rows
        rows.num_committed[slots] = starts + 1
        if self._has_window:
            for slot in slots[(starts + 1) % self.limits.page_size == 0].tolist():
                self.planner.kv_manager.free_out_of_window(rows.request(slot))
        known = rows.append(slots, tokens)
        self.num_generated += len(slots)
        values: list[int] = tokens.tolist()
        is_due = known >= rows.check_at[slots]
        if not self._stops.keys().isdisjoint(values):
            is_due |= np.array([token in self._stops for token in values])
        if np.count_nonzero(is_due):
            for i in np.flatnonzero(is_due).tolist():
                self._check_finished(rows.request(int(slots[i])), values[i], reply)
        self._emit_decodes(slots, rids, known, values, reply)

    def _check_finished(self, request: Request, token: int, reply: StepReply) -> None:
        """A row may have ended, or must store its tokens."""
        finish = self._finish(request, token)
        if finish is None:
            request.store()
            return
        reply.deltas.append(self.end(request, finish))
        if not request.inflight:
            self.retire(request)

    def _emit_decodes(
        self,
        slots: Int64Array,
        rids: Sequence[str],
        known: Int64Array,
        values: list[int],
        reply: StepReply,
    ) -> None:
        """Tokens that are due go to intake: of a row that has one new token, just that."""
        rows = self._rows
        fresh = known - rows.num_sent[slots]
        is_one = (fresh == 1) & (rows.emit_interval[slots] == 1)
        if np.count_nonzero(is_one) == len(slots):
            reply.rids, reply.tokens = rids, values
            rows.num_sent[slots] = known
            return
        one = np.flatnonzero(is_one)
        rows.num_sent[slots[one]] = known[one]
        reply.rids = [rids[i] for i in one.tolist()]
        reply.tokens = [values[i] for i in one.tolist()]
        for i in np.flatnonzero(~is_one & (fresh >= rows.emit_interval[slots])).tolist():
            request = rows.requests[int(slots[i])]
            if request is not None and request.num_unsent:
                reply.deltas.append(self.delta(request))

    # ---- one by one ------------------------------------------------------------------------

    def _commit_prefill(
        self, request: Request, item: Item, got: ItemResult, reply: StepReply
    ) -> None:
        """An item that did not just decode has been computed."""
        request.inflight -= 1
        self._commit_item(request, item, got, reply)

    def _commit_item(self, request: Request, item: Item, got: ItemResult, reply: StepReply) -> None:
        """What becomes of one item's result."""
        if request.finish is None:
            request.num_committed = item.start + item.count
            if item.tokens is not None or got.error is not None:
                delta = self._commit_chunk(request, item, got)
            else:
                if self._has_window and request.num_committed % self.limits.page_size == 0:
                    self.planner.kv_manager.free_out_of_window(request)
                self._buffer_outputs(request, item, got)
                delta = self._emit(request, got)
            if delta is not None:
                reply.deltas.append(delta)
        if request.finish is not None and not request.inflight:
            self.retire(request)

    def _commit_chunk(self, request: Request, item: Item, got: ItemResult) -> TokenDelta | None:
        """A part of the prompt was computed."""
        if got.error is not None:
            request.num_committed = item.start  # what this step wrote is not shared
            return self.end(request, Finish("error", message=got.error, status=500))
        self.planner.kv_manager.insert(request)
        self.planner.kv_manager.free_out_of_window(request)
        self._buffer_outputs(request, item, got)
        if got.pooled is not None:
            return self.end(request, Finish("stop"), pooled=got.pooled)
        if got.tokens:
            return self._emit(request, got)
        if (
            request.num_committed == request.prefill_len
            and not item.emit
            and not request.wire.pooling
        ):
            return self.end(request, Finish("length"))
        return None

    def _emit(self, request: Request, got: ItemResult) -> TokenDelta | None:
        """Tokens were sampled."""
        finish = self._append(request, got.tokens)
        if finish is None and request.has_token_hook:
            finish = self._jump_forward(request)
        if finish is not None:
            return self.end(request, finish)
        return self.delta(request) if request.num_unsent >= request.emit_interval else None

    def _append(self, request: Request, tokens: tuple[int, ...]) -> Finish | None:
        finish: Finish | None = None
        count = 0
        for token in tokens:
            request.append(token)
            count += 1
            finish = self._finish(request, token)
            if finish is not None:
                break
        self.num_generated += count
        if request.has_token_hook:
            try:
                self.hooks.committed(request, tokens[:count])
            except RequestError as error:
                return Finish("error", message=str(error), status=error.status)
        return finish

    def _finish(self, request: Request, token: int) -> Finish | None:
        """Whether the token, which has just become known, is the last."""
        if token in request.stop_ids and request.num_output >= request.min_new_tokens:
            return Finish("stop", matched=token)
        return Finish("length") if request.num_tokens >= request.max_len else None

    def _jump_forward(self, request: Request) -> Finish | None:
        """Append what must come next. The next step computes it as a piece of prompt; if there are
        no pages for it, it is sampled token by token."""
        tokens = () if request.inflight else self.hooks.forced(request)
        tokens = tokens[: request.max_len - request.num_tokens]
        if not tokens or not self.planner.kv_manager.allocate(
            request, request.num_tokens + len(tokens)
        ):
            return None
        finish = self._append(request, tuple(tokens))
        request.prefill_all()
        return finish

    def _buffer_outputs(self, request: Request, item: Item, got: ItemResult) -> None:
        if got.logprobs is None and got.prompt_logprobs is None and got.hidden_states is None:
            return
        unsent = self._unsent.setdefault(request.rid, Unsent())
        unsent.logprobs.append(got.logprobs)
        unsent.prompt.append(got.prompt_logprobs)
        if got.hidden_states is not None:
            # a retracted request computes places again whose states were kept or told before
            first = max(item.start, self._num_hidden.get(request.rid, 0))
            self._num_hidden[request.rid] = max(first, item.start + item.count)
            row_bytes = len(got.hidden_states) // item.count
            fresh = got.hidden_states[(first - item.start) * row_bytes :]
            unsent.hidden.extend([fresh] if fresh else [])

    def drop_prompt_outputs(self, request: Request) -> None:
        """The request was retracted: what it kept of its prompt will be made again."""
        if not request.num_output:
            self._unsent.pop(request.rid, None)
            self._num_hidden.pop(request.rid, None)

    def delta(self, request: Request, pooled: list[float] | None = None) -> TokenDelta:
        """All that is new since the last delta."""
        tokens = request.take_unsent()
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
        request.end(finish)
        return self.delta(request, pooled)

    def retire(self, request: Request) -> None:
        """Share what was computed, give back slot and pages, forget the request."""
        if request in self.planner.running:
            self.planner.leave(request)
        self._unsent.pop(request.rid, None)
        self._num_hidden.pop(request.rid, None)
        if self.requests.pop(request.rid, None) is not None:
            self._stops -= Counter(request.stop_ids)
        self.hooks.release(request)
