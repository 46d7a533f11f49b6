"""Runner: the tensor side of one engine, from StepPlan to StepResult.

``forward`` launches the model, ``sample`` launches sampling (the tokens stay on the device for the
next step), ``read`` waits for the step and brings its results to the host. On a CPU each is done
when it returns.

Legend: R rows with logits, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record, field, replace
from radixlm.devices.copies import AsyncCopy
from radixlm.devices.device import CpuDevice, Device
from radixlm.distributed.groups import Group
from radixlm.distributed.record import Choices, StepTokens
from radixlm.executor import step_layout as layout
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.interfaces import (
    Adapters,
    Attention,
    Encoder,
    ExpertChoices,
    FurtherTokens,
    Graphs,
    Model,
    StepEnd,
)
from radixlm.executor.results import HiddenOutputs, ResultReader, StepHandle, logprob_request
from radixlm.executor.step_inputs import RING, StepInputs
from radixlm.executor.step_layout import StepPacker
from radixlm.pools.state import StatePool
from radixlm.sampling.drafts import Accepted
from radixlm.sampling.plain import SamplingParamTable, fused_sampler, sample_plain
from radixlm.sampling.processors import ChosenProcessor, LogitProcessors
from radixlm.sampling.sampler import Sampler, find_bad
from radixlm.sampling.table import SamplingTable
from radixlm.step.batch import ForwardBatch
from radixlm.step.masks import Masks
from radixlm.step.plan import Admission, Items, PageCopy, StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.media import plain_ids
from radixlm.wire.requests import THINKING_BUDGET

log = logging.getLogger(__name__)

STATE_SPACE = 1  # the page space whose pages hold states


class RunnerParts(Record):
    """What a runner works with. ``commands``: operators' commands by name; ``states``: the pool of
    recurrent layers' states; ``end``: follows each step, as a drafter does; ``choices``: of
    experts, by tokens, for those who ask; ``followers``: the group in which rank 0 hands sampled
    tokens from device to device."""

    model: Model
    attn: Attention
    tables: DeviceTables
    sampling: SamplingTable
    device: Device = field(default_factory=CpuDevice)
    processors: LogitProcessors = field(default_factory=LogitProcessors)
    outputs: HiddenOutputs = field(default_factory=HiddenOutputs)
    media: Encoder | None = None
    states: StatePool | None = None
    adapters: Adapters | None = None
    commands: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    end: StepEnd | None = None
    choices: ExpertChoices | None = None
    followers: Group | None = None


class RunnerOptions(Record):
    """Sizes and switches of a runner.

    space_of_group  the page table that each KV group reads
    max_tokens      token ids of a step that fit into its one copy to the device; more need a second
    max_updates     likewise, changed entries of the page tables
    detect_bad      fail rows whose logits are not finite
    max_drafts      drafted tokens of a sequence that a step verifies at most
    draft_widths    tokens of the decode rows with drafts that get graphs
    max_paths       further paths of drafts in a step at most
    tree_size       drafts of a tree of the device's drafter; 0: it drafts chains
    on_step         called before each step, with whether no part of a prompt is in it
    samples         whether this rank samples; the others ``follow``
    """

    page_size: int
    space_of_group: tuple[int, ...] = (0,)
    eos_ids: tuple[int, ...] = ()
    max_tokens: int = 4096
    max_updates: int = 4096
    detect_bad: bool = True
    max_drafts: int = 0
    draft_widths: tuple[int, ...] = ()
    max_paths: int = 0
    tree_size: int = 0
    on_step: Callable[[bool], None] | None = None
    samples: bool = True


class Runner:
    """Owns the device tables, the sampler's tables and the model."""

    def __init__(self, parts: RunnerParts, options: RunnerOptions) -> None:
        self.model, self.attn, self.tables = parts.model, parts.attn, parts.tables
        self.device, self.states, self.media = parts.device, parts.states, parts.media
        self.sampling, self.processors = parts.sampling, parts.processors
        self.options, self._commands, self.outputs = options, parts.commands, parts.outputs
        self.adapters, self.choices = parts.adapters, parts.choices
        if self.adapters is not None:
            self.adapters.reset(self.tables.num_slots)
        self.draft_widths, self.followers = options.draft_widths, parts.followers
        self.samples = options.samples
        self._unread = deque[StepHandle]()  # of a rank that does not sample
        self.sampler = Sampler(self.sampling, detect_bad=options.detect_bad, defers=True)
        num_slots = self.tables.num_slots
        self.params = SamplingParamTable(num_slots, self.sampling.vocab_size)
        self.inputs = self._make_inputs(num_slots + 1)  # with a row for padding
        max_rows = (num_slots + options.max_paths) * (1 + options.max_drafts)
        # steps that verify drafts have more rows of logits: buffers of their own
        self.draft_inputs = self._make_inputs(max_rows) if options.max_drafts else None
        num_proposed = 3 * options.tree_size or 2 * options.max_drafts
        num_results = 2 * max_rows + num_slots * (2 + num_proposed)
        self._token_copies = [AsyncCopy(self.device, num_results) for _ in range(RING)]
        self._num_sampled_steps = 0
        self._reader = ResultReader(self.sampling, self.outputs)
        self.recorded = Graphs()
        self.further: FurtherTokens | None = None
        self._fused = fused_sampler(self.device.where)
        self.end = parts.end

    @property
    def max_kv_len(self) -> int:
        """The largest number of tokens that a sequence can have."""
        return self.tables.max_pages * self.options.page_size

    def drop_graphs(self) -> None:
        """Run steps without graphs; no step may be in flight."""
        self.recorded = Graphs()

    def _make_inputs(self, max_rows: int) -> StepInputs:
        options = self.options
        packer = StepPacker(
            self.tables, self.params, max_rows, options.max_tokens, options.max_updates
        )
        return StepInputs(self.device, packer, options.space_of_group, options.page_size, self.attn)

    # ---- one step --------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> StepHandle:
        """Apply the plan's updates to the tables, then launch the model."""
        items = Items.of(plan.items)
        if self.options.on_step is not None:
            self.options.on_step(not items.prefills)
        self._apply_updates(plan)
        more_N = items.more_N
        if more_N is not None:
            items = items.first_tokens()
            plan = replace(plan, items=items)
        need_hidden = self.outputs.are_wanted(items)
        need_hidden |= self.choices is not None and self.choices.needs_all_tokens
        graph = self.recorded.choose(items, plan.feature_data, need_hidden)
        inputs = self.inputs
        if items.drafts is not None:
            assert self.draft_inputs is not None, "drafts in a runner of max_drafts 0"
            inputs = self.draft_inputs
        lora = None
        if graph.is_adapted and graph.rows:
            self.recorded.fill_adapters(items, graph)
        elif self.adapters is not None:
            lora = self.adapters.rows(items)
        shape = inputs.fill(partial(self.recorded.pack, items, graph))
        tree_size = self.options.tree_size
        step = StepHandle(plan, items, shape, inputs, lora, tree_size=tree_size, more_N=more_N)
        if more_N is not None:
            shape.max_kv_len += int(more_N.max())
        if plan.copies:
            self.device.launch(partial(self._copy_pages, plan.copies))
        if self.followers is not None:
            self.device.launch(partial(self._share_tokens, self.followers))
        step.launched_s = time.monotonic()
        if graph.rows:
            self.device.launch(partial(self.recorded.replay, step, graph))
        else:
            self.device.launch(partial(self._run, step, need_hidden, self._state_rows(plan)))
        if need_hidden:
            step.done = self.device.record()
        return step

    def follow(self, plan: StepPlan) -> None:
        """The step of a rank that does not sample: what ``forward`` and ``read`` compute, in the
        same order. Where rank 0 may launch another step before it reads this one, ``follow_read``
        is to be called when it does."""
        step = self.forward(plan)
        if self.followers is None:
            self.outputs.follow(step)
        elif self.outputs.num_head_runs(step.items):
            self._unread.append(step)

    def follow_read(self) -> None:
        """What ``read`` computes of the first step that runs the head and was not read."""
        self.outputs.follow(self._unread.popleft())

    def due_moves(self) -> dict[str, Any] | None:
        """Experts that should move before the next step: arguments of the command move_experts."""
        return None if self.choices is None else self.choices.due_moves()

    def _bound_of(self, admission: Admission) -> ChosenProcessor | None:
        params = admission.reasoning_bound
        return None if params is None else (self.processors.get(THINKING_BUDGET), params)

    def _apply_updates(self, plan: StepPlan) -> None:
        """Apply the plan's releases, admissions and pages to the tables."""
        for slot in plan.releases:
            state = self.tables.states[slot]
            if state is not None:
                self.outputs.forget(state.rid)
            self.tables.release(slot)
            self.sampling.clear(slot)
            if self.end is not None:
                self.end.release(slot)
            if self.adapters is not None:
                self.adapters.assign(slot, -1)
        for admission in plan.admissions:
            self.tables.admit(admission)
            slot, name = admission.slot, admission.processor
            if self.adapters is not None:
                self.adapters.assign(slot, admission.adapter, admission.adapter_start)
            self.sampling.set(
                slot,
                admission.sampling,
                plain_ids(admission.prompt_ids).tolist(),
                admission.output_ids.tolist(),
                self.options.eos_ids,
                processor=self.processors.get(name) if name else None,
                bound=self._bound_of(admission),
                rid=admission.rid,
            )
            has_penalties = slot in self.sampling.penalties
            self.params.set(slot, self.sampling.state(slot), has_penalties)
        for update in plan.pages:
            self.tables.write(update)
        if plan.new_pages is not None:
            self.tables.add(plan.new_pages)

    @torch.inference_mode()
    def _share_tokens(self, group: Group) -> None:
        """Give all ranks the tokens that rank 0 has sampled, which the host may not know yet."""
        tokens = self.tables.next_token  # drafts come with the plan
        tokens.copy_(group.broadcast(tokens, 0))

    @torch.inference_mode()
    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages inside the pools of the model and of its drafter."""
        if self.end is not None:
            self.end.copy_pages(copies)
        self._copy_own_pages(copies)

    def _copy_own_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages inside the model's pools."""
        pools = list(zip(self.options.space_of_group, self.attn.pools, strict=True))
        if self.states is not None:
            pools.append((STATE_SPACE, self.states))
        for space, pool in pools:
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == space]
            if pairs and pool is not None:
                pool.copy_pages(*map(list, zip(*pairs, strict=True)))

    @torch.inference_mode()
    def _run(self, step: StepHandle, need_hidden: bool, states: StateRows | None) -> None:
        """Run the step without a graph."""
        shape, builder = step.shape, step.inputs.builder
        builder.update_tables(shape)
        if shape.is_decode:
            # as in a graph on devices that have them, so that the results are bitwise the same
            max_kv_len = self.max_kv_len
            if self.device.is_synchronous:
                max_kv_len = shape.max_kv_len
            batch = builder.decodes(shape.num_sequences, max_kv_len)
        else:
            batch = builder.mixed(shape)
            step.drafts = builder.draft_rows(shape)
        if self.end is not None or step.more_N is not None:
            step.batch, batch.leaves_taps = batch, step.plan.draft_lens is not None
        batch.lora = step.lora
        batch.feature_data = step.plan.feature_data
        if self.media is not None:
            step.failed = self.media.put(step.plan, self.tables, batch)
        if states is not None:
            assert self.states is not None
            batch.states = self.states.begin(*states)
        asked, whole = self.choices, self._whole_of(step)
        if asked is not None and asked.are_wanted(whole.items):
            asked.begin()
        else:
            asked = None
        try:
            self.attn.begin(batch)
            step.hidden_TD, step.logits_RV = self.model.step(batch, need_hidden)
        except torch.OutOfMemoryError:
            # the KV of a step can be written again, but recurrent states have already advanced
            if states is not None or not self.device.reclaim_memory():
                raise
            log.warning("out of memory in a step: unused memory was freed and the step runs again")
            self.attn.begin(batch)
            step.hidden_TD, step.logits_RV = self.model.step(batch, need_hidden)
        chosen = None if asked is None else asked.take()
        if asked is not None and chosen is not None:
            self._tell(asked, whole, chosen, partial(self._tokens_of, step, batch))

    def _whole_of(self, step: StepHandle) -> StepHandle:
        """The step of all attention groups, of which ``step`` runs."""
        return step

    def _tell(
        self,
        choices: ExpertChoices,
        step: StepHandle,
        chosen: Choices,
        tokens: Callable[[], StepTokens],
    ) -> None:
        choices.tell(step, chosen, tokens)

    def _tokens_of(self, step: StepHandle, batch: ForwardBatch) -> StepTokens:
        kinds = bool(step.items.prefills), bool(len(step.items.decodes.slots))
        mode = "MIXED" if all(kinds) else "EXTEND" if kinds[0] else "DECODE"
        lens = [item.count for item in step.plan.items]
        return StepTokens(batch.token_ids_T.tolist(), batch.positions_T.tolist(), lens, mode)

    def _state_rows(self, plan: StepPlan) -> StateRows | None:
        """For recurrent layers: page table rows, first tokens and token counts of the items."""
        if self.states is None:
            return None
        items = plan.items
        slots, starts, counts = (
            np.fromiter((getattr(item, name) for item in items), np.int64, len(items))
            for name in ("slot", "start", "count")
        )
        return self.tables.pages[STATE_SPACE][slots].astype(np.int64), starts, counts

    # ---- sampling --------------------------------------------------------------------------

    def sample(self, step: StepHandle, masks: Masks) -> None:
        """Launch sampling for each item that emits; the tokens go to the token table."""
        shape = step.shape
        if not shape.num_rows:
            if self.end is not None:
                self.device.launch(partial(self.end.run, step))
            return
        is_pinned = self.device.where.type == "cuda"
        mask_RW = step.token_mask(masks, is_pinned)
        items = step.items
        wants_logprobs = bool(items.decodes.logprobs) or any(
            i.emit and i.logprobs is not None for i in items.prefills
        )
        if step.more_N is not None:
            assert self.further is not None, "a step that goes on by itself"
            further = partial(self.further.sample, step, step.more_N, mask_RW, masks.follow)
            self.device.launch(further)
        elif self.device.is_synchronous or wants_logprobs or not shape.kinds.all_plain:
            self.device.launch(partial(self.sample_any, step, mask_RW, wants_logprobs))
        else:
            self.device.launch(partial(self._sample_plain, step, mask_RW))
        self._num_sampled_steps += 1
        step.token_copy = self._token_copies[self._num_sampled_steps % RING]
        if self.end is not None:
            self.device.launch(partial(self.end.run, step))
        num_ints = shape.num_rows * (2 if self.options.detect_bad else 1)
        num_ints += step.num_counted + math.prod(step.proposed_shape)
        step.token_copy.start(self.device, step.sampled, num_ints)

    @torch.inference_mode()
    def sample_any(self, step: StepHandle, mask_RW: Tensor | None, wants_logprobs: bool) -> None:
        """Sample with the sampler, which does everything; logit processors wait for the device."""
        assert step.logits_RV is not None
        requests = None
        if wants_logprobs:
            requests = [logprob_request(one) if one else None for one in step.wanted_logprobs()]
        rows, slots = step.shape.num_rows, step.shape.slots_R.tolist()
        positions_R = step.inputs.buffer.field(layout.POSITION, rows).long()
        mask_RW = None if mask_RW is None else mask_RW.to(self.device.where)
        sampled = self.sampler.sample(
            step.logits_RV, slots, positions_R, mask_RW, requests, step.drafts
        )
        step.logprobs, step.errors = sampled.logprobs, sampled.errors
        self._store_tokens(step, sampled.tokens_R, sampled.is_bad_R, sampled.accepted)

    @torch.inference_mode()
    def _sample_plain(self, step: StepHandle, mask_RW: Tensor | None) -> None:
        """Sample rows without penalties, biases and processors; never waits for the device."""
        assert step.logits_RV is not None
        if mask_RW is not None:
            mask_RW = mask_RW.to(self.device.where, non_blocking=True)
        logits_RV, buffer, rows = step.logits_RV, step.inputs.buffer, step.shape.num_rows
        params_PR, positions_R = buffer.params(rows), buffer.field(layout.POSITION, rows)
        if self._fused is not None:
            slots_R = buffer.field(layout.SAMPLE_SLOT, rows)
            tokens_R, is_bad_R = self._fused(
                logits_RV, params_PR, positions_R, mask_RW, self.tables.next_token, slots_R
            )
            if step.drafts is None:
                self.set_result(step, tokens_R, is_bad_R)
            else:
                self._store_tokens(step, tokens_R, is_bad_R, step.drafts.accept(tokens_R))
            return
        tokens_R = sample_plain(logits_RV, params_PR, positions_R, step.shape.kinds, mask_RW)
        found_bad_R = find_bad(logits_RV) if self.options.detect_bad else None
        accepted = None if step.drafts is None else step.drafts.accept(tokens_R)
        self._store_tokens(step, tokens_R, found_bad_R, accepted)

    def _store_tokens(
        self,
        step: StepHandle,
        tokens_R: Tensor,
        is_bad_R: Tensor | None,
        accepted: Accepted | None,
    ) -> None:
        """Write each sequence's last token to the token table, and set the step's result."""
        slots_R = step.inputs.buffer.field(layout.SAMPLE_SLOT, step.shape.num_rows).long()
        last_R, step.accepted = tokens_R, accepted
        if accepted is not None:
            counts_N, first_N = accepted.counts_N, step.first_rows(tokens_R.device)
            slots_R, last_R = slots_R[first_N], tokens_R[first_N + counts_N - 1]
            num = step.shape.num_decodes
            refused = step.inputs.buffer.field(layout.COUNT, num) - counts_N[:num].int()
            self.tables.num_refused.index_copy_(0, slots_R[:num], refused)
        self.tables.next_token.index_copy_(0, slots_R, last_R)
        self.set_result(step, tokens_R, is_bad_R)

    def set_result(self, step: StepHandle, tokens_R: Tensor, is_bad_R: Tensor | None) -> None:
        """Tokens, marks of bad rows and counts as one tensor, which is copied to the host."""
        parts = [tokens_R.int()]
        if self.options.detect_bad and is_bad_R is not None:
            parts.append(is_bad_R.int())
        if step.accepted is not None:
            parts.append(step.accepted.counts_N.int())
            if step.accepted.chosen_N is not None:
                parts.append(step.accepted.chosen_N.int())
        step.sampled_N = torch.cat(parts) if len(parts) > 1 else parts[0]

    # ---- results ---------------------------------------------------------------------------

    def read(self, step: StepHandle) -> StepResult:
        """Wait for the step and return its results."""
        return self._reader.read(step)

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        """Run an operator's command that concerns tensors."""
        if verb not in self._commands:
            raise InvalidRequest(f"the engine knows no {verb!r}", param="verb")
        return self._commands[verb](args)


StateRows = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
