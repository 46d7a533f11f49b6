"""The draw on a GPU: the steps of ``sampler`` by Triton kernels, without copies to the host.

Two small tables go to the device: each row's parameters, and the addresses of its counts, prompt
tokens and lists.

Legend: R rows, V vocabulary, W mask words, P parameters, A addresses of a row, K tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.sampling.drafts import DraftRows
from radixlm.sampling.logprobs import LogprobRequest, Logprobs
from radixlm.sampling.table import SamplingTable, SlotState

_PACKAGE = "radixlm.kernels.triton"  # imported only here: triton is an optional extra


def load_kernels(device: torch.device) -> SamplerKernels | None:
    """The kernels for a device; None if it is no GPU or triton is not installed."""
    if device.type != "cuda":
        return None
    try:
        return SamplerKernels()
    except ImportError:
        return None


class SamplerKernels:
    """The kernel modules that the sampler uses."""

    def __init__(self) -> None:
        self.sample: Any = importlib.import_module(f"{_PACKAGE}.sample")
        self.penalties: Any = importlib.import_module(f"{_PACKAGE}.penalties")
        self.bitmask: Any = importlib.import_module(f"{_PACKAGE}.bitmask")
        self.logprob: Any = importlib.import_module(f"{_PACKAGE}.logprob")


class DeviceLogprobs(Record):
    """Log-probabilities of R rows on the device. ``chosen_R``; ``top_RN`` values and ids, best
    first, as many as any row requests; ``requested_RK`` padded with token 0."""

    wanted: Sequence[LogprobRequest | None]
    chosen_R: Tensor
    top_RN: tuple[Tensor, Tensor]
    requested_RK: Tensor

    def begin_read(self) -> DeviceLogprobs:
        """The same in pinned host memory. The copies are only launched: call ``read`` after an
        event of the stream."""
        values, ids = (_begin_copy(part) for part in self.top_RN)
        chosen, requested = _begin_copy(self.chosen_R), _begin_copy(self.requested_RK)
        return DeviceLogprobs(self.wanted, chosen, (values, ids), requested)

    def read(self) -> Logprobs:
        """Copy them to the host; waits for the device."""
        chosen, requested = self.chosen_R.tolist(), self.requested_RK.tolist()
        values, ids = (part.tolist() for part in self.top_RN)
        found = Logprobs([], [], [])
        for row, request in enumerate(self.wanted):
            top, token_ids = (0, ()) if request is None else (request.top, request.token_ids)
            found.chosen.append(0.0 if request is None else chosen[row])
            found.top.append((values[row][:top], ids[row][:top]))
            found.of_token_ids.append((requested[row][: len(token_ids)], list(token_ids)))
        return found


def _begin_copy(source: Tensor) -> Tensor:
    if source.device.type != "cuda":
        return source
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return host.copy_(source, non_blocking=True)


class GpuSampler:
    """Steps 2 to 9 of the sampler, and log-probabilities, for the slots of a table."""

    def __init__(self, table: SamplingTable, kernels: SamplerKernels) -> None:
        self._table, self._kernels = table, kernels
        self.takes = kernels.sample.takes  # whether it supports these logits

    def draw(
        self,
        logits_RV: Tensor,
        slots: Sequence[int],
        positions_R: Tensor,
        mask_RW: Tensor | None,
        drafts: DraftRows | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens int64 [R] and bool [R] (the row cannot be drawn from), and what ``record`` needs,
        on the device. ``logits_RV`` float32 is changed in place."""
        states = [self._table.state(slot) for slot in slots]
        positions_R = positions_R.int()
        rows_RA = self._rows(states, slots, drafts)
        if mask_RW is not None:
            mask_RW = mask_RW.to(logits_RV.device, torch.int32, non_blocking=True).contiguous()
        if rows_RA is not None:
            self._kernels.penalties.process_(logits_RV, rows_RA, positions_R, mask_RW)
            mask_RW = None
        params_PR = self._put(_params(states))
        drawn: tuple[Tensor, Tensor] = self._kernels.sample.draw(
            logits_RV, params_PR, positions_R, mask_RW
        )
        return (*drawn, rows_RA)

    def record(self, rows_RA: Tensor | None, tokens_R: Tensor, kept_R: Tensor | None) -> None:
        """Count the tokens for the penalties; with ``kept_R`` only those."""
        if rows_RA is not None:
            tokens_R = tokens_R if kept_R is None else torch.where(kept_R, tokens_R, -1)
            self._kernels.penalties.record(rows_RA, tokens_R)

    def logprobs(
        self, logits_RV: Tensor, tokens_R: Tensor, wanted: Sequence[LogprobRequest | None]
    ) -> DeviceLogprobs:
        """The requested log-probabilities; the logits are not changed."""
        requests = [request or LogprobRequest() for request in wanted]
        num_top = min(max(request.top for request in requests), logits_RV.shape[1])
        num_requested = max(len(request.token_ids) for request in requests)
        requested_RK = np.zeros((len(requests), num_requested), np.int64)
        for row, request in enumerate(requests):
            requested_RK[row, : len(request.token_ids)] = request.token_ids
        top_RN = _most_likely(logits_RV, num_top)
        tokens_RK = torch.cat((tokens_R[:, None], top_RN, self._put(requested_RK)), 1)
        found = self._kernels.logprob.logprobs_at(logits_RV, tokens_RK)
        chosen_R1, values_RN, requested = found.split([1, num_top, num_requested], 1)
        return DeviceLogprobs(wanted, chosen_R1[:, 0], (values_RN, top_RN), requested)

    def _rows(
        self, states: Sequence[SlotState], slots: Sequence[int], drafts: DraftRows | None
    ) -> Tensor | None:
        """Addresses of the rows' lists and counts; None if no row has any."""
        penalties = self._table.penalties
        is_plain = not any(state.changes_logits for state in states)
        if is_plain and not any(slot in penalties for slot in slots):
            return None
        rows_RA = np.zeros((len(states), len(self._kernels.penalties.COLUMNS)), np.int64)
        for row, (state, slot) in enumerate(zip(states, slots, strict=True)):
            rows_RA[row, :-2] = _row(state, penalties.rows_of(slot))
        if drafts is not None:
            first_R = drafts.first_A1[drafts.sequence_R]
            rows_RA[:, -2] = drafts.next_R.data_ptr() + 8 * first_R
            rows_RA[:, -1] = drafts.num_before_R
        return self._put(rows_RA)

    def _put(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A small table on the device, copied asynchronously."""
        tensor = torch.from_numpy(array)
        if self._table.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._table.device, non_blocking=True)


def _params(states: Sequence[SlotState]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [P, R], as kernels/triton/sample.py names its rows."""
    floats = np.array([s.floats for s in states], np.float32)
    seeds = np.array([s.seed for s in states], np.int64).view(np.int32).reshape(-1, 2)
    table = np.empty((7, len(states)), np.int32)
    table[:3], table[4:6] = floats.view(np.int32).T, seeds.T
    table[3], table[6] = [s.top_k for s in states], [s.is_greedy for s in states]
    return table


def _row(state: SlotState, penalties: tuple[int, int, int]) -> tuple[int, ...]:
    """The columns of kernels/triton/penalties.py but for those of drafts."""
    bias, suppressed = (0, 0, 0), (0, 0, 0)
    if state.bias_ids is not None and state.bias_values is not None:
        ids = state.bias_ids
        bias = (ids.data_ptr(), state.bias_values.data_ptr(), ids.numel())
    if state.suppressed_ids is not None:
        ids = state.suppressed_ids
        suppressed = (ids.data_ptr(), ids.numel(), state.suppressed_until)
    return (*penalties, *bias, *suppressed)


def _most_likely(logits_RV: Tensor, num: int) -> Tensor:
    """Ids of the ``num`` highest logits, best first; of equal ones the lower id first."""
    if num == 0:
        return torch.empty(logits_RV.shape[0], 0, dtype=torch.int64, device=logits_RV.device)
    values, ids = torch.topk(logits_RV, num, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, by_value)
