"""Planner: which tokens the next step computes.

There is no prefill phase and no decode phase. Each request's computed tokens catch up with its
known tokens, and all requests of a step share one budget of tokens."""

import logging
import sys
from collections.abc import Callable

import numpy as np

from radixlm.base.errors import RadixError
from radixlm.scheduler.drafting import Drafting
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.interfaces import ChunkPacer, ContinuousDecoding, Preemption, StageBatches
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.plan_parts import (
    LEAST,
    common_prefix,
    even_chunk,
    make_admission,
    make_chunk,
    make_decode_batch,
)
from radixlm.scheduler.queue import WaitingQueue
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array
from radixlm.step.plan import EMPTY_DECODES, Admission, Item, Items, StepPlan

log = logging.getLogger(__name__)


class Planner:
    """Makes a StepPlan of the running and waiting requests."""

    def __init__(
        self,
        limits: Limits,
        kv_manager: KVCacheManager,
        queue: WaitingQueue,
        hooks: Hooks,
        refuse: Callable[[Request, RadixError], None],
        drafting: Drafting | None = None,
    ) -> None:
        self.limits, self.kv_manager, self.queue, self.hooks = limits, kv_manager, queue, hooks
        self.running: list[Request] = []  # in the order of admission
        self.releases: list[int] = []
        self.num_retracted = 0
        self._refuse, self._drafting = refuse, drafting
        self.on_retract: Callable[[Request], None] = lambda request: None
        self.on_slide: Callable[[Request], None] = lambda request: None
        self.full: list[Request] = []  # those whose streaming window has to slide
        self.on_start: Callable[[Request], None] = lambda request: None
        self._admissions: list[Admission] = []
        self._index = 0
        self.pacer: ChunkPacer | None = None
        self.continuous: ContinuousDecoding | None = None
        self._num_unseen = 0  # tokens in turn until the next look at the queue
        self._is_paced = False  # the step's tokens are counted by their measured time
        self._table = kv_manager.table
        # slots of the running requests, in their order; None after one was admitted or released
        self._slots: Int64Array | None = None
        self._decode_batch = EMPTY_DECODES
        # requests of a step at most, and how many more the step that is planned may have
        self._room = self._max_items = limits.max_micro_batch or sys.maxsize
        self.preemption: Preemption | None = None
        self.stages: StageBatches | None = None  # where there are several
        self.held: Request | None = None  # one that this step leaves out, to be retracted

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        prefills: list[Item] = []
        slots = EMPTY_DECODES.slots
        self._room, self._is_paced = self._max_items, False
        self.hooks.begin_step()
        self._slide_windows()
        if self.preemption is not None:
            self.preemption.begin_step()
        prefilling = self._prefilling_requests()
        is_alone = self._plan_quarantined(prefilling, prefills, now_s)
        if self.preemption is not None and not is_alone:
            is_alone = self.preemption.plan_turn(prefills, now_s)
        if not is_alone and not self.limits.mixed:  # prefill first: the two may not share a step
            left = self.limits.step_tokens
            if self.stages is not None:
                left = self.stages.prompt_tokens(prefilling, left)
            left = self._plan_chunks(prefilling, prefills, left)
            self._admit_waiting(prefills, left, now_s)
        if not prefills:
            slots = self._plan_decodes()
            self._room -= len(slots)
            if self.limits.mixed:
                left = self.limits.step_tokens - len(slots)
                if len(slots) and (prefilling or self.queue):
                    left = self._paced(left, len(slots))
                if self.stages is not None:
                    left = self.stages.prompt_tokens(prefilling, left)
                left = self._plan_chunks(prefilling, prefills, left)
                is_empty = not prefills and not len(slots)
                if is_empty or self._num_unseen <= 0:
                    self._num_unseen = self.limits.admit_every
                    self._admit_waiting(prefills, left, now_s)
        if not prefills and not len(slots):
            return self.plan(now_s) if self._resolve_deadlock() else None
        return self._make_plan(self._make_items(slots, prefills))

    def _paced(self, left: int, num_decodes: int) -> int:
        """The tokens of prompts that a step with decodes may have, ``left`` at most."""
        if self.pacer is None or not self.limits.chunked:
            return left
        self._is_paced = not self.pacer.is_for_readers or any(
            request.wire.stream and not request.is_prefilling for request in self.running
        )
        return min(left, self.pacer.tokens(num_decodes)) if self._is_paced else left

    def _make_plan(self, items: Items) -> StepPlan:
        draft_lens = self._drafting.device_lens(items) if self._drafting else None
        num_passes = 1
        is_plain = draft_lens is None and items.drafts is None and not items.prefills
        if is_plain and self.continuous is not None:
            items.drafts = self.continuous.plan(items.decodes)
            num_passes += int(items.drafts.lens.max()) if items.drafts is not None else 0
        self._num_unseen -= num_passes
        updates, new_pages, copies = self.kv_manager.take_changes()
        plan = StepPlan(
            index=self._index,
            items=items,
            admissions=tuple(self._admissions),
            releases=tuple(self.releases),
            pages=tuple(updates),
            feature_data=self.hooks.extend(items),
            new_pages=new_pages,
            copies=tuple(copies),
            draft_lens=draft_lens,
        )
        self._index += 1
        self._admissions, self.releases = [], []
        return plan

    def _make_items(self, slots: Int64Array, prefills: list[Item]) -> Items:
        """The items of a step; ``_plan_decodes`` has counted the tokens of ``slots``."""
        last_slots = self._decode_batch.slots
        if slots is not last_slots and not np.array_equal(slots, last_slots):
            self._decode_batch = make_decode_batch(self.kv_manager, slots)
        starts, drafts = self._table.num_computed[slots] - 1, None
        if self._drafting is not None and len(slots):
            drafts = self._drafting.plan(self._decode_batch, sum(i.count for i in prefills))
        return Items(self._decode_batch, starts, tuple(prefills), drafts)

    def _running_slots(self) -> Int64Array:
        if self._slots is None:
            self._slots = np.array([r.slot for r in self.running], np.int64)
            self._decode_batch = EMPTY_DECODES  # a slot may belong to another request now
        return self._slots

    def _prefilling_requests(self) -> list[Request]:
        """Running requests whose prefill is not yet computed."""
        table, slots = self._table, self._running_slots()
        is_prefilling = table.num_computed[slots] < table.prefill_len[slots]
        if self.limits.waits_for_chunks:
            is_prefilling &= table.inflight[slots] == 0
        if not np.count_nonzero(is_prefilling):  # much faster than any() and all()
            return []
        return [self.running[i] for i in np.flatnonzero(is_prefilling).tolist()]

    def _resolve_deadlock(self) -> bool:
        """Retract the latest request where each running one waits for pages that the others hold.
        Tokens that attend to each other need all of their pages at once, so this can happen."""
        if len(self.running) < 2 or any(r.inflight for r in self.running):
            return False
        victim = self._choose_victim()
        if victim is None or not any(r.is_prefilling for r in self.running):
            return False
        self.retract(victim)
        return True

    def _plan_quarantined(
        self, prefilling: list[Request], prefills: list[Item], now_s: float
    ) -> bool:
        """Compute the prompt of a quarantined request in steps of its own, so that the request is
        known if the engine dies in one of them. True if such a step was planned."""
        running = next((r for r in prefilling if r.wire.is_quarantined), None)
        if running is not None:
            self._plan_chunk(running, prefills, self.limits.step_tokens)
        elif self.queue.num_quarantined:
            waiting = next((r for r in self.queue if r.wire.is_quarantined), None)
            if waiting is not None and self.is_ready(waiting) and self.try_admit(waiting):
                self.start(waiting, prefills, self.limits.step_tokens, now_s)
        return bool(prefills)

    def start(self, request: Request, prefills: list[Item], left: int, now_s: float) -> int:
        """Plan the first chunk of a request that was just admitted; its number of tokens."""
        request.started_s = now_s
        self.queue.start(request)
        self.running.append(request)
        self._slots = None
        self._admissions.append(make_admission(request))
        self.on_start(request)
        return self._plan_chunk(request, prefills, left)

    def _plan_decodes(self) -> Int64Array:
        """Slots of the requests that decode in this step; their next token counts as computed."""
        table, slots = self._table, self._running_slots()
        position = table.num_computed[slots]
        is_decoding = (position >= table.prefill_len[slots]) & (position < table.end[slots])
        if self.held is not None:
            is_decoding &= slots != self.held.slot
        if self.stages is not None:
            is_decoding = self.stages.micro_batch(slots, is_decoding, self._index)
        if np.count_nonzero(is_decoding) < len(slots) or len(slots) > self.limits.step_tokens:
            index = np.flatnonzero(is_decoding)[: self.limits.step_tokens]
            slots, position = slots[index], position[index]
        is_full = self.kv_manager.needs_page(slots)
        if np.count_nonzero(is_full) and not self.kv_manager.allocate_next_page(slots[is_full]):
            slots = self._allocate_by_retraction(slots)
        table.inflight[slots] += 1
        table.num_computed[slots] += 1
        return slots

    def _allocate_by_retraction(self, slots: Int64Array) -> Int64Array:
        """Where there are not enough pages for all rows: allocate for one after the other, and
        retract later requests if need be. The slots that can decode."""
        table = self._table
        self.kv_manager.trim(slots)
        chosen: list[int] = []
        for slot in slots.tolist():
            request = self.kv_manager.requests[slot]
            if request is None:  # retracted for one before it
                continue
            if not self._allocate_next_token(request):
                continue
            request.inflight += 1  # a request with a step in flight is not retracted
            chosen.append(slot)
        chosen_slots = np.array(chosen, np.int64)
        table.inflight[chosen_slots] -= 1
        return chosen_slots

    def _allocate_next_token(self, request: Request) -> bool:
        """Allocate for one token more, retracting the newest requests if need be."""
        while not self.kv_manager.allocate(request, request.num_computed + 1):
            victim = self._choose_victim(request)
            if victim is None or victim is request:
                if victim is request and len(self.running) > 1:
                    self.retract(request)
                return False
            self.retract(victim)
        return True

    def _choose_victim(self, needy: Request | None = None) -> Request | None:
        """The request to retract: of the lowest priority, the latest; none with steps in flight.
        ``needy``: who is to get its pages."""
        found = [r for r in self.running if not r.inflight and not r.finish]
        if needy is not None:
            found = [r for r in found if self.kv_manager.shares_pages(needy, r)]
        return self.least_important(found)

    def least_important(self, candidates: list[Request]) -> Request | None:
        """Of the lowest priority, the latest."""
        if not candidates or not self.limits.priorities:
            return candidates[-1] if candidates else None
        return min(reversed(candidates), key=lambda r: self.limits.rank(r.wire.priority))

    def release(self, request: Request) -> None:
        """Take slot and pages back from a running request, after its computed pages were put into
        the prefix cache."""
        self.running.remove(request)
        self._slots = None
        slot = request.slot
        self.kv_manager.insert(request)
        self.kv_manager.free(request)
        self.releases.append(slot)
        self.kv_manager.drop_changes(slot)
        self._admissions = [a for a in self._admissions if a.slot != slot]

    def retract(self, request: Request) -> None:
        """Release a running request and put it at the front of the queue; it keeps its tokens."""
        log.debug("retract %s at %d tokens", request.rid, request.num_tokens)
        self.release(request)
        self.hooks.retracted(request)
        self.on_retract(request)
        request.reset_for_retract()
        self.queue.push_front(request)
        self.num_retracted += 1

    def _slide_windows(self) -> None:
        """Requests whose streaming window is full go on with what is left of it, as prompts."""
        full, self.full = self.full, []
        for request in full:
            if request.finish is not None:
                continue
            assert not request.inflight, "nothing is planned behind a full window"
            if not request.is_waiting:
                self.release(request)
                self.hooks.retracted(request)
                self.queue.push_front(request)
            self.on_slide(request)
            self.hooks.slid(request)

    def _plan_chunks(self, prefilling: list[Request], prefills: list[Item], left: int) -> int:
        """Plan a chunk of each request while tokens are left; how many are left then."""
        for request in prefilling:
            if left <= 0 or len(prefills) >= self._room:
                break
            # it may have been retracted since
            if not request.is_waiting and not request.finish and request is not self.held:
                left -= self._plan_chunk(request, prefills, left)
        return left

    def _plan_chunk(self, request: Request, prefills: list[Item], left: int) -> int:
        """Plan the next chunk of the prefill; how many tokens it counts as, those at the start of a
        prompt being 1; 0 if there are no pages."""
        count, whole, most = request.prefill_len - request.num_computed, 1, 1
        if self.limits.chunked:
            if not self._is_paced:
                whole = self.limits.step_tokens
                most = even_chunk(request.num_computed, whole, self.limits.attention_length)
            count = min(count, max(min(left, LEAST), left * most // whole))
        end = self.hooks.limit_chunk(request, request.num_computed + count)
        count = end - request.num_computed
        if not count or not self.kv_manager.allocate(request, end):
            return 0
        prefills.append(make_chunk(request, end))
        request.inflight += 1  # from now on the request is not retracted
        request.num_computed = end
        return -(-count * whole // most)

    def _admit_waiting(self, prefills: list[Item], left: int, now_s: float) -> None:
        """Admit waiting requests in the queue's order while tokens, pages and slots are left."""
        if not self.queue or left <= 0:
            return
        if self._is_full() and not self.limits.priorities:
            return  # nobody can be admitted: the queue need not be sorted
        left = min(left, self.limits.max_prefill_tokens)
        waiting = self.queue.in_order(now_s, self.running)
        if self.preemption is not None:
            self.preemption.sort(waiting)
        for request in waiting:
            if left <= 0 or len(prefills) >= self._room:
                break
            if request.wire.is_quarantined or not self.is_ready(request):
                continue
            if not self.try_admit(request):
                if self.preemption is not None:
                    self.preemption.blocked = request
                break
            left -= self.start(request, prefills, left, now_s)

    def try_admit(self, request: Request) -> bool:
        """Give a waiting request a slot and pages; whether there were some."""
        if self._is_full():
            return False
        return self.kv_manager.admit(request, self._spare_pages())

    def _is_full(self) -> bool:
        return len(self.running) >= self.limits.max_running

    def is_ready(self, request: Request) -> bool:
        """Whether a waiting request may be admitted, as far as features know."""
        if self._waits_for_prefix(request):
            return False
        try:
            return self.hooks.ready(request)
        except RadixError as error:
            self._refuse(request, error)
            return False

    def _spare_pages(self) -> int:
        """Pages that admission keeps free: for the rest of the running prefills, and for a share of
        the output that running requests may still produce."""
        table, slots = self._table, self._running_slots()
        prefills = np.maximum(table.prefill_len[slots] - table.num_allocated[slots], 0).sum()
        planned = np.maximum(table.num_tokens[slots], table.num_computed[slots] + 1)
        outputs = np.minimum(table.max_len[slots] - planned, self.limits.max_reserved)
        least = np.minimum(outputs, self.limits.reserved_tokens).sum()
        spare = max(outputs.sum() * self.limits.reserve, least)
        return self.kv_manager.pages_for(int(prefills + spare))

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a running request is computing a prefix that this one would compute again.

        Waiting pays when the shared part that is not yet in the prefix cache is at least a page,
        and at least a quarter of what the request has to compute."""
        limit = min(self.kv_manager.match_limit(request), request.share_limit)
        if limit < self.limits.page_size:
            return False
        page = self.limits.page_size
        num_cached: int | None = None
        table, slots = self._table, self._running_slots()
        is_computing = table.num_committed[slots] < table.prefill_len[slots]
        for index in np.flatnonzero(is_computing).tolist():
            other = self.running[index]
            if other.namespace != request.namespace:
                continue
            end = min(min(other.prefill_len, other.share_limit) // page * page, limit)
            if other.num_inserted >= end or other.wire.embeds is not None:
                continue
            common = common_prefix(other.ids[:end], request.ids[:end]) // page * page
            if common <= other.num_inserted:
                continue
            if num_cached is None:
                prefix_cache = self.kv_manager.prefix_cache
                num_cached = prefix_cache.peek(request.ids[:limit], request.namespace)
            gain = common - num_cached
            if gain >= page and 4 * gain >= request.prefill_len - num_cached:
                return True
        return False
