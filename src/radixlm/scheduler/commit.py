"""Committer: applies the results of a step to its requests and makes the reply to intake."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from radixlm.base.errors import RequestError
from radixlm.scheduler.drafting import Drafting
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array
from radixlm.step.plan import Int32Array, Item, Items, StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.wire.replies import Finish, StepReply, TokenDelta

# tokens between two deltas of a request whose client does not stream: few enough for recovery
UNSTREAMED_INTERVAL = 16


def _failure(result: ItemResult) -> Finish:
    """The end of a request whose item failed."""
    return Finish("error", message=result.error, status=result.status)


class Committer:
    """Appends a step's tokens to their requests, ends requests, and makes the deltas for intake.

    ``requests``: all requests of the scheduler by id, waiting and running."""

    def __init__(
        self,
        limits: Limits,
        planner: Planner,
        hooks: Hooks,
        stream_interval: int = 1,
        drafting: Drafting | None = None,
    ) -> None:
        self.limits, self.planner, self.hooks, self._drafting = limits, planner, hooks, drafting
        self.stream_interval = stream_interval
        self.requests: dict[str, Request] = {}
        self._stop_counts: Counter[int] = Counter()  # how many requests end at a token id
        self.num_generated = self.num_forced = 0
        self._kv_manager = planner.kv_manager
        self._table = planner.kv_manager.table
        window = planner.kv_manager.window
        self._has_window, self._has_states = window is not None, bool(window and window.is_state)

    def register(self, request: Request) -> None:
        """Know a request that has arrived, and set where it ends and how often it reports."""
        self.requests[request.rid] = request
        if self._drafting is not None:
            self._drafting.register(request)
        self._stop_counts.update(request.stop_ids)
        wire, emit_interval = request.wire, UNSTREAMED_INTERVAL
        if wire.stream:
            emit_interval = wire.sampling.stream_interval or self.stream_interval
        elif wire.sampling.stop or wire.sampling.stop_regex or wire.is_quarantined:
            emit_interval = 1  # keeps a quarantined request's tokens if the engine dies again
        request.emit_interval = emit_interval
        streaming = request.wire.streaming
        context_len = self.limits.context_len if streaming is None else streaming.size
        request.max_len = min(request.prompt_len + request.max_new_tokens, context_len)

    def commit(self, plan: StepPlan, result: StepResult) -> StepReply:
        """Apply the results of a step; the reply for intake names each request once at most."""
        reply, items = StepReply([]), Items.of(plan.items)
        if items.paths:
            self._choose_paths(items, result)
        if len(items.starts):
            self._commit_decode_batch(items, result, reply)
        for item, item_result in zip(items.prefills, result.prefills, strict=True):
            request = self.requests[item.rid]
            request.inflight -= 1
            self._commit_item(request, item, item_result, reply)
        if self._has_states:
            for part in self._kv_manager.parts:
                part.drafts.free_saved(items.decodes.slots)
        if self._drafting is not None and result.proposals is not None:
            self._drafting.keep(items, result.proposals)
        return reply

    def _choose_paths(self, items: Items, result: StepResult) -> None:
        """Rows whose tokens another path of drafts has given go on in its pages."""
        assert result.counts is not None
        for row, index in result.winners.items():
            path = items.paths[index]
            end = path.start + int(result.counts[row])
            request = self._kv_manager.request_in(path.slot)
            self._kv_manager.drafts_of(request).adopt(request, path.page_row, end)
        for part in self._kv_manager.parts:
            part.drafts.free_forks()

    # ---- decodes, by columns ---------------------------------------------------------------

    def _commit_decode_batch(self, items: Items, result: StepResult, reply: StepReply) -> None:
        """Each request of the decode batch has computed one token and sampled the next."""
        rids, slots = items.decodes.rids, items.decodes.slots
        self._table.inflight[slots] -= 1
        if result.counts is not None:
            self._commit_drafted(items, result, reply)
            return
        is_fast = self._table.is_fast_path[slots]
        if result.detailed:
            is_fast[list(result.detailed)] = False
        if np.count_nonzero(is_fast) == len(slots):  # much faster than all()
            self._commit_decodes(slots, rids, items.starts, result.tokens, reply)
            return
        fast = np.flatnonzero(is_fast)
        if len(fast):
            fast_rids = [rids[i] for i in fast.tolist()]
            self._commit_decodes(
                slots[fast], fast_rids, items.starts[fast], result.tokens[fast], reply
            )
        for index in np.flatnonzero(~is_fast).tolist():
            request = self._kv_manager.request_in(int(slots[index]))
            item_result = result.detailed.get(index) or ItemResult((int(result.tokens[index]),))
            self._commit_item(request, items[index], item_result, reply)

    def _commit_decodes(
        self,
        slots: Int64Array,
        rids: Sequence[str],
        starts: Int64Array,
        tokens: Int32Array,
        reply: StepReply,
    ) -> None:
        """Append a token to each row; rows of the fast path need nothing else."""
        table = self._table
        table.num_committed[slots] = starts + 1
        if self._has_window:
            for slot in slots[(starts + 1) % self.limits.page_size == 0].tolist():
                self._kv_manager.free_out_of_window(self._kv_manager.request_in(slot))
        num_tokens = table.append(slots, tokens)
        self.num_generated += len(slots)
        values: list[int] = tokens.tolist()
        is_due = num_tokens >= table.check_at[slots]
        if not self._stop_counts.keys().isdisjoint(values):
            is_due |= np.array([token in self._stop_counts for token in values])
        if np.count_nonzero(is_due):
            for i in np.flatnonzero(is_due).tolist():
                request = self._kv_manager.request_in(int(slots[i]))
                self._check_finished(request, values[i], reply)
        self._emit_decodes(slots, rids, num_tokens, values, reply)

    def _commit_drafted(self, items: Items, result: StepResult, reply: StepReply) -> None:
        """The same of a step with drafts: each request has computed ``counts`` tokens that are
        known, and sampled the next. Rows that may end or whose ring is full go one by one."""
        assert items.drafts is not None and result.counts is not None
        table, page_size = self._table, self.limits.page_size
        slots, counts, tokens = items.decodes.slots, result.counts.astype(np.int64), result.tokens
        table.num_computed[slots] -= items.drafts.lens + 1 - counts  # the refused ones
        if self._drafting is not None and items.more_N is None:
            self._drafting.observe(items, result)
        committed = table.num_committed[slots]  # where the rows began, as the device knows too
        first = np.cumsum(counts) - counts
        is_fast = table.is_fast_path[slots] & (
            table.num_tokens[slots] + counts < table.check_at[slots]
        )
        is_fast[list(result.detailed)] = False
        if self._has_states:
            is_fast &= counts > items.drafts.lens  # with a refused draft, the row is undone
        is_stop = np.isin(tokens, list(self._stop_counts)) if self._stop_counts else tokens < 0
        is_fast &= ~np.logical_or.reduceat(is_stop, first)
        fast = np.flatnonzero(is_fast)
        if len(fast):
            its_slots, its_counts, starts = slots[fast], counts[fast], committed[fast]
            num_tokens = table.append_runs(
                its_slots, its_counts, tokens[np.repeat(is_fast, counts)]
            )
            self.num_generated += int(its_counts.sum())
            table.num_committed[its_slots] = starts + its_counts
            if self._has_window:
                is_over = (starts + its_counts) // page_size > starts // page_size
                for slot in its_slots[is_over].tolist():
                    self._kv_manager.free_out_of_window(self._kv_manager.request_in(slot))
            values: list[int] = tokens[(first + counts - 1)[fast]].tolist()
            rids = [items.decodes.rids[i] for i in fast.tolist()]
            self._emit_decodes(its_slots, rids, num_tokens, values, reply)
        for index in np.flatnonzero(~is_fast).tolist():
            request = self._kv_manager.request_in(int(slots[index]))
            run = tokens[first[index] : first[index] + counts[index]]
            item_result = result.detailed.get(index) or ItemResult(tuple(run.tolist()))
            self._commit_item(request, items[index], item_result, reply)

    def _check_finished(self, request: Request, token: int, reply: StepReply) -> None:
        """End the request if ``token`` is its last; else store the tokens of its ring."""
        finish = self._finish_of(request, token)
        if finish is None:
            request.store_recent()
            if request.is_window_full:
                self.planner.full.append(request)
                reply.deltas.append(self.delta(request))
            return
        reply.deltas.append(self.end(request, finish))
        if not request.inflight:
            self.retire(request)

    def _emit_decodes(
        self,
        slots: Int64Array,
        rids: Sequence[str],
        num_tokens: Int64Array,
        values: list[int],
        reply: StepReply,
    ) -> None:
        """Put due tokens into the reply: a lone token of a request without a delta."""
        table = self._table
        num_unsent = num_tokens - table.num_sent[slots]
        is_single = (num_unsent == 1) & (table.emit_interval[slots] == 1)
        if np.count_nonzero(is_single) == len(slots):
            reply.rids, reply.tokens = rids, values
            table.num_sent[slots] = num_tokens
            return
        single = np.flatnonzero(is_single)
        table.num_sent[slots[single]] = num_tokens[single]
        reply.rids = [rids[i] for i in single.tolist()]
        reply.tokens = [values[i] for i in single.tolist()]
        is_due = ~is_single & (num_unsent >= table.emit_interval[slots])
        for i in np.flatnonzero(is_due).tolist():
            request = self._kv_manager.requests[int(slots[i])]
            if request is not None and request.num_unsent:
                reply.deltas.append(self.delta(request))

    # ---- prefills and other requests, one by one -------------------------------------------

    def _commit_item(
        self, request: Request, item: Item, result: ItemResult, reply: StepReply
    ) -> None:
        """Apply the result of one item."""
        if request.finish is None:
            if item.tokens is not None or not result.tokens:
                delta = self._commit_chunk(request, item, result)
            else:
                delta = self._commit_decode(request, item, result)
            if delta is not None:
                reply.deltas.append(delta)
        if request.finish is not None and not request.inflight:
            self.retire(request)

    def _commit_chunk(self, request: Request, item: Item, result: ItemResult) -> TokenDelta | None:
        """Apply the result of a chunk of a prefill, or of an item that failed."""
        if result.error is not None:
            if item.tokens is not None:
                request.num_committed = item.start  # what this step wrote is not shared
            return self.end(request, _failure(result))
        request.num_committed = item.start + item.count
        self._kv_manager.insert(request)
        self._kv_manager.free_out_of_window(request)
        self._note_outputs(request, item, result)
        if result.pooled is not None:
            return self.end(request, Finish("stop"), pooled=result.pooled)
        if result.tokens:
            return self._emit(request, self._append(request, result.tokens)[1])
        is_computed = request.num_committed == request.prefill_len
        if is_computed and not item.emit and not request.wire.pooling:
            return self.end(request, Finish("length"))
        return None

    def _commit_decode(self, request: Request, item: Item, result: ItemResult) -> TokenDelta | None:
        """Append the tokens of a decode item, up to the one that ends the request."""
        num_kept, finish = self._append(request, result.tokens)
        start, page_size = request.num_committed, self.limits.page_size
        request.num_committed = end = start + num_kept
        self._note_outputs(request, item, result, num_kept)
        if finish is None and result.error is not None:
            finish = _failure(result)
        if self._has_states and num_kept < item.count:
            self._undo(request, start, start + item.count, is_over=finish is not None)
        elif self._has_window and end // page_size > start // page_size:
            self._kv_manager.free_out_of_window(request)
        return self._emit(request, finish)

    def _undo(self, request: Request, start: int, end: int, is_over: bool) -> None:
        """The states of a row have gone from ``start`` to ``end``, beyond its known tokens. They go
        back to ``start``, and the next step computes the known tokens behind it as a chunk, which
        gives the next token. What is over may leave its last snapshot, if that is of known tokens.
        """
        if not is_over:
            self._kv_manager.restore_state(request, start)
            request.prefill_all()
            return
        page_size = self.limits.page_size
        if request.num_committed // page_size not in (start // page_size, end // page_size):
            request.num_committed = start

    def _emit(self, request: Request, finish: Finish | None) -> TokenDelta | None:
        """A delta if the request ended or one is due."""
        if finish is None and request.has_token_hook:
            finish = self._jump_forward(request)
        if finish is not None:
            return self.end(request, finish)
        if request.is_window_full:
            self.planner.full.append(request)
            return self.delta(request)
        return self.delta(request) if request.num_unsent >= request.emit_interval else None

    def _append(self, request: Request, tokens: tuple[int, ...]) -> tuple[int, Finish | None]:
        """Append tokens up to the one that ends the request, and tell the features; how many they
        were, and why it ends."""
        finish: Finish | None = None
        count = 0
        for token in tokens:
            request.append(token)
            count += 1
            finish = self._finish_of(request, token)
            if request.has_token_hook:
                finish = self._finish_of_features(request, token, finish)
            if finish is not None:
                break
        self.num_generated += count
        return count, finish

    def _finish_of_features(
        self, request: Request, token: int, finish: Finish | None
    ) -> Finish | None:
        """Tell the features of a new token; why the request ends, which may be one of theirs."""
        try:
            is_complete = self.hooks.committed(request, (token,))
        except RequestError as error:
            return Finish("error", message=str(error), status=error.status)
        is_other = finish is None or finish.kind == "length"
        end = Finish("stop", matched=token if token in self.limits.eos_ids else None)
        return end if is_complete and is_other else finish

    def _finish_of(self, request: Request, token: int) -> Finish | None:
        """Why the request ends with ``token``, its newest; None if it does not."""
        if token in request.stop_ids and request.num_output >= request.min_new_tokens:
            return Finish("stop", matched=token)
        is_over = request.num_tokens >= request.max_len and not request.is_window_full
        return Finish("length") if is_over else None

    def _jump_forward(self, request: Request) -> Finish | None:
        """Append tokens that the grammar forces; the next step computes them as a prefill. Without
        pages for them, they are sampled one by one."""
        tokens = () if request.inflight else self.hooks.forced(request)
        tokens = tokens[: request.max_len - request.num_tokens]
        end = request.num_tokens + len(tokens)
        if not tokens or not self._kv_manager.allocate(request, end):
            return None
        count, finish = self._append(request, tuple(tokens))
        self.num_forced += count
        request.prefill_all()
        return finish

    def _note_outputs(
        self, request: Request, item: Item, result: ItemResult, num_kept: int | None = None
    ) -> None:
        """Tell the features of what an item has given besides tokens."""
        if result.logprobs is None and result.prompt_logprobs is None:
            if result.hidden_states is None:
                return
        self.hooks.computed(request, item, result, num_kept)

    def delta(self, request: Request, pooled: list[float] | None = None) -> TokenDelta:
        """All that is new since the last delta."""
        tokens = request.take_unsent()
        draft_rounds, num_drafted = None, 0
        if self._drafting is not None:
            draft_rounds, num_drafted = self._drafting.counts.of(request.rid)
        delta = TokenDelta(
            rid=request.rid,
            tokens=tokens,
            finish=request.finish,
            prompt_tokens=request.wire.prompt_len,
            cached_tokens=min(request.num_cached, request.wire.prompt_len),  # may hold output too
            retractions=request.retractions,
            pooled=pooled,
            queue_time_s=max(0.0, request.started_s - request.queued_s),
            draft_rounds=draft_rounds,
            num_drafted=num_drafted,
            cached_by_tier=request.arrived,
        )
        self.hooks.deliver(delta)
        return delta

    def end(
        self, request: Request, finish: Finish, pooled: list[float] | None = None
    ) -> TokenDelta:
        """End the request; ``retire`` frees what it holds once it has no step in flight."""
        request.end(finish)
        return self.delta(request, pooled)

    def retire(self, request: Request) -> None:
        """Free the slot and pages of a request that has ended, and forget it."""
        if request in self.planner.running:
            self.planner.release(request)
        if self._drafting is not None:
            self._drafting.forget(request)
        if self.requests.pop(request.rid, None) is not None:
            self._stop_counts -= Counter(request.stop_ids)
        self.hooks.release(request)
