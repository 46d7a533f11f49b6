"""Which tokens are computed next. No prefill phase, no decode phase: each request's computed
tokens catch up with its known ones, within one budget of tokens a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from radixlm.base.errors import InvalidRequest, RadixError, RequestError
from radixlm.scheduler.encoder_budget import EncoderBudget
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.queue import WaitingQueue
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array
from radixlm.step.plan import EMPTY_DECODES, Admission, DecodeBatch, Item, Items, StepPlan

log = logging.getLogger(__name__)

MAX_RESERVED = 4096  # tokens of a running request that admission keeps a share of free


class Planner:
    """Makes a StepPlan of the running and waiting requests."""

    def __init__(
        self,
        limits: Limits,
        kv_manager: KVCacheManager,
        queue: WaitingQueue,
        hooks: Hooks,
        refuse: Callable[[Request, RadixError], None],
    ) -> None:
        self.limits, self.kv_manager, self.queue, self.hooks = limits, kv_manager, queue, hooks
        self.running: list[Request] = []  # in the order of admission
        self.releases: list[int] = []
        self.num_retracted = 0
        self._refuse = refuse
        self.on_retract: Callable[[Request], None] = lambda request: None
        self._admissions: list[Admission] = []
        self._index = 0
        self._encoder = EncoderBudget(limits.step_tokens)
        self._rows = kv_manager.rows
        # of the running requests, in their order, until one joins or leaves
        self._slots: Int64Array | None = None
        self._decode_batch = EMPTY_DECODES

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        items: list[Item] = []  # those that do not just decode
        slots = EMPTY_DECODES.slots
        self._encoder.begin()
        behind = self._behind()
        alone = self._plan_quarantined(behind, items, now_s)
        if not alone and not self.limits.mixed:  # prefill first: the two may not share a step
            self._admit(items, self._chunks(behind, items, self.limits.step_tokens), now_s)
        if not items:
            slots = self._decodes()
            if self.limits.mixed:
                left = self._chunks(behind, items, self.limits.step_tokens - len(slots))
                is_none = not items and not len(slots)
                if is_none or self._index % self.limits.admit_every == 0:
                    self._admit(items, left, now_s)
        if not items and not len(slots):
            return self.plan(now_s) if self._free_one() else None
        return self._planned(self._items(slots, items))

    def _planned(self, items: Items) -> StepPlan:
        plan = StepPlan(
            index=self._index,
            items=items,
            admissions=tuple(self._admissions),
            releases=tuple(self.releases),
            pages=tuple(self.kv_manager.updates),
            extras=self.hooks.extend(items),
            new_pages=self.kv_manager.new_pages,
        )
        self._index += 1
        self._admissions, self.releases, self.kv_manager.updates = [], [], []
        self.kv_manager.new_pages = None
        return plan

    def _items(self, slots: Int64Array, others: list[Item]) -> Items:
        """Of rows that decode their next token, which ``_decodes`` has counted, and other items."""
        known = self._decode_batch.slots
        if slots is not known and not np.array_equal(slots, known):
            self._decode_batch = self._new_decode_batch(slots)
        return Items(self._decode_batch, self._rows.num_computed[slots] - 1, tuple(others))

    def _new_decode_batch(self, slots: Int64Array) -> DecodeBatch:
        rows = self._rows
        asking = np.flatnonzero(rows.needs_extras[slots]).tolist()
        wires = {i: rows.request(int(slots[i])).wire for i in asking}
        return DecodeBatch(
            tuple(rows.rids[slots].tolist()),
            slots,
            {i: wire.logprobs for i, wire in wires.items() if wire.logprobs is not None},
            frozenset(i for i, wire in wires.items() if wire.return_hidden_states),
        )

    def _running_slots(self) -> Int64Array:
        if self._slots is None:
            self._slots = np.array([r.slot for r in self.running], np.int64)
            self._decode_batch = EMPTY_DECODES  # a slot may have changed hands
        return self._slots

    def _behind(self) -> list[Request]:
        """Running requests whose prompts are not yet computed."""
        rows, slots = self._rows, self._running_slots()
        is_behind = rows.num_computed[slots] < rows.prefill_len[slots]
        if not np.count_nonzero(is_behind):  # a fraction of what any() and all() cost
            return []
        return [self.running[i] for i in np.flatnonzero(is_behind).tolist()]

    def _free_one(self) -> bool:
        """Where each running request holds pages that another needs, the latest gives way. Places
        that see one another want their pages all at once, so that it can come to this."""
        if len(self.running) < 2 or any(r.inflight for r in self.running):
            return False
        victim = self._victim()
        if victim is None or not any(r.is_prefilling for r in self.running):
            return False
        self.retract(victim)
        return True

    def _plan_quarantined(self, behind: list[Request], items: list[Item], now_s: float) -> bool:
        """A request that may have killed an engine computes its prompt in steps of its own, so that
        a second death has one culprit. True if such a step was planned."""
        running = next((r for r in behind if r.wire.is_quarantined), None)
        if running is not None:
            self._chunk(running, items, self.limits.step_tokens)
        elif self.queue.num_quarantined:
            waiting = next((r for r in self.queue if r.wire.is_quarantined), None)
            if waiting is not None and self._is_ready(waiting) and self._enter(waiting):
                self._start(waiting, items, self.limits.step_tokens, now_s)
        return bool(items)

    def _start(self, request: Request, items: list[Item], left: int, now_s: float) -> int:
        """The first chunk of a request that has just got its slot."""
        request.started_s = now_s
        self.queue.start(request)
        self.running.append(request)
        self._slots = None
        self._admissions.append(self._admission(request))
        return self._chunk(request, items, left)

    def _begin(self, request: Request, item: Item, items: list[Item]) -> None:
        """Count the item's tokens as computed: from now on the request gives way to none."""
        request.inflight += 1
        request.num_computed = item.start + item.count
        items.append(item)

    def _decodes(self) -> Int64Array:
        """Slots of the requests that have caught up; each computes one more token."""
        rows, slots = self._rows, self._running_slots()
        at = rows.num_computed[slots]
        is_ready = (at >= rows.prefill_len[slots]) & (at < rows.end[slots])
        if np.count_nonzero(is_ready) < len(slots) or len(slots) > self.limits.step_tokens:
            index = np.flatnonzero(is_ready)[: self.limits.step_tokens]
            slots, at = slots[index], at[index]
        is_short = at >= rows.num_allocated[slots]
        if np.count_nonzero(is_short) and not self.kv_manager.allocate_next_page(slots[is_short]):
            slots = self._squeezed(slots)
        rows.inflight[slots] += 1
        rows.num_computed[slots] += 1
        return slots

    def _squeezed(self, slots: Int64Array) -> Int64Array:
        """Those of the rows that get room for a token, one after the other, where there are not
        enough pages for all."""
        rows = self._rows
        found: list[int] = []
        for slot in slots.tolist():
            request = rows.requests[slot]
            if request is None:  # it gave way to one before it
                continue
            if request.num_computed >= request.num_allocated and not self._make_room(request):
                continue
            request.inflight += 1  # from now on it gives way to none
            found.append(slot)
        chosen = np.array(found, np.int64)
        rows.inflight[chosen] -= 1
        return chosen

    def _make_room(self, request: Request) -> bool:
        """Pages for one more token, taken from the newest requests if need be."""
        while not self.kv_manager.allocate(request, request.num_computed + 1):
            victim = self._victim()
            if victim is None or victim is request:
                if victim is request and len(self.running) > 1:
                    self.retract(request)
                return False
            self.retract(victim)
        return True

    def _victim(self) -> Request | None:
        """Who gives way: the lowest priority, then the latest; none with steps in flight."""
        idle = [r for r in self.running if not r.inflight and not r.finish]
        if not idle:
            return None
        sign = -1 if self.limits.low_values_first else 1
        return min(
            reversed(idle),
            key=lambda r: sign * r.wire.priority if self.limits.priorities else 0,
        )

    def leave(self, request: Request) -> None:
        """A running request gives back slot and pages; what it computed is shared."""
        self.running.remove(request)
        self._slots = None
        slot = request.slot
        self.kv_manager.insert(request)
        self.kv_manager.free(request)
        self.releases.append(slot)
        self.kv_manager.updates = [u for u in self.kv_manager.updates if u.slot != slot]
        self._admissions = [a for a in self._admissions if a.slot != slot]

    def retract(self, request: Request) -> None:
        """Take everything back and queue again; its known tokens are kept."""
        log.debug("retract %s at %d tokens", request.rid, request.num_tokens)
        self.leave(request)
        self.on_retract(request)
        request.reset_for_retract()
        self.queue.push_front(request)
        self.num_retracted += 1

    def _chunks(self, behind: list[Request], items: list[Item], left: int) -> int:
        for request in behind:
            if left <= 0:
                break
            # it may have been retracted since
            if not request.is_waiting and not request.finish:
                left -= self._chunk(request, items, left)
        return left

    def _chunk(self, request: Request, items: list[Item], left: int) -> int:
        """Append the next part of the prompt; its number of tokens, 0 if no page is left."""
        rest = request.prefill_len - request.num_computed
        count = rest if not self.limits.chunked else min(left, rest)
        end = request.num_computed + count
        if request.wire.media:
            end = self._encoder.cut(request, _uncut(request, end))
            count = end - request.num_computed
            if not count:
                return 0
        if not self.kv_manager.allocate(request, end):
            return 0
        start = request.num_computed
        first, targets = self._prompt_targets(request, start, end)
        last = end == request.prefill_len
        item = Item(
            rid=request.rid,
            slot=request.slot,
            start=start,
            count=count,
            tokens=request.ids[start:end].copy(),
            emit=last and request.max_new_tokens > request.num_output and not request.wire.pooling,
            logprobs=request.wire.logprobs,
            targets_at=first - start,
            targets=targets,
            hidden_states=request.wire.return_hidden_states,
            pooling=request.wire.pooling,
        )
        self._begin(request, item, items)
        return count

    def _prompt_targets(
        self, request: Request, start: int, end: int
    ) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.int32]] | None]:
        """First place of [start, end) whose next prompt token's logprob is wanted, and those."""
        need = request.wire.logprobs
        if need is None or need.prompt_from < 0 or request.num_output:
            return start, None
        first = max(start, need.prompt_from - 1)
        targets = request.ids[first + 1 : min(end + 1, request.prompt_len)]
        is_wanted = len(targets) or need.prompt_from == start == 0  # the first token's is null
        return (first, targets.copy()) if is_wanted else (start, None)

    def _admit(self, items: list[Item], left: int, now_s: float) -> None:
        if not self.queue or left <= 0:
            return
        prefill_left = min(left, self.limits.max_prefill_tokens)
        for request in self.queue.in_order(now_s):
            if prefill_left <= 0:
                break
            if request.wire.is_quarantined or not self._is_ready(request):
                continue
            entered = self._enter(request) or (self._preempt(request) and self._enter(request))
            if not entered:
                break
            prefill_left -= self._start(request, items, prefill_left, now_s)

    def _enter(self, request: Request) -> bool:
        if len(self.running) >= self.limits.max_running:
            return False
        return self.kv_manager.admit(request, self._spare_pages())

    def _is_ready(self, request: Request) -> bool:
        if self._waits_for_prefix(request):
            return False
        try:
            return self.hooks.ready(request)
        except RadixError as error:
            self._refuse(request, error)
            return False

    def _spare_pages(self) -> int:
        """What admission keeps free: the rest of the running prompts, and a share of the output
        that running requests may still produce. Nothing when nothing runs."""
        rows, slots = self._rows, self._running_slots()
        prompts = np.maximum(rows.prefill_len[slots] - rows.num_allocated[slots], 0).sum()
        planned = np.maximum(rows.num_tokens[slots], rows.num_computed[slots] + 1)
        outputs = np.minimum(rows.max_len[slots] - planned, MAX_RESERVED).sum()
        return self.kv_manager.pages_for(int(prompts + outputs * self.limits.reserve))

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a running request is computing a prefix that this one would compute again.

        Waiting pays when the part that is not yet in the tree is at least a page and a quarter of
        what the request has to compute."""
        limit = self.kv_manager.match_limit(request)
        if limit < self.limits.page_size:
            return False
        page = self.limits.page_size
        found: int | None = None
        rows, slots = self._rows, self._running_slots()
        for index in np.flatnonzero(rows.num_committed[slots] < rows.prefill_len[slots]).tolist():
            other = self.running[index]
            if other.cache_key != request.cache_key:
                continue
            ahead = min(other.prefill_len // page * page, limit)
            if other.num_inserted >= ahead or other.wire.embeds is not None:
                continue
            common = _common_prefix(other.ids[:ahead], request.ids[:ahead]) // page * page
            if common <= other.num_inserted:
                continue
            if found is None:
                found = self.kv_manager.cache.peek(request.ids[:limit], request.cache_key)
            gain = common - found
            if gain >= page and 4 * gain >= request.prefill_len - found:
                return True
        return False

    def _preempt(self, request: Request) -> bool:
        """Retract the least important running request for a much more important waiting one."""
        if not self.limits.priorities:
            return False
        victim = self._victim()
        if victim is None:
            return False
        sign = -1 if self.limits.low_values_first else 1
        gap = sign * (request.wire.priority - victim.wire.priority)
        if gap < self.limits.preemption_threshold:
            return False
        self.retract(victim)
        return True

    def _admission(self, request: Request) -> Admission:
        wire = request.wire
        embeds = None
        if wire.embeds is not None:
            flat = np.frombuffer(wire.embeds, dtype="<f4")
            embeds = flat.reshape(request.prompt_len, -1)
        return Admission(
            rid=request.rid,
            slot=request.slot,
            sampling=wire.sampling,
            prompt_ids=request.ids[: request.prompt_len].copy(),
            output_ids=request.output_ids.copy(),
            embeds=embeds,
            media=wire.media,
            rope_ids=_rope_ids(wire.rope_ids),
            processor=wire.processor,
        )

    def too_long(self, request: Request) -> RequestError | None:
        """Why the request can never run, if so."""
        most = self.kv_manager.num_total_tokens
        if request.prefill_len + 1 > most:
            return InvalidRequest(
                f"the prompt has {request.prefill_len} tokens, the KV cache holds {most}: "
                "raise --max-total-tokens or --mem-fraction-static",
                param="input_ids",
            )
        run, most = self.kv_manager.run_pages(request), self.kv_manager.num_window_pages
        if run > most:
            return InvalidRequest(
                f"an image of this prompt needs {run} pages of the window layers' cache at once, "
                f"which has {most}: raise --max-total-tokens or --swa-full-tokens-ratio",
                param="messages",
            )
        return None


def _uncut(request: Request, end: int) -> int:
    """Where a chunk that was to end there ends: not inside of places that see one another. Those
    are computed in one step, even where they are more than its budget."""
    for media in request.wire.media:
        for start, count in media.bidirectional_spans:
            if start < end < start + count:
                return start if start > request.num_computed else start + count
    return end


def _rope_ids(packed: bytes | None) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """int32 [3, prompt]."""
    return None if packed is None else np.frombuffer(packed, "<i4").reshape(3, -1)


def _common_prefix(
    a: np.ndarray[tuple[int], np.dtype[np.int32]], b: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> int:
    """Length of the common prefix of two id arrays."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
