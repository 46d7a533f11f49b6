"""GroupedRunner: a rank of data-parallel attention. It attends to the requests of its group; the
layers behind the attention and the head have the tokens of all groups.

Legend: T tokens of the step, R rows with logits, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import replace
from radixlm.distributed.attention_groups import AttentionGroups
from radixlm.distributed.record import StepTokens
from radixlm.executor.results import StepHandle
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts, StateRows
from radixlm.executor.step_layout import token_counts
from radixlm.kernels.ops.lora import LoraRows
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import EMPTY_DECODES, DecodeBatch, Drafts, Items, PageCopy, StepPlan

if TYPE_CHECKING:
    from radixlm.models.decoder import DecoderModel
    from radixlm.models.transformers_backend.model import TransformersModel

    GroupedLayers: TypeAlias = DecoderModel | TransformersModel


class _Order:
    """Where the rows of a step lie when the groups' rows follow each other. ``counts``: of each
    group; ``places``: of each row of the step."""

    def __init__(self, groups_N: NDArray[np.int64], rows_N: NDArray[np.int32], num: int) -> None:
        groups = np.repeat(groups_N, rows_N)
        self.counts = tuple(np.bincount(groups, minlength=num).tolist())
        self._sorted = np.argsort(groups, kind="stable")
        self.places = torch.from_numpy(np.argsort(self._sorted))

    def of_group(self, group: int) -> Tensor:
        """The rows of a group in the step, int64; -1 of the row that runs where it has none."""
        first = sum(self.counts[:group])
        rows = self._sorted[first : first + self.counts[group]]
        return torch.from_numpy(rows if len(rows) else np.full(1, -1))

    @property
    def padded(self) -> Tensor:
        """The rows of all groups, one after another, as they run."""
        return torch.cat([self.of_group(group) for group in range(len(self.counts))])

    @property
    def run_as(self) -> Tensor:
        """Which of the rows that run each row of the step is, int64."""
        padded = self.padded
        return padded.argsort(stable=True)[len(padded) - len(self.places) :]


class GroupedModel:
    """Runs the layers on the tokens of one group, and the head on the rows of all."""

    def __init__(self, model: GroupedLayers, groups: AttentionGroups, vocab: int) -> None:
        self._model, self._groups, self.vocab = model, groups, vocab
        self.tokens = self.rows = _Order(np.zeros(0, np.int64), np.zeros(0, np.int32), 1)
        self.rows_of_tokens = self.rows.places  # of the step
        self.lora: LoraRows | None = None  # of the step's tokens
        self.taps_TN: Tensor | None = None  # what the last step left for a drafter, of all groups

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states and logits of all groups, in the order of the step; of several stages only
        the last has them. A group without tokens has run one that nobody reads."""
        groups, rows, stages = self._groups, self.rows, self._model.pipeline
        needs = self._model.taps
        if stages is not None:
            stages.count_step()
        batch.leaves_taps = needs is not None  # the other ranks do not know whether drafts rest
        x_TD = self._model.forward(batch)
        logits_RV = hidden_TD = self.taps_TN = None
        if stages is not None and not stages.is_last:
            return None, None
        if needs is not None:
            parts = [part for part in (batch.taps_TN, x_TD if needs.final else None)
                     if part is not None]  # fmt: skip
            self.taps_TN = self._of_all(torch.cat(parts, -1))
        if len(rows.places):
            own_RD = x_TD[batch.logits_rows_R][: rows.counts[groups.group]]
            logits_RV = self._logits(own_RD)
        if need_hidden:
            hidden_TD = self._of_all(x_TD)
        if stages is not None:
            stages.give_results(logits_RV, hidden_TD, self.taps_TN)
        return hidden_TD, logits_RV

    def _of_all(self, x_TD: Tensor) -> Tensor:
        """The rows of the tokens of all groups, in the order of the step."""
        groups, tokens = self._groups, self.tokens
        return groups.gather(x_TD[: tokens.counts[groups.group]], tokens.counts)[tokens.places]

    def _logits(self, own_RD: Tensor) -> Tensor:
        """Of the rows of all groups; ``own`` are this group's."""
        groups, rows = self._groups, self.rows
        lora = None if self.lora is None else self.lora.select(self.rows_of_tokens)
        if not groups.splits_head:
            return self._model.stage_logits(groups.gather(own_RD, rows.counts)[rows.places], lora)
        lora = None if lora is None else lora.select(rows.of_group(groups.group))
        # a group without rows brings none
        own_RV = own_RD.new_empty(0, self.vocab)
        own_RV = self._model.stage_logits(own_RD, lora) if len(own_RD) else own_RV
        logits_RV = groups.collect(own_RV.float(), rows.counts)
        return logits_RV[rows.places] if len(logits_RV) else logits_RV

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        return self._model.logits(hidden_RD, lora)


class GroupedRunner(Runner):
    """Group g has the slots [g * n, g * n + n) of ``slots_per_group`` n."""

    def __init__(
        self,
        parts: RunnerParts,
        options: RunnerOptions,
        model: GroupedLayers,
        groups: AttentionGroups,
        slots_per_group: int,
    ) -> None:
        super().__init__(parts, options)
        self.model = self._grouped = GroupedModel(model, groups, self.sampling.vocab_size)
        self._groups, self._per_group = groups, slots_per_group
        max_rows = (self.tables.num_slots + options.max_paths) * (1 + options.max_drafts)
        self._own_inputs = self._make_inputs(max_rows)
        dummy = DecodeBatch(("",), np.array([self.tables.dummy]))
        self._idle = Items(dummy, np.zeros(1, np.int64))
        self._own_decodes = (EMPTY_DECODES, EMPTY_DECODES)  # the step's last, and ours of them
        self._whole: StepHandle  # the step that runs, of all groups
        # adapters of a step's tokens: in its order, of this group's, of all groups' one by one
        self._lora: tuple[LoraRows | None, ...] = (None, None, None)

    def _run(self, step: StepHandle, need_hidden: bool, states: StateRows | None) -> None:
        """Run the layers on this group's items; the results are those of all."""
        own = self._own_items(step.items)
        items = own if len(own) else self._idle
        self._set_order(step.items)
        lora = self._own_adapters(step.lora)
        plan = replace(step.plan, items=own)
        shape = self._own_inputs.fill(lambda packer, host: packer.pack(items, host))
        mine = StepHandle(plan, items, shape, self._own_inputs, lora)
        self._whole = step
        if self.choices is not None:
            self.choices.rows_T = self._grouped.tokens.run_as
        super()._run(mine, need_hidden, super()._state_rows(replace(plan, items=items)))
        if self.states is not None and not len(own):
            self.states.zero_null_page()
        step.hidden_TD, step.logits_RV, step.failed = mine.hidden_TD, mine.logits_RV, mine.failed
        if not step.shape.is_decode:
            step.drafts = step.inputs.builder.draft_rows(step.shape)
        if self.end is not None and step.plan.draft_lens is not None:
            step.batch = self._batch_of_all(step)
        self._find_failures(step)

    def _whole_of(self, step: StepHandle) -> StepHandle:
        return self._whole

    def _tokens_of(self, step: StepHandle, batch: ForwardBatch) -> StepTokens:
        """Those of all groups, which rank 0 knows."""
        return super()._tokens_of(self._whole, self._batch_of_all(self._whole))

    def _batch_of_all(self, step: StepHandle) -> ForwardBatch:
        """The step as rank 0's drafter and recorder read it."""
        builder, shape = step.inputs.builder, step.shape
        if shape.is_decode:
            batch = builder.decodes(shape.num_sequences, shape.max_kv_len)
        else:
            batch = builder.mixed(shape)
        batch.taps_TN = self._grouped.taps_TN
        return batch

    def _state_rows(self, plan: StepPlan) -> None:
        """Those of a group's own items are asked for when they are known."""

    def _copy_own_pages(self, copies: Sequence[PageCopy]) -> None:
        super()._copy_own_pages([copy for copy in copies if self._is_own(copy.slot)])

    def _is_own(self, slot: int) -> bool:
        return slot // self._per_group == self._groups.group

    def _own_items(self, items: Items) -> Items:
        decodes, drafts = items.decodes, items.drafts
        is_own = decodes.slots // self._per_group == self._groups.group
        index = np.flatnonzero(is_own)
        if self._own_decodes[0] is not decodes:
            place = {old: new for new, old in enumerate(index.tolist())}
            hidden = frozenset(place[i] for i in decodes.hidden if i in place)
            slots = decodes.slots[index]
            self._own_decodes = (decodes, DecodeBatch(("",) * len(slots), slots, {}, hidden))
        if drafts is not None:
            own = drafts.tokens
            if own is not None:
                own = own[np.repeat(is_own, drafts.lens)]
            paths = tuple(path for path in drafts.paths if self._is_own(path.slot))
            drafts = Drafts(drafts.lens[index], own, paths=paths) if len(index) else None
        prefills = tuple(item for item in items.prefills if self._is_own(item.slot))
        return Items(self._own_decodes[1], items.starts[index], prefills, drafts)

    def _set_order(self, items: Items) -> None:
        """Tell the model and its layers which rows come from which group."""
        others, num = items.others, self._groups.num_groups
        slots = np.append(items.decodes.slots, [item.slot for item in others]).astype(np.int64)
        counts, rows = token_counts(items)
        groups = slots // self._per_group
        self._grouped.tokens = tokens = _Order(groups, counts, num)
        self._grouped.rows = _Order(groups, rows, num)
        # the last tokens of each item
        ends, before = counts.cumsum() - rows.cumsum(), np.repeat(np.arange(len(rows)), rows)
        self._grouped.rows_of_tokens = torch.from_numpy(ends[before] + np.arange(rows.sum()))
        self._groups.counts = [max(1, count) for count in tokens.counts]

    def _own_adapters(self, lora: LoraRows | None) -> LoraRows | None:
        """Of this group's tokens; the layers and the head are told those of all."""
        if lora is not self._lora[0]:
            order, own = self._grouped.tokens, self._groups.group
            mine, whole = (None if lora is None else lora.select(rows_T)
                           for rows_T in (order.of_group(own), order.padded))  # fmt: skip
            self._lora = (lora, mine, whole)
        self._groups.lora, self._grouped.lora = self._lora[2], lora
        return self._lora[1]

    def _find_failures(self, step: StepHandle) -> None:
        """Media that the other groups' encoders cannot read, which is the same here."""
        encoder = self.media
        for item in step.items.prefills if encoder is not None else ():
            if self._is_own(item.slot) or item.tokens is None:
                continue
            for media in self.tables.state(item.slot).media:
                assert encoder is not None
                encoder.check(media, item.rid, step.failed)
