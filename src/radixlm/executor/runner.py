"""The tensor side of one replica: StepPlan in, StepResult out.

``forward`` launches, ``sample`` launches the draw (the tokens stay on the device for the next
step), ``read`` waits for the step's event and brings them to the host. On a CPU each is done when
it returns.

Legend: R rows with logits, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record
from radixlm.executor import step_layout as n
from radixlm.executor.batch_builder import BatchBuilder, add_optional_inputs
from radixlm.executor.device import AsyncCopy, CpuDevice, Device, PinnedRing
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.graphs import DecodeGraphs
from radixlm.executor.media import EncoderCache
from radixlm.executor.plain_sampling import fused_sampler, sample_plain
from radixlm.executor.pooling import Pooler
from radixlm.executor.profile import Profiler
from radixlm.executor.results import ResultReader, StepHandle, request_of
from radixlm.executor.step_layout import DeviceStepBuffer, SamplingParamTable, StepPacker
from radixlm.pools.state import StatePool
from radixlm.sampling.processors import LogitProcessors
from radixlm.sampling.sampler import Sampler, find_bad
from radixlm.sampling.table import SamplingTable
from radixlm.step.batch import AttentionRunner, ForwardBatch
from radixlm.step.plan import Items, StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.media import plain_ids

log = logging.getLogger(__name__)

STATE_SPACE = 1  # the page space whose pages hold states
RING = 3  # host buffers of a step's numbers, and of its results


class Model(Protocol):
    """What the runner asks of a model."""

    def step(
        self, batch: ForwardBatch, need_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None]: ...

    def logits(self, hidden_RD: Tensor) -> Tensor: ...


class Attention(AttentionRunner, Protocol):
    """The attention backend: told of each step before its layers run."""

    def begin(self, batch: ForwardBatch) -> None: ...


class RunnerOptions(Record):
    """Sizes and switches of a runner. ``max_tokens`` and ``max_updates`` of a step travel in its
    one copy, more in a second one. ``detect_bad``: rows that are not finite fail."""

    max_tokens: int = 4096
    max_updates: int = 4096
    detect_bad: bool = True
    profiler: Profiler | None = None


class Runner:
    """Owns the device tables, the sampler's tables and the model."""

    def __init__(
        self,
        model: Model,
        attn: Attention,
        tables: DeviceTables,
        sampling: SamplingTable,
        space_of_group: tuple[int, ...],
        page_size: int,
        eos_ids: tuple[int, ...],
        controls: Mapping[str, Any] | None = None,
        processors: LogitProcessors | None = None,
        pooler: Pooler | None = None,
        media: EncoderCache | None = None,
        states: StatePool | None = None,
        device: Device | None = None,
        options: RunnerOptions | None = None,
    ) -> None:
        self.model, self.attn, self.tables = model, attn, tables
        self.states, self.media, self.eos_ids = states, media, eos_ids
        self.device: Device = device or CpuDevice()
        options = options or RunnerOptions()
        self._detect_bad, self._profiler = options.detect_bad, options.profiler
        self.sampling = sampling
        self.sampler = Sampler(sampling, detect_bad=options.detect_bad, defers=True)
        self.pooler = pooler or Pooler()
        self.processors = processors or LogitProcessors()
        self.draws = SamplingParamTable(tables.num_slots, sampling.vocab_size)
        self.packer = StepPacker(
            tables, self.draws, tables.num_slots, options.max_tokens, options.max_updates
        )
        self._ring = PinnedRing(self.device, self.packer.num_ints, RING)
        self.numbers = DeviceStepBuffer(self._device_ints(), self.packer)
        self.expander = BatchBuilder(tables, self.numbers, space_of_group, page_size, attn)
        self._landings = [AsyncCopy(self.device, 2 * tables.num_slots) for _ in range(RING)]
        self._num_steps = 0
        self._reader = ResultReader(model, tables, sampling, self.pooler)
        self.graphs = DecodeGraphs(self.device, ())
        self._fused = fused_sampler(self.device.where)
        self._controls = dict(controls or {})

    def _device_ints(self) -> Tensor:
        if self.device.is_synchronous:
            return self._ring.first
        return torch.zeros(self.packer.num_ints, dtype=torch.int32, device=self.device.where)

    # ---- graphs ----------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, graphs: DecodeGraphs) -> None:
        """Record the graphs and use them from now on. Nothing may be in flight."""
        host = self._ring.take()
        self.packer.fill_dummies(host, graphs.largest)
        num = self.packer.num_head
        self.device.upload(host[:num], self.numbers.ints[:num])
        self.device.record().wait()
        graphs.capture(self._decode)
        self.graphs = graphs

    def _decode(self, size: int) -> Tensor:
        """What a graph of so many rows computes."""
        tables, page_size = self.tables, self.expander.page_size
        batch = self.expander.decodes(size, tables.max_pages * page_size)
        self.attn.begin(batch)
        logits_RV = self.model.step(batch, False)[1]
        assert logits_RV is not None
        return logits_RV

    def _graph_for(self, items: Items, extras: Mapping[str, Any], need_hidden: bool) -> int:
        """Rows of the graph that runs this step, 0 for none."""
        if items.prefills or need_hidden or not self.graphs.sizes:
            return 0
        if self.states is not None or self.tables.num_with_extras or extras:
            return 0
        return self.graphs.size_for(len(items))

    # ---- one step --------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> StepHandle:
        """Apply the plan's updates to the tables, then launch the model."""
        if self._profiler is not None:
            self._profiler.count()
        self._enter(plan)
        items = Items.of(plan.items)
        need_hidden = bool(items.decodes.hidden) or any(
            i.targets is not None or i.hidden_states or i.pooling for i in items.prefills
        )
        size = self._graph_for(items, plan.feature_data, need_hidden)
        host = self._ring.take()
        shape, num = self.packer.pack(items, host, size)
        self.device.upload(host[:num], self.numbers.ints[:num])
        self._ring.mark(self.device.record())
        step = StepHandle(plan, items, shape)
        if size:
            self.device.launch(partial(self._replay, step, size))
        else:
            self.device.launch(partial(self._run, step, need_hidden, self._state_rows(plan)))
        if need_hidden:
            step.done = self.device.record()
        return step

    def _enter(self, plan: StepPlan) -> None:
        """Slots that are left, taken, and get pages."""
        for slot in plan.releases:
            state = self.tables.states[slot]
            if state is not None:
                self.pooler.forget(state.rid)
            self.tables.release(slot)
            self.sampling.clear(slot)
        for admission in plan.admissions:
            self.tables.admit(admission)
            slot, name = admission.slot, admission.processor
            self.sampling.set(
                slot,
                admission.sampling,
                plain_ids(admission.prompt_ids).tolist(),
                admission.output_ids.tolist(),
                self.eos_ids,
                processor=self.processors.get(name) if name else None,
                rid=admission.rid,
            )
            has_penalties = slot in self.sampling.penalties
            self.draws.set(slot, self.sampling.state(slot), has_penalties)
        for update in plan.pages:
            self.tables.write(update)
        if plan.new_pages is not None:
            self.tables.add(plan.new_pages)

    @torch.inference_mode()
    def _replay(self, step: StepHandle, size: int) -> None:
        self.expander.update_tables(step.shape)
        step.logits_RV = self.graphs.replay(size)[: step.shape.num_rows]

    @torch.inference_mode()
    def _run(self, step: StepHandle, need_hidden: bool, states: _StateRows | None) -> None:
        """The step, launch by launch."""
        shape = step.shape
        self.expander.update_tables(shape)
        if shape.is_decode:
            # as in a graph where there may be one, so that the numbers are the same without it
            width = self.tables.max_pages * self.expander.page_size
            longest = shape.max_kv_len if self.device.is_synchronous else width
            batch = self.expander.decodes(shape.num_sequences, longest)
        else:
            batch = self.expander.mixed(shape)
        add_optional_inputs(step.plan, self.tables, batch)
        if self.media is not None:
            step.failed = self.media.put(step.plan, self.tables, batch)
        if states is not None:
            assert self.states is not None
            batch.states = self.states.begin(*states)
        try:
            self.attn.begin(batch)
            step.hidden_TD, step.logits_RV = self.model.step(batch, need_hidden)
        except torch.OutOfMemoryError:
            # what a step writes to the cache it may write again; states it has moved on
            if states is not None or not self.device.reclaim_memory():
                raise
            log.warning("out of memory in a step: unused memory was given back, it runs again")
            self.attn.begin(batch)
            step.hidden_TD, step.logits_RV = self.model.step(batch, need_hidden)

    def _state_rows(self, plan: StepPlan) -> _StateRows | None:
        """Which rows of their pool the recurrent layers read and write: tables, starts, counts."""
        if self.states is None:
            return None
        items = plan.items
        slots, starts, counts = (
            np.fromiter((getattr(item, name) for item in items), np.int64, len(items))
            for name in ("slot", "start", "count")
        )
        return self.tables.pages[STATE_SPACE][slots].astype(np.int64), starts, counts

    # ---- the draw --------------------------------------------------------------------------

    def sample(self, step: StepHandle, masks: Mapping[int, NDArray[np.int32]]) -> None:
        """Launch the draw of a token for each emitting item, which goes to the token table."""
        shape = step.shape
        if not shape.num_rows:
            return
        mask_RW = self._mask(step, masks)
        items = step.items
        has_needs = bool(items.decodes.logprobs) or any(
            i.emit and i.logprobs is not None for i in items.prefills
        )
        if self.device.is_synchronous or has_needs or not shape.kinds.all_plain:
            self.device.launch(partial(self._sample, step, mask_RW, has_needs))
        else:
            self.device.launch(partial(self._draw, step, mask_RW))
        self._num_steps += 1
        step.landing = self._landings[self._num_steps % RING]
        num = shape.num_rows * (2 if self._detect_bad else 1)
        step.landing.expect(self.device, partial(_drawn, step), num)

    @torch.inference_mode()
    def _sample(self, step: StepHandle, mask_RW: Tensor | None, has_needs: bool) -> None:
        """By the sampler, which knows everything; logit processors wait for the device."""
        assert step.logits_RV is not None
        wanted = None
        if has_needs:
            needs = (item.logprobs for item in step.items if item.emit)
            wanted = [request_of(need) if need else None for need in needs]
        rows, slots = step.shape.num_rows, step.shape.slots_R.tolist()
        positions_R = self.numbers.field(n.POSITION, rows).long()
        mask_RW = None if mask_RW is None else mask_RW.to(self.device.where)
        drawn = self.sampler.sample(step.logits_RV, slots, positions_R, mask_RW, wanted)
        step.logprobs, step.errors = drawn.logprobs, drawn.errors
        self._keep(step, drawn.tokens_R, drawn.is_bad_R)

    @torch.inference_mode()
    def _draw(self, step: StepHandle, mask_RW: Tensor | None) -> None:
        """Without waiting for anything."""
        assert step.logits_RV is not None
        if mask_RW is not None:
            mask_RW = mask_RW.to(self.device.where, non_blocking=True)
        logits_RV, numbers, rows = step.logits_RV, self.numbers, step.shape.num_rows
        if self._fused is not None:
            params_PR = numbers.head_FN[n.TEMPERATURE :, :rows]
            positions_R, slots_R = (numbers.field(f, rows) for f in (n.POSITION, n.DRAW_SLOT))
            tokens_R, is_bad_R = self._fused(
                logits_RV, params_PR, positions_R, mask_RW, self.tables.next_token, slots_R
            )
            self._tell(step, tokens_R, is_bad_R)
        else:
            tokens_R = sample_plain(logits_RV, numbers, step.shape.kinds, mask_RW)
            self._keep(step, tokens_R, find_bad(logits_RV) if self._detect_bad else tokens_R)

    def _keep(self, step: StepHandle, tokens_R: Tensor, is_bad_R: Tensor | None) -> None:
        """Put the tokens where the next step finds them, and where the host does."""
        slots_R = self.numbers.field(n.DRAW_SLOT, step.shape.num_rows).long()
        self.tables.next_token.index_copy_(0, slots_R, tokens_R)
        self._tell(step, tokens_R, is_bad_R)

    def _tell(self, step: StepHandle, tokens_R: Tensor, is_bad_R: Tensor | None) -> None:
        parts = [tokens_R.int()]
        if self._detect_bad and is_bad_R is not None:
            parts.append(is_bad_R.int())
        step.drawn_N = torch.cat(parts) if len(parts) > 1 else parts[0]

    def _mask(self, step: StepHandle, masks: Mapping[int, NDArray[np.int32]]) -> Tensor | None:
        """int32 [R, W] on the host, where no other step writes."""
        if not masks:
            return None
        order = [i for i, item in enumerate(step.items) if item.emit]
        width = len(next(iter(masks.values())))
        rows = np.full((len(order), width), -1, np.int32)
        for row, index in enumerate(order):
            if index in masks:
                rows[row] = masks[index]
        mask = torch.from_numpy(rows)
        return mask.pin_memory() if self.device.where.type == "cuda" else mask

    # ---- results ---------------------------------------------------------------------------

    def read(self, step: StepHandle) -> StepResult:
        """Wait for the step; what it produced, as numbers."""
        return self._reader.read(step)

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        """An operator's wish that concerns tensors."""
        if verb not in self._controls:
            raise InvalidRequest(f"the engine knows no {verb!r}", param="verb")
        return self._controls[verb](args)


_StateRows = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def _drawn(step: StepHandle) -> Tensor:
    assert step.drawn_N is not None
    return step.drawn_N
