"""Drafting: which drafted tokens the decode rows of a step verify.

A drafter is never a mode of the loop: rows without drafts decode as ever, and where no row has any
the step's items carry none. Drafts come last: they take the tokens and pages that a step's own work
leaves, and never retract a request.

Requests with a prediction, and those whose grammar may force tokens, draft without any drafter of
the server's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.plan_parts import allocate_beyond
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int32Array, Int64Array
from radixlm.speculative.draft_counts import DraftCounts
from radixlm.speculative.draft_pages import PathPages
from radixlm.speculative.drafter import NOTHING, Float32Array, Path, Proposal
from radixlm.speculative.lengths import DraftLength
from radixlm.speculative.ngram import NgramDrafter
from radixlm.speculative.trees import distinct_paths, num_common, tree_proposal
from radixlm.step.plan import DecodeBatch, Drafts, Item, Items, StepPlan
from radixlm.step.result import Proposals, StepResult
from radixlm.text.prediction import Prediction

log = logging.getLogger(__name__)

# chance of each predicted token where the output repeats the prediction, and elsewhere
SURE, UNSURE = 0.95, 0.7


class Drafting:
    """Asks the drafters, cuts what they propose, and tells them what became of it."""

    def __init__(
        self,
        limits: Limits,
        kv_manager: KVCacheManager,
        hooks: Hooks,
        lengths: DraftLength,
        drafter: NgramDrafter | None = None,
        has_device_drafter: bool = False,
    ) -> None:
        """``drafter``: the one on the host."""
        self.lengths, self.drafter = lengths, drafter
        for part in kv_manager.parts:
            PathPages(part)
        self.has_device_drafter = has_device_drafter
        self._limits, self._kv_manager, self._hooks = limits, kv_manager, hooks
        self._table = kv_manager.table
        self._most = limits.max_drafts
        self._has_states = kv_manager.window is not None and kv_manager.window.is_state
        self._num_seen: dict[str, int] = {}  # tokens of a request that the host drafter has seen
        self._broken: set[str] = set()  # requests whose drafter failed
        # requests that draft without a drafter
        self._own: dict[str, Prediction | None] = {}
        # of the device's drafter, by slot: the request's id and number of tokens, and the proposal
        self._proposed: dict[int, tuple[str, int, Proposal]] = {}
        # by slot, of the last plan: drafts that it verifies, drafts that its drafter proposes
        num_slots = len(self._table.num_computed)
        self._num_verified: Int64Array = np.zeros(num_slots, np.int64)
        self._num_proposed: Int64Array = np.zeros(num_slots, np.int64)
        self._num_more: dict[int, int] = {}  # by slot, of the last plan: drafts of further paths
        self._num_paused = 0  # steps for which no host drafter is asked
        self._is_paused = False  # whether the last plan was one of them
        self.counts = DraftCounts(self.has_drafter)

    @property
    def has_drafter(self) -> bool:
        """Whether all requests may draft, not only those with a prediction or a grammar."""
        return self.drafter is not None or self.has_device_drafter

    def register(self, request: Request) -> None:
        if not self._num_seen:
            self._num_paused = 0
        wire = request.wire
        if wire.prediction:
            self._own[request.rid] = Prediction(np.frombuffer(wire.prediction, "<i4"))
        elif wire.grammar is not None:
            self._own[request.rid] = None

    def slide(self, request: Request, count: int) -> None:
        """``count`` tokens have left the request's streaming window."""
        if request.rid in self._num_seen:
            self._num_seen[request.rid] -= count

    # ---- planning --------------------------------------------------------------------------

    def plan(self, batch: DecodeBatch, other_tokens: int) -> Drafts | None:
        """Drafts for the rows of the batch, whose next tokens count as computed; their drafts then
        count too. ``other_tokens``: tokens of the step's chunks."""
        self._is_paused = False
        if not self._most or not (self._own or self.has_drafter):
            return None
        if self._limits.depth and self._limits.stages == 1:
            return self._plan_ahead(batch, other_tokens) if self.has_device_drafter else None
        if not (self._own or self.drafter or self._proposed):
            return None
        if self._num_paused and not (self._own or self._proposed):
            self._num_paused -= 1
            self._is_paused = True
            return None
        table, slots = self._table, batch.slots
        left = self._limits.step_tokens - other_tokens - len(slots)
        most = min(self._most, left)
        if not self._proposed:  # what the device has proposed is there already
            most = min(most, self.lengths.room(len(slots), other_tokens))
        if most <= 0:
            return None
        computed = table.num_computed[slots]
        caps = np.minimum(table.end[slots] - computed, most)
        proposals, lens = self._choose(batch, caps, other_tokens)
        if not np.count_nonzero(lens):
            return None
        lens = np.diff(np.minimum(np.cumsum(lens), left), prepend=0)
        if self._has_states:
            self._save_states(slots, computed - 1, lens)
        allocate_beyond(self._kv_manager, slots, computed, lens)
        if not np.count_nonzero(lens):
            return None
        paths: tuple[Item, ...] = ()
        if self._limits.max_paths and any(proposal.others for proposal in proposals):
            paths = self._plan_paths(batch, proposals, lens, left - int(lens.sum()))
        table.num_computed[slots] += lens
        drafted = [one.tokens[:n] for one, n in zip(proposals, lens.tolist(), strict=True)]
        tokens = np.concatenate(drafted).astype(np.int32)
        return Drafts(lens.astype(np.int32), tokens, paths=paths)

    def _plan_paths(
        self, batch: DecodeBatch, proposals: Sequence[Proposal], lens: Int64Array, left: int
    ) -> tuple[Item, ...]:
        """Further paths of the rows that draft, the best first, as long as ``left`` tokens and
        free pages are there."""
        counts = self.lengths.choose_paths(proposals, lens)
        wanted = [
            (path, row)
            for row in np.flatnonzero(counts * lens).tolist()
            for path in proposals[row].others[: counts[row]]
        ]
        wanted.sort(key=lambda one: -one[0].gain)
        self._num_more.clear()
        found: list[Item] = []
        for path, row in wanted:
            if len(found) == self._limits.max_paths:
                break
            item = self._make_path(batch, row, path, self._limits.max_running + 1 + len(found))
            if item.count > left or not self._give_pages(item):
                continue
            found.append(item)
            left -= item.count
            num_new = len(path.tokens) - path.num_shared
            self._num_more[item.slot] = self._num_more.get(item.slot, 0) + num_new
        self.lengths.chose_paths(int(np.count_nonzero(lens)), sum(item.count for item in found))
        return tuple(found)

    def _make_path(self, batch: DecodeBatch, row: int, path: Path, page_row: int) -> Item:
        slot = int(batch.slots[row])
        known = self._kv_manager.request_in(slot).ids
        return Item(
            batch.rids[row],
            slot,
            len(known) - 1,
            1 + len(path.tokens),
            np.append(known[-1], path.tokens).astype(np.int32),
            True,
            batch.logprobs.get(row),
            hidden_states=row in batch.hidden,
            routed_experts=row in batch.routed,
            page_row=page_row,
        )

    def _give_pages(self, path: Item) -> bool:
        """Pages for a path, and as many for its request, which may go on in them."""
        request, end = self._kv_manager.request_in(path.slot), path.start + path.count
        has_room = end <= request.num_allocated or self._kv_manager.allocate(request, end)
        return has_room and self._pages_of(request).fork(request, path.page_row, path.start, end)

    def _pages_of(self, request: Request) -> PathPages:
        """The further pages of the request's drafts."""
        pages = self._kv_manager.drafts_of(request)
        assert isinstance(pages, PathPages)
        return pages

    def _choose(
        self, batch: DecodeBatch, caps: Int64Array, other_tokens: int
    ) -> tuple[list[Proposal], Int64Array]:
        """What is proposed for each row, and how much of it is worth verifying."""
        began_s = time.thread_time()  # waiting for a busy processor is no cost of drafts
        proposals, lens = [NOTHING] * len(caps), np.zeros(len(caps), np.int64)
        for i in np.flatnonzero(caps > 0).tolist():
            if self.has_drafter or batch.rids[i] in self._own:
                request = self._kv_manager.request_in(int(batch.slots[i]))
                proposals[i] = self._propose(request, int(caps[i]))
        self._proposed.clear()  # what is not used now is for another length
        if any(proposal is not NOTHING for proposal in proposals):
            lens = self.lengths.choose(batch.rids, proposals, other_tokens).astype(np.int64)
        host_s = time.thread_time() - began_s
        self.counts.totals.seconds += host_s
        if not np.count_nonzero(lens):
            self._num_paused = self.lengths.pause(host_s, len(caps) + other_tokens)
        return proposals, lens

    def _plan_ahead(self, batch: DecodeBatch, other_tokens: int) -> Drafts | None:
        """The same while the last step is in flight: what its drafter proposes and how many of its
        own drafts are refused is known to the device only. Rows of which the host must know that
        have no drafts: those with grammars, and with positions of media."""
        table, slots = self._table, batch.slots
        is_ahead = table.inflight[slots] > 1  # with this step
        lens = np.where(is_ahead, self._num_proposed[slots], 0)
        is_late = is_ahead & (self._num_verified[slots] > 0)
        for i in np.flatnonzero((lens > 0) & ~table.is_fast_path[slots]).tolist():
            request = self._kv_manager.request_in(int(slots[i]))
            lens[i] *= not (request.has_token_hook or request.wire.media)
        computed = table.num_computed[slots]
        lens = np.minimum(lens, np.maximum(table.end[slots] - computed, 0))
        left = self._limits.step_tokens - other_tokens - len(slots)
        lens = np.diff(np.minimum(np.cumsum(lens), max(left, 0)), prepend=0)
        allocate_beyond(self._kv_manager, slots, computed, lens)
        self._num_verified[:] = 0
        if not np.count_nonzero(lens) and not np.count_nonzero(is_late):
            return None
        self._num_verified[slots] = lens
        table.num_computed[slots] += lens
        return Drafts(lens.astype(np.int32), None, is_late)

    def _propose(self, request: Request, most: int) -> Proposal:
        """What a row may verify of what a drafter proposes, or its prediction."""
        slot = request.slot
        rid, num_tokens, proposal = self._proposed.pop(slot, ("", 0, NOTHING))
        if (rid, num_tokens) != (request.rid, request.num_tokens):
            proposal = NOTHING
        prediction = self._own.get(request.rid)
        if prediction is not None:
            prediction.follow(request.whole_output[prediction.num_seen :].tolist())
            own = _predicted(prediction, most)
            proposal = own if len(own.tokens) else proposal
        if not len(proposal.tokens) and self.drafter and request.rid not in self._broken:
            proposal = self._ask(self.drafter, request, most)
        tokens = np.asarray(proposal.tokens)[: min(most, len(proposal.survival))]
        tokens = self._valid(tokens)
        survival = proposal.survival[: len(tokens)]
        if request.has_token_hook:
            tokens, survival = self._guide(request, tokens, survival, most)
        if not len(tokens):
            return NOTHING
        others = (self._guided_path(request, path, most) for path in proposal.others)
        return Proposal(tokens, survival, distinct_paths(tokens, others))

    def _valid(self, tokens: Int32Array) -> Int32Array:
        """The tokens before the first that is none of the vocabulary, or a placeholder of media."""
        is_wrong = (tokens < 0) | (tokens >= self._limits.vocab)
        return tokens[: int(is_wrong.argmax())] if np.count_nonzero(is_wrong) else tokens

    def _guided_path(self, request: Request, path: Path, most: int) -> Path:
        tokens = self._valid(np.asarray(path.tokens)[:most])
        if request.has_token_hook:
            tokens = np.array(self._hooks.drafts(request, tokens.tolist(), most), np.int32)
        return Path(tokens, path.num_shared, path.gain)

    def _guide(
        self, request: Request, tokens: Int32Array, survival: Float32Array, most: int
    ) -> tuple[Int32Array, Float32Array]:
        """What features make of a proposal; tokens of their own are as sure as those before."""
        guided = np.array(self._hooks.drafts(request, tokens.tolist(), most), np.int32)
        num = min(len(guided), len(tokens))
        is_other = guided[:num] != tokens[:num]
        same = int(is_other.argmax()) if np.count_nonzero(is_other) else num
        certain = np.full(len(guided) - same, survival[same - 1] if same else 1.0, np.float32)
        return guided, np.concatenate((survival[:same], certain))

    def _ask(self, drafter: NgramDrafter, request: Request, most: int) -> Proposal:
        """The proposal of the host drafter."""
        try:
            self._show(drafter, request)
            return drafter.propose(request.rid, most)
        except Exception:  # a drafter can only cost speed
            log.exception("request %s goes on without drafts: its drafter failed", request.rid)
            self._broken.add(request.rid)
            return NOTHING

    def _show(self, drafter: NgramDrafter, request: Request) -> None:
        """Bring the host drafter up to date with the request's tokens."""
        rid, ids = request.rid, request.ids
        seen = self._num_seen.get(rid)
        self._num_seen[rid] = len(ids)
        first = request.prompt_len if seen is None else seen
        if seen is None:
            drafter.start(rid, request.namespace, ids[:first].copy())
        if first < len(ids):
            drafter.append(rid, ids[first:].copy())

    def _save_states(self, slots: Int64Array, starts: Int64Array, lens: Int64Array) -> None:
        """Save the states that a refused draft takes back; rows without a page draft nothing."""
        for i in np.flatnonzero(lens).tolist():
            request = self._kv_manager.request_in(int(slots[i]))
            lens[i] *= self._pages_of(request).save_state(request, int(starts[i]))

    def device_lens(self, items: Items) -> Int32Array | None:
        """How many tokens the device's drafter proposes after a step, by item that emits. It writes
        its KV as far behind the known tokens: the pages are allocated. None: it rests."""
        if not self.has_device_drafter or self.lengths.sleeps():
            return None
        last = [item for item in items.prefills if item.emit]
        rids = (*items.decodes.rids, *(item.rid for item in last)) if last else items.decodes.rids
        other_tokens = sum(item.count for item in items.prefills)
        wanted = self.lengths.lens(rids, other_tokens)
        self._num_proposed[:] = 0
        if wanted is None or not np.count_nonzero(wanted):
            return wanted
        lens = np.minimum(wanted, self._most).astype(np.int64)
        slots = np.append(items.decodes.slots, [item.slot for item in last]).astype(np.int64)
        known = np.append(items.starts + 1, [item.start + item.count for item in last])
        lens = np.clip(lens, 0, np.maximum(self._table.end[slots] - known - 1, 0))
        allocate_beyond(self._kv_manager, slots, self._table.num_computed[slots], lens)
        self._num_proposed[slots] = lens
        return lens.astype(np.int32)

    # ---- results ---------------------------------------------------------------------------

    def observe(self, items: Items, result: StepResult) -> None:
        """The results of a step that verified drafts."""
        assert items.drafts is not None and result.counts is not None
        rids, lens, slots = items.decodes.rids, items.drafts.lens.tolist(), items.decodes.slots
        rows = zip(rids, lens, result.counts.tolist(), strict=True)
        begin = 0
        for row, (rid, drafted, produced) in enumerate(rows):
            accepted = produced - 1
            if drafted:
                if row in result.winners:  # the first path alone tells how right its drafts are
                    run = result.tokens[begin : begin + accepted]
                    accepted = num_common(items.drafts_of(row), run)
                    self.lengths.gained(produced - 1 - accepted)
                self.lengths.observe(rid, drafted, accepted)
                num_more = self._num_more.get(int(slots[row]), 0)
                self.counts.add(rid, drafted + num_more, produced - 1)
            begin += produced
        self._num_more.clear()
        self.counts.totals.num_steps += 1

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken so long; one that goes on by itself, a pass of it."""
        items = Items.of(plan.items)
        if items.more_N is not None:
            num_further = int(items.more_N.max())
            self._num_paused = max(0, self._num_paused - num_further)
            self.lengths.pass_steps(num_further)
        asks_host = self._own or self.drafter
        if not asks_host and (not self.has_device_drafter or self.lengths.is_asleep):
            return
        if self._is_paused or items.prefills or not len(items.starts):
            self.lengths.skip_step()
            return
        draft_steps = 0 if plan.draft_lens is None else int(plan.draft_lens.max(initial=0))
        num_rows = len(items.starts)
        num_tokens = num_rows if items.more_N is not None else items.num_tokens
        self.lengths.observe_step(num_rows, num_tokens, seconds, draft_steps)

    def keep(self, items: Items, proposals: Proposals) -> None:
        """Keep what the device's drafter proposes, after the step's tokens were appended."""
        slots = [*items.decodes.slots.tolist(), *(i.slot for i in items.prefills if i.emit)]
        ends = np.cumsum(proposals.lens).tolist()
        for slot, begin, end in zip(slots, [0, *ends], ends, strict=False):
            request = self._kv_manager.requests[slot]
            if request is not None and end > begin:
                tokens, survival = proposals.tokens[begin:end], proposals.survival[begin:end]
                possible = np.count_nonzero(survival)  # a block or head has no place for others
                proposal = Proposal(tokens[:possible], survival[:possible])
                if proposals.parents is not None:
                    proposal = tree_proposal(tokens, survival, proposals.parents[begin:end])
                self._proposed[slot] = (request.rid, request.num_tokens, proposal)

    def flush(self) -> None:
        """Forget what requests have written that are over, and begin the means again."""
        self.counts.flush()
        if self.drafter is not None:
            self.drafter.flush()

    def forget(self, request: Request) -> None:
        rid = request.rid
        self._broken.discard(rid)
        self._own.pop(rid, None)
        self.lengths.forget(rid)
        self.counts.forget(rid)
        if self._num_seen.pop(rid, None) is None or self.drafter is None:
            return
        try:
            self.drafter.finish(rid)
        except Exception:
            log.exception("a drafter failed at the end of request %s", rid)


def _predicted(prediction: Prediction, most: int) -> Proposal:
    """At most ``most`` tokens of a prediction."""
    tokens = prediction.following(most)
    if not tokens:
        return NOTHING
    chance = SURE if prediction.is_repeated else UNSURE
    survival = (chance ** np.arange(1, len(tokens) + 1)).astype(np.float32)
    return Proposal(np.array(tokens, np.int32), survival)
