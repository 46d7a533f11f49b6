"""Sampling of plain rows on the device, without waiting for it: all parameters come with the step's
inputs. Rows with penalties, biases, logit processors or log-probabilities go to the ``Sampler``,
which samples the same tokens.

Legend: R rows, V vocabulary, W mask words (32 tokens each).
"""

from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from radixlm.base.lazy import load
from radixlm.executor import step_layout as layout
from radixlm.executor.step_layout import DeviceStepBuffer, SamplingKinds
from radixlm.sampling.noise import draw_keys, gumbel_noise
from radixlm.sampling.sampler import threshold, unpack_mask
from radixlm.sampling.table import MIN_P, TEMPERATURE

_NO = float("-inf")


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
    buffer: DeviceStepBuffer,
    kinds: SamplingKinds,
    mask_RW: Tensor | None = None,
) -> Tensor:
    """int64 [R]. ``logits_RV`` float32, overwritten where there is a mask (as the sampler's)."""
    rows = logits_RV.shape[0]
    if mask_RW is not None:
        logits_RV.masked_fill_(~unpack_mask(mask_RW)[:, : logits_RV.shape[1]], _NO)
    best_R = logits_RV.argmax(dim=-1)
    if kinds.all_greedy:
        return best_R
    floats_R3 = buffer.head_FN[layout.TEMPERATURE : layout.TOP_K, :rows].view(torch.float32).T
    scaled_RV = logits_RV / floats_R3[:, TEMPERATURE, None]
    if kinds.any_filtered:
        probs_RV = torch.softmax(scaled_RV, dim=-1)
        lowest_R = threshold(probs_RV, floats_R3, buffer.field(layout.TOP_K, rows))
        is_out_RV = probs_RV < lowest_R[:, None]
    else:
        lowest_R = scaled_RV.amax(dim=-1) + floats_R3[:, MIN_P].log()
        is_out_RV = scaled_RV < lowest_R[:, None]
    keys_R = draw_keys(_seeds(buffer, rows), buffer.field(layout.POSITION, rows).long())
    ids_1V = torch.arange(logits_RV.shape[1], dtype=torch.int32, device=logits_RV.device)[None]
    scores_RV = gumbel_noise(keys_R, ids_1V).add_(scaled_RV).masked_fill_(is_out_RV, _NO)
    is_greedy_R = buffer.field(layout.IS_GREEDY, rows).bool()
    return torch.where(is_greedy_R, best_R, scores_RV.argmax(dim=-1))


def _seeds(buffer: DeviceStepBuffer, rows: int) -> Tensor:
    low, high = (buffer.field(field, rows).long() for field in (layout.SEED_LOW, layout.SEED_HIGH))
    return (high << 32) | (low & 0xFFFFFFFF)
