"""FurtherTokens: steps whose rows decode several tokens in turn, by models that can sample.

Legend: N sequences, P places of each, W words of token masks, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from radixlm.executor import step_layout as layout
from radixlm.executor.interfaces import Model
from radixlm.executor.results import StepHandle
from radixlm.executor.runner import Runner
from radixlm.models.continuation import Continuation
from radixlm.step.batch import ForwardBatch
from radixlm.step.masks import Follow
from radixlm.step.plan import Int32Array


@runtime_checkable
class ContinuingModel(Model, Protocol):
    """A model that can sample by itself, and go on with what it has sampled."""

    def go_on(
        self, batch: ForwardBatch, logits_RV: Tensor, how: Continuation
    ) -> tuple[Tensor, Tensor] | None:
        """The tokens that follow a step and which rows are bad, [P, S]; None if it cannot."""


class FurtherTokens:
    """Of one runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner, model = runner, runner.model
        self._model = model if isinstance(model, ContinuingModel) else None

    @torch.inference_mode()
    def sample(
        self, step: StepHandle, more_N: Int32Array, mask_RW: Tensor | None, follow: Follow | None
    ) -> None:
        """Sample a token of each row, and go on with those that may have more if the model can."""
        runner, shape, found = self._runner, step.shape, None
        counts_N = more_N + 1
        if shape.kinds.all_plain and (mask_RW is None or follow is not None):
            found = self._go_on(step, counts_N, mask_RW, follow)
        if found is None:
            runner.sample_any(step, mask_RW, False)
            counts_N = np.ones_like(counts_N)
        else:
            tokens_PS, is_bad_PS = found
            counts_N = np.minimum(counts_N, len(tokens_PS))
            last_S = torch.from_numpy(counts_N - 1).long()
            last_tokens_S = tokens_PS[last_S, torch.arange(len(last_S))]
            runner.tables.next_token[torch.from_numpy(shape.slots_R)] = last_tokens_S
            is_kept_SP = torch.from_numpy(np.arange(len(tokens_PS)) < counts_N[:, None])
            runner.set_result(step, tokens_PS.T[is_kept_SP], is_bad_PS.T[is_kept_SP])
        shape.slots_R = np.repeat(shape.slots_R, counts_N)
        shape.first_A1, shape.num_decodes = np.append(0, np.cumsum(counts_N)), len(counts_N)
        assert step.sampled_N is not None
        step.sampled_N = torch.cat((step.sampled_N, torch.from_numpy(counts_N)))

    def _go_on(
        self,
        step: StepHandle,
        counts_N: Int32Array,
        mask_RW: Tensor | None,
        follow: Follow | None,
    ) -> tuple[Tensor, Tensor] | None:
        """The tokens that follow and which rows are bad, [P, N]; None where the model cannot go on
        by itself."""
        slots_N = step.shape.slots_R
        runner, model = self._runner, self._model
        asked = runner.choices is not None and runner.choices.are_wanted(step.items)
        if asked or model is None:
            return None
        assert step.batch is not None and step.logits_RV is not None
        positions_PN = step.items.starts + 1 + np.arange(counts_N.max())[:, None]
        rows, told = runner.sampler.plain_rows(slots_N, positions_PN), None
        if follow is not None:
            shape = len(slots_N), -(-step.logits_RV.shape[1] // 32)
            masks_NW = np.full(shape, -1, np.int32) if mask_RW is None else mask_RW.numpy()
            masked = np.array(follow.rows)
            rows["mask"][:, masked] = masks_NW.ctypes.data + masked * masks_NW.strides[0]
            told = lambda tokens_N: follow(tokens_N.tolist(), masks_NW)  # noqa: E731
        stores = self._stores(step, counts_N)
        how = Continuation(counts_N, rows, stores, runner.options.eos_ids, told)
        return model.go_on(step.batch, step.logits_RV, how)

    def _stores(self, step: StepHandle, counts_N: Int32Array) -> tuple[Int32Array, ...]:
        """Where the sequences store the tokens behind the first, of ``counts_N`` in all: int32
        [P - 1, N] for each group, 0 behind their last."""
        tables, options, buffer = self._runner.tables, self._runner.options, step.inputs.buffer
        count, size = len(counts_N), options.page_size
        slots_N = buffer.field(layout.SLOT, count).long()
        ahead_P1 = torch.arange(1, int(counts_N.max()))[:, None]
        positions_PN = buffer.field(layout.START, count).long() + ahead_P1
        is_void_PN = ahead_P1 >= torch.from_numpy(counts_N)
        positions_PN.masked_fill_(is_void_PN, 0)
        slots_PN = slots_N.expand_as(positions_PN)
        found = []
        for table in tables.device_pages:
            store_PN = table[slots_PN, positions_PN // size] * size + positions_PN % size
            found.append(store_PN.masked_fill_(is_void_PN, 0).int().numpy())
        return tuple(found[space] for space in options.space_of_group)
