"""Sampling of plain rows on the device, without waiting for it: all parameters come with the step's
inputs, as rows of int32. Rows with penalties, biases, logit processors or log-probabilities go to
the ``Sampler``, which samples the same tokens.

Legend: R rows, V vocabulary, W mask words (32 tokens each), P parameters of a row, S slots.
"""

from importlib.util import find_spec
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.lazy import load
from radixlm.base.record import Record
from radixlm.sampling.noise import draw_keys, gumbel_noise
from radixlm.sampling.sampler import threshold, unpack_mask
from radixlm.sampling.table import MIN_P, TEMPERATURE, SlotState

# the parameters of a row: floats as their bits (columns of ``table.py``), then these
TOP_K, SEED_LOW, SEED_HIGH, IS_GREEDY = range(3, 7)
NUM_PARAMS = 7
_NO = float("-inf")


class SamplingKinds(Record):
    """Which parts of sampling some row of the batch needs, as the host knows it. ``all_plain``: no
    row has penalties, biases or a logit processor."""

    all_plain: bool
    all_greedy: bool
    any_filtered: bool


class SamplingParamTable:
    """Sampling parameters by slot on the host, as int32 [P, S], and their kinds. The slot behind
    the last is greedy."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.params_PS: NDArray[np.int32] = np.zeros((NUM_PARAMS, num_slots + 1), np.int32)
        self.is_plain_S = np.ones(num_slots + 1, np.bool_)
        self.is_greedy_S = np.ones(num_slots + 1, np.bool_)
        self.is_filtered_S = np.zeros(num_slots + 1, np.bool_)
        greedy = SlotState(True, False, 1.0, vocab_size, 1.0, 0.0, 0)
        self.set(num_slots, greedy, False)

    def set(self, slot: int, state: SlotState, has_penalties: bool) -> None:
        """Set a slot's parameters."""
        floats = np.array(state.floats, np.float32)
        seed = np.array([state.seed], np.int64).view(np.int32)
        numbers = [state.top_k, int(seed[0]), int(seed[1]), int(state.is_greedy)]
        self.params_PS[:, slot] = [*floats.view(np.int32).tolist(), *numbers]
        self.is_plain_S[slot] = not (state.changes_logits or has_penalties)
        self.is_greedy_S[slot] = state.is_greedy
        self.is_filtered_S[slot] = state.is_filtered and not state.is_greedy

    def kinds(self, slots: NDArray[np.int64]) -> SamplingKinds:
        """The kinds of rows with these slots."""
        return SamplingKinds(
            bool(self.is_plain_S[slots].all()),
            bool(self.is_greedy_S[slots].all()),
            bool(self.is_filtered_S[slots].any()),
        )


class FusedSampler(Protocol):
    """Samples tokens, int64 [R], also into ``next_token[slots_R]`` of the token table, and marks
    rows that hold a NaN or allow no token, bool [R]."""

    def __call__(
        self,
        logits_RV: Tensor,
        params_PR: Tensor,
        positions_R: Tensor,
        mask_RW: Tensor | None,
        next_token: Tensor,
        slots_R: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


def fused_sampler(where: torch.device) -> FusedSampler | None:
    """The kernels that sample in two launches; None without Triton or a GPU."""
    if where.type != "cuda" or find_spec("triton") is None:
        return None
    return cast(FusedSampler, load("radixlm.kernels.triton.sample:draw"))


def sample_plain(
    logits_RV: Tensor,
    params_PR: Tensor,
    positions_R: Tensor,
    kinds: SamplingKinds,
    mask_RW: Tensor | None = None,
) -> Tensor:
    """int64 [R]. ``logits_RV`` float32, overwritten where there is a mask (as the sampler's).
    positions_R: int32, of the tokens in their sequences."""
    if mask_RW is not None:
        logits_RV.masked_fill_(~unpack_mask(mask_RW)[:, : logits_RV.shape[1]], _NO)
    best_R = logits_RV.argmax(dim=-1)
    if kinds.all_greedy:
        return best_R
    floats_R3 = params_PR[:TOP_K].view(torch.float32).T
    scaled_RV = logits_RV / floats_R3[:, TEMPERATURE, None]
    if kinds.any_filtered:
        probs_RV = torch.softmax(scaled_RV, dim=-1)
        lowest_R = threshold(probs_RV, floats_R3, params_PR[TOP_K])
        is_out_RV = probs_RV < lowest_R[:, None]
    else:
        lowest_R = scaled_RV.amax(dim=-1) + floats_R3[:, MIN_P].log()
        is_out_RV = scaled_RV < lowest_R[:, None]
    keys_R = draw_keys(_seeds(params_PR), positions_R.long())
    ids_1V = torch.arange(logits_RV.shape[1], dtype=torch.int32, device=logits_RV.device)[None]
    scores_RV = gumbel_noise(keys_R, ids_1V).add_(scaled_RV).masked_fill_(is_out_RV, _NO)
    is_greedy_R = params_PR[IS_GREEDY].bool()
    return torch.where(is_greedy_R, best_R, scores_RV.argmax(dim=-1))


def _seeds(params_PR: Tensor) -> Tensor:
    low, high = params_PR[SEED_LOW].long(), params_PR[SEED_HIGH].long()
    return (high << 32) | (low & 0xFFFFFFFF)
