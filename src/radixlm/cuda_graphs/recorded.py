"""RecordedSteps: a runner's CUDA graphs, and which of them runs a step.

Legend: R rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from radixlm.cuda_graphs.graph_inputs import (
    Packed,
    dummy_decodes,
    dummy_prompt,
    pack_decodes,
    pack_drafted,
    pack_mixed,
)
from radixlm.cuda_graphs.graphs import StepGraphs, prompt_rows
from radixlm.cuda_graphs.recorded_adapters import RecordedAdapters
from radixlm.devices.device import Device
from radixlm.executor.batch_builder import BatchBuilder
from radixlm.executor.interfaces import GraphChoice, Graphs
from radixlm.executor.results import StepHandle
from radixlm.executor.runner import Runner
from radixlm.executor.step_inputs import StepInputs
from radixlm.executor.step_layout import StepPacker
from radixlm.lora.table import AdapterTable
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Items


class GraphFamily:
    """Graphs of decode steps by batch size, of those with drafts also by tokens of a row, and of
    small steps with parts of prompts by number of tokens. ``adapters``: which they run."""

    def __init__(self, device: Device, adapters: RecordedAdapters | None = None) -> None:
        self.decodes, self.prompts = StepGraphs(device, ()), StepGraphs(device, ())
        self.drafts: dict[int, StepGraphs] = {}  # by tokens of a row
        self.batches: dict[tuple[int, int], ForwardBatch] = {}  # by rows and tokens of each
        self.adapters = adapters

    def of(self, choice: GraphChoice) -> StepGraphs:
        """The graphs of a kind of steps."""
        if choice.num_tokens:
            return self.prompts
        return self.decodes if choice.width == 1 else self.drafts[choice.width]


class RecordedSteps(Graphs):
    """Graphs of a runner's steps without adapters, and others of steps with adapters."""

    def __init__(self, runner: Runner) -> None:
        self._model, self._attn, self._tables = runner.model, runner.attn, runner.tables
        self._inputs, self._draft_inputs = runner.inputs, runner.draft_inputs
        self._params, self._max_kv_len = runner.params, runner.max_kv_len
        self._has_end, self._has_states = runner.end is not None, runner.states is not None
        self._device, adapters = runner.device, runner.adapters
        self._adapters = adapters if isinstance(adapters, AdapterTable) else None
        self.plain, self.adapted = GraphFamily(self._device), GraphFamily(self._device)

    def add_adapters(self, max_tokens: int) -> bool:
        """Get ready to record steps with adapters, of at most ``max_tokens``; whether the kernels
        can."""
        table = self._adapters
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
        inputs = self._inputs if width == 1 else self._draft_inputs
        assert inputs is not None, "graphs of drafts in a runner of max_drafts 0"
        self._fill(inputs, partial(dummy_decodes, graphs.largest))
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
            batch = builder.decodes(size, self._max_kv_len)
        else:
            batch = builder.drafted(size, width, self._max_kv_len)
        if self._has_end:
            family.batches[size, width] = batch
        return self._logits(family, batch)

    def _prompt_logits(self, family: GraphFamily, num_tokens: int) -> Tensor:
        """What a graph computes: the logits of the last token of each sequence that emits."""
        rows, builder = self._prompt_rows(num_tokens), self._inputs.builder
        return self._logits(family, builder.filled(rows, num_tokens, self._max_kv_len))

    def _logits(self, family: GraphFamily, batch: ForwardBatch) -> Tensor:
        if family.adapters is not None:
            batch.lora = family.adapters.rows(batch.num_tokens)
        self._attn.begin(batch)
        logits_RV = self._model.step(batch, False)[1]
        assert logits_RV is not None
        return logits_RV

    def _prompt_rows(self, num_tokens: int) -> int:
        return prompt_rows(num_tokens, self._tables.num_slots)

    def _fill_prompt(self, num_tokens: int) -> None:
        rows = self._prompt_rows(num_tokens)
        self._fill(self._inputs, partial(dummy_prompt, rows, num_tokens))

    def _fill(self, inputs: StepInputs, pack: Callable[[StepPacker, Tensor], Packed]) -> None:
        """Copy a step of the dummy slot, and wait for it."""
        inputs.fill(pack)
        self._device.record().wait()

    # ---- a step ----------------------------------------------------------------------------

    def choose(
        self, items: Items, feature_data: Mapping[str, Any], need_hidden: bool
    ) -> GraphChoice:
        """The graph that runs a step."""
        if need_hidden or not self.plain.decodes.sizes or self._has_states or items.paths:
            return GraphChoice()
        if self._tables.num_with_extras or feature_data:
            return GraphChoice()
        adapters, family = self._adapters, self.plain
        is_adapted = adapters is not None and adapters.is_used(items)
        if is_adapted:
            family = self.adapted
            if family.adapters is None or not family.adapters.takes(items):
                return GraphChoice()
        if items.drafts is not None:
            choice = GraphChoice() if items.prefills else self._choose_drafted(family, items)
        elif items.prefills:
            count = len(items.decodes.slots) + sum(item.count for item in items.prefills)
            size = family.prompts.size_for(count)
            choice = GraphChoice(self._prompt_rows(size), 1, size) if size else GraphChoice()
        else:
            choice = GraphChoice(family.decodes.size_for(len(items)))
        return choice._replace(is_adapted=is_adapted)

    def _choose_drafted(self, family: GraphFamily, items: Items) -> GraphChoice:
        assert items.drafts is not None
        lens, decodes = items.drafts.lens, items.decodes
        width = min((w for w in family.drafts if w > lens.max()), default=0)
        is_even = bool((lens == width - 1).all())
        # void tokens are drawn too, which only plain sampling takes
        is_plain = not decodes.logprobs and self._params.kinds(decodes.slots).all_plain
        if not width or not (is_even or is_plain):
            return GraphChoice()
        if items.starts.max() + width > self._max_kv_len:
            return GraphChoice()
        return GraphChoice(family.drafts[width].size_for(len(items)), width)

    def pack(self, items: Items, choice: GraphChoice, packer: StepPacker, host: Tensor) -> Packed:
        """Write the inputs of a step as its graph takes them."""
        if choice.num_tokens:
            return pack_mixed(items, choice.rows, choice.num_tokens, packer, host)
        if not choice.rows:
            return packer.pack(items, host)
        if items.drafts is not None:
            return pack_drafted(items, choice.rows, choice.width, packer, host)
        return pack_decodes(items, choice.rows, packer, host)

    def fill_adapters(self, items: Items, choice: GraphChoice) -> None:
        """Launch what a step with adapters needs besides its graph."""
        assert self.adapted.adapters is not None
        self.adapted.adapters.fill(items, choice.width)

    @torch.inference_mode()
    def replay(self, step: StepHandle, choice: GraphChoice) -> None:
        """Launch the step's graph; sets its logits, and what a drafter reads."""
        builder = step.inputs.builder
        family = self.adapted if choice.is_adapted else self.plain
        builder.update_tables(step.shape)
        logits_RV = family.of(choice).replay(choice.num_tokens or choice.rows)
        step.logits_RV = logits_RV[: step.shape.num_rows]
        step.drafts = builder.draft_rows(step.shape)
        step.batch = family.batches.get((choice.rows, choice.width))
