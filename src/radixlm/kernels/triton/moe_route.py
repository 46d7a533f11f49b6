"""The router of a mixture of experts in one kernel: scores, choice of groups, top-k, weights.

Legend: T tokens, E experts, K chosen ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.kernels.ops import moe as reference
from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import FLOATS, runs_on

SCORES = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2, "sigmoid_topk": 3}
SOFTMAX, SIGMOID, SOFTMAX_TOPK, SIGMOID_TOPK = (tl.constexpr(code) for code in SCORES.values())
MAX_EXPERTS = 1024
_TILE = 512  # scores that a program takes at least


@triton.jit
def _without_weak_groups(
    pick, expert, group_size,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, KEPT: tl.constexpr,
    BY_TOP2: tl.constexpr,
):  # fmt: skip
    """``pick`` where the expert's group is among the ``KEPT`` best ones, else -inf."""
    lowest = float("-inf")
    group = tl.arange(0, BLOCK_G)[None, :]
    rating = tl.full((ROWS, BLOCK_G), lowest, tl.float32)
    for g in range(GROUPS):
        own = tl.where(expert // group_size == g, pick, lowest)
        best, at = tl.max(own, 1, return_indices=True)
        if BY_TOP2:
            best += tl.max(tl.where(expert == at[:, None], lowest, own), 1)
        rating = tl.where(group == g, best[:, None], rating)
    is_kept = pick != pick
    for _ in range(KEPT):
        chosen = tl.argmax(rating, 1)[:, None]
        is_kept = is_kept | (expert // group_size == chosen)
        rating = tl.where(group == chosen, lowest, rating)
    return tl.where(is_kept, pick, lowest)


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr, correction_ptr, weights_ptr, ids_ptr, num_tokens, num_experts, stride, group_size,
    scale,
    SCORE: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    KEPT: tl.constexpr, BY_TOP2: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    RENORM: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program routes a few tokens; of equal scores the first expert is taken."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)[None, :]
    is_expert = expert < num_experts
    at = logits_ptr + row[:, None].to(tl.int64) * stride + expert
    mask = (row[:, None] < num_tokens) & is_expert
    score = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    lowest = float("-inf")
    if SCORE == SOFTMAX:
        score = tl.where(is_expert, score, lowest)
        score = tl.exp(score - tl.max(score, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    elif SCORE == SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    pick = score
    if HAS_CORRECTION:
        pick += tl.load(correction_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    pick = tl.where(is_expert, pick, lowest)
    if GROUPS > 1:
        pick = _without_weak_groups(pick, expert, group_size, ROWS, GROUPS, BLOCK_G, KEPT, BY_TOP2)
    rank = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros((ROWS, BLOCK_K), tl.int32)
    weights = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for k in range(TOP_K):
        # A score that is no number must not lead outside the experts.
        chosen = tl.minimum(tl.argmax(pick, 1), num_experts - 1)[:, None]
        weight = tl.sum(tl.where(expert == chosen, score, 0.0), 1)[:, None]
        ids = tl.where(rank == k, chosen, ids)
        weights = tl.where(rank == k, weight, weights)
        pick = tl.where(expert == chosen, lowest, pick)
    is_rank = rank < TOP_K
    if SCORE == SOFTMAX_TOPK:
        weights = tl.where(is_rank, weights, lowest)
        weights = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    elif SCORE == SIGMOID_TOPK:
        weights = tl.where(is_rank, 1.0 / (1.0 + tl.exp(-weights)), 0.0)
    if RENORM:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    out = row[:, None] * TOP_K + rank
    mask = (row[:, None] < num_tokens) & is_rank
    tl.store(weights_ptr + out, weights * scale, mask=mask)
    tl.store(ids_ptr + out, ids.to(ids_ptr.dtype.element_ty), mask=mask)


def _tile(num_experts: int) -> tuple[int, int, int]:
    """Rows and experts of a program, and its warps."""
    block = max(16, next_power_of_2(num_experts))
    return max(1, _TILE // block), block, 4 if block > 256 else 2


def _constants(spec: Moe, num_experts: int, has_correction: bool) -> dict[str, object]:
    rows, block, _ = _tile(num_experts)
    groups, kept = spec.groups
    return {
        "SCORE": SCORES[spec.score],
        "HAS_CORRECTION": has_correction,
        "GROUPS": groups,
        "BLOCK_G": max(2, next_power_of_2(groups)),
        "KEPT": kept,
        "BY_TOP2": spec.group_score == "top2",
        "TOP_K": spec.top_k,
        "BLOCK_K": max(2, next_power_of_2(spec.top_k)),
        "RENORM": spec.renorm,
        "ROWS": rows,
        "BLOCK_E": block,
    }


def takes(logits_TE: Tensor, spec: Moe) -> bool:
    """Whether the kernel knows this router."""
    return (
        runs_on(logits_TE)
        and spec.score in SCORES
        and logits_TE.dtype in FLOATS
        and logits_TE.stride(1) == 1
        and logits_TE.shape[1] <= MAX_EXPERTS
        and logits_TE.shape[1] % spec.groups[0] == 0
    )


def route(logits_TE: Tensor, correction_E: Tensor | None, spec: Moe) -> tuple[Tensor, Tensor]:
    """See kernels/ops/moe.py; without a wait for the device."""
    if not takes(logits_TE, spec):
        return reference.route(logits_TE, correction_E, spec)
    num_tokens, num_experts = logits_TE.shape
    device = logits_TE.device
    weights_TK = torch.empty(num_tokens, spec.top_k, dtype=torch.float32, device=device)
    ids_TK = torch.empty(num_tokens, spec.top_k, dtype=torch.int64, device=device)
    if not num_tokens:
        return weights_TK, ids_TK
    rows, _, num_warps = _tile(num_experts)
    launch(
        route_kernel, (cdiv(num_tokens, rows),),
        (logits_TE, weights_TK if correction_E is None else correction_E, weights_TK, ids_TK),
        (num_tokens, num_experts, logits_TE.stride(0), num_experts // spec.groups[0], spec.scale),
        **_constants(spec, num_experts, correction_E is not None), num_warps=num_warps,
    )  # fmt: skip
    return weights_TK, ids_TK
