"""RecordedSteps: a runner's CUDA graphs, and which of them runs a step.

Legend: R rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.executor.adapters import AdapterTable
from radixlm.executor.batch_builder import BatchBuilder
from radixlm.executor.device import Device
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.graphs import StepGraphs, prompt_rows
from radixlm.executor.recorded_adapters import RecordedAdapters
from radixlm.executor.results import StepHandle
from radixlm.executor.step_inputs import StepInputs
from radixlm.executor.step_layout import SamplingParamTable
from radixlm.kernels.ops.lora import LoraRows
from radixlm.step.batch import AttentionRunner, ForwardBatch
from radixlm.step.plan import Items


class Model(Protocol):
    """What the runner calls of a model."""

    def step(
        self, batch: ForwardBatch, need_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None]: ...

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor: ...


class Attention(AttentionRunner, Protocol):
    """The attention backend; ``begin`` is called with each step before its layers run."""

    def begin(self, batch: ForwardBatch) -> None: ...


class Choice(NamedTuple):
    """The graph of a step: its ``rows``, 0 for none, and the tokens of each; or, of a step with
    parts of prompts, its sequences and its ``num_tokens``. ``is_adapted``: it runs adapters."""

    rows: int = 0
    width: int = 1
    num_tokens: int = 0
    is_adapted: bool = False


class RecordedParts(Record):
    """What graphs read and run. ``has_end``: a ``StepEnd`` reads a step's batch; ``has_states``:
    the model has recurrent layers, whose steps are not recorded."""

    model: Model
    attn: Attention
    tables: DeviceTables
    params: SamplingParamTable
    inputs: StepInputs
    draft_inputs: StepInputs | None
    adapters: AdapterTable | None
    page_size: int
    has_end: bool
    has_states: bool


class GraphFamily:
    """Graphs of decode steps by batch size, of those with drafts also by tokens of a row, and of
    small steps with parts of prompts by number of tokens. ``adapters``: which they run."""

    def __init__(self, device: Device, adapters: RecordedAdapters | None = None) -> None:
        self.decodes, self.prompts = StepGraphs(device, ()), StepGraphs(device, ())
        self.drafts: dict[int, StepGraphs] = {}  # by tokens of a row
        self.batches: dict[tuple[int, int], ForwardBatch] = {}  # by rows and tokens of each
        self.adapters = adapters

    def of(self, choice: Choice) -> StepGraphs:
        """The graphs of a kind of steps."""
        if choice.num_tokens:
            return self.prompts
        return self.decodes if choice.width == 1 else self.drafts[choice.width]


class RecordedSteps:
    """Graphs of steps without adapters, and others of steps with adapters."""

    def __init__(self, device: Device, parts: RecordedParts) -> None:
        self._device, self._parts = device, parts
        self.drop()

    def drop(self) -> None:
        """Run steps without graphs; no step may be in flight."""
        self.plain = GraphFamily(self._device)
        self.adapted = GraphFamily(self._device)

    def add_adapters(self, max_tokens: int) -> bool:
        """Get ready to record steps with adapters, of at most ``max_tokens``; whether the kernels
        can."""
        table = self._parts.adapters
        slots = None if table is None else table.make_slots(max_tokens)
        if table is None or slots is None:
            return False
        recorded = RecordedAdapters(self._device, table, slots)
        self.adapted = GraphFamily(self._device, recorded)
        return True

    @torch.inference_mode()
    def capture(self, graphs: StepGraphs, width: int = 1, is_adapted: bool = False) -> None:
        """Record decode steps and use the graphs from now on; no step may be in flight. ``width``:
        tokens of a row, with its drafts."""
        inputs = self._parts.inputs if width == 1 else self._parts.draft_inputs
        assert inputs is not None, "graphs of drafts in a runner of max_drafts 0"
        inputs.fill_dummies(graphs.largest)
        family = self.adapted if is_adapted else self.plain
        graphs.capture(partial(self._decode_logits, family, inputs.builder, width))
        if width == 1:
            family.decodes = graphs
        else:
            family.drafts[width] = graphs

    @torch.inference_mode()
    def capture_prompts(self, graphs: StepGraphs, is_adapted: bool = False) -> None:
        """Record steps with parts of prompts, of numbers of tokens, and use the graphs from now on;
        no step may be in flight."""
        family = self.adapted if is_adapted else self.plain
        graphs.capture(partial(self._prompt_logits, family), self._fill_prompt)
        family.prompts = graphs

    def _decode_logits(
        self, family: GraphFamily, builder: BatchBuilder, width: int, size: int
    ) -> Tensor:
        """What a graph computes: the logits of ``size`` decode rows of ``width`` tokens."""
        if width == 1:
            batch = builder.decodes(size, self.max_kv_len)
        else:
            batch = builder.drafted(size, width, self.max_kv_len)
        if self._parts.has_end:
            family.batches[size, width] = batch
        return self._logits(family, batch)

    def _prompt_logits(self, family: GraphFamily, num_tokens: int) -> Tensor:
        """What a graph computes: the logits of the last token of each sequence that emits."""
        rows, builder = self._prompt_rows(num_tokens), self._parts.inputs.builder
        return self._logits(family, builder.filled(rows, num_tokens, self.max_kv_len))

    def _logits(self, family: GraphFamily, batch: ForwardBatch) -> Tensor:
        if family.adapters is not None:
            batch.lora = family.adapters.rows(batch.num_tokens)
        self._parts.attn.begin(batch)
        logits_RV = self._parts.model.step(batch, False)[1]
        assert logits_RV is not None
        return logits_RV

    def _prompt_rows(self, num_tokens: int) -> int:
        return prompt_rows(num_tokens, self._parts.tables.num_slots)

    def _fill_prompt(self, num_tokens: int) -> None:
        self._parts.inputs.fill_dummies(self._prompt_rows(num_tokens), num_tokens)

    @property
    def max_kv_len(self) -> int:
        """The largest number of tokens that a sequence can have."""
        return self._parts.tables.max_pages * self._parts.page_size

    # ---- a step ----------------------------------------------------------------------------

    def choose(self, items: Items, feature_data: Mapping[str, Any], need_hidden: bool) -> Choice:
        """The graph that runs a step."""
        if need_hidden or not self.plain.decodes.sizes or self._parts.has_states or items.paths:
            return Choice()
        if self._parts.tables.num_with_extras or feature_data:
            return Choice()
        adapters, family = self._parts.adapters, self.plain
        is_adapted = adapters is not None and adapters.is_used(items)
        if is_adapted:
            family = self.adapted
            if family.adapters is None or not family.adapters.takes(items):
                return Choice()
        if items.drafts is not None:
            choice = Choice() if items.prefills else self._choose_drafted(family, items)
        elif items.prefills:
            count = len(items.decodes.slots) + sum(item.count for item in items.prefills)
            size = family.prompts.size_for(count)
            choice = Choice(self._prompt_rows(size), 1, size) if size else Choice()
        else:
            choice = Choice(family.decodes.size_for(len(items)))
        return choice._replace(is_adapted=is_adapted)

    def _choose_drafted(self, family: GraphFamily, items: Items) -> Choice:
        assert items.drafts is not None
        lens, decodes = items.drafts.lens, items.decodes
        width = min((w for w in family.drafts if w > lens.max()), default=0)
        is_even = bool((lens == width - 1).all())
        # void tokens are drawn too, which only plain sampling takes
        is_plain = not decodes.logprobs and self._parts.params.kinds(decodes.slots).all_plain
        if not width or not (is_even or is_plain):
            return Choice()
        if items.starts.max() + width > self.max_kv_len:
            return Choice()
        return Choice(family.drafts[width].size_for(len(items)), width)

    def fill_adapters(self, items: Items, choice: Choice) -> None:
        """Launch what a step with adapters needs besides its graph."""
        assert self.adapted.adapters is not None
        self.adapted.adapters.fill(items, choice.width)

    @torch.inference_mode()
    def replay(self, step: StepHandle, choice: Choice) -> None:
        """Launch the step's graph; sets its logits, and what a drafter reads."""
        builder = step.inputs.builder
        family = self.adapted if choice.is_adapted else self.plain
        builder.update_tables(step.shape)
        logits_RV = family.of(choice).replay(choice.num_tokens or choice.rows)
        step.logits_RV = logits_RV[: step.shape.num_rows]
        step.drafts = builder.draft_rows(step.shape)
        step.batch = family.batches.get((choice.rows, choice.width))
