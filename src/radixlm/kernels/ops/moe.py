"""Mixture of experts. Legend: T tokens, E experts, K chosen experts, D channels, I inner."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.base.record import Record
from radixlm.kernels.ops import activation
from radixlm.kernels.ops.activation import NO_LIMIT, GateLimit
from radixlm.kernels.ops.linear import Gated, PackedLinear, pack_linear
from radixlm.kernels.ops.lora import LoraRows
from radixlm.kernels.ops.quantized import QuantScales, expert_scales

ExpertScales = tuple[
    QuantScales | None, QuantScales | None
]  # of up and of down, with an axis of experts in front


class PackedExperts(Protocol):
    """All experts of a layer, ready to run."""

    def run(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Sum over the chosen experts of weight * expert(x); [T, D] in the dtype of x. Those that
        adapters may change also take ``lora``, the adapters of the tokens."""


class ExpertAdapters(Record):
    """The adapters of a layer's experts: sites ``site`` (up) and ``site + 1`` (down). ``experts``:
    the number of each, where they are some of many."""

    rows: LoraRows
    site: int
    experts: tuple[int, ...] = ()

    def up(self, expert: int, tokens_M: Tensor, x_MD: Tensor, h_MI: Tensor) -> None:
        """Change what up has made of these tokens' x, before the activation."""
        self.rows.select(tokens_M).add_(self.site, x_MD, h_MI, self._block(expert))

    def down(self, expert: int, tokens_M: Tensor, h_MI: Tensor, y_MD: Tensor) -> None:
        """Change what down has made."""
        self.rows.select(tokens_M).add_(self.site + 1, h_MI, y_MD, self._block(expert))

    def _block(self, expert: int) -> int:
        return self.experts[expert] if self.experts else expert


def route(
    logits_TE: Tensor,
    correction_E: Tensor | None,
    spec: Moe,
    sigmoid: Callable[[Tensor], Tensor] = activation.sigmoid,
    chosen_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts: (weights [T, K] float32, ids [T, K] int64).

    Scores are softmax or sigmoid over all experts, or raw with the softmax after the choice.
    ``correction`` is added for the choice only. With groups (n, top), only experts of the ``top``
    best groups can be chosen; a group's score is that of its best expert or its best two.
    ``chosen``: the experts are given, and their weights are normalized to a sum of one.
    """
    logits = logits_TE.float()
    if spec.score == "sparsemixer":
        return sparsemixer(logits, spec.jitter, spec.top_k)
    score = logits.softmax(-1) if spec.score == "softmax" else logits
    if spec.score == "sigmoid":
        score = sigmoid(logits)
    elif spec.score == "sqrtsoftplus":
        score = activation.softplus(logits).sqrt()
    if chosen_TK is not None:
        weights = score.gather(1, chosen_TK)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * spec.scale, chosen_TK
    pick = score if correction_E is None else score + correction_E
    num_groups, top_groups = spec.groups
    if num_groups > 1:
        pick = _keep_groups(pick, num_groups, top_groups, spec.group_score)
    ids = pick.topk(spec.top_k, -1)[1]
    weights = score.gather(1, ids)
    if spec.score == "softmax_topk":
        weights = weights.softmax(-1)
    elif spec.score == "sigmoid_topk":
        weights = sigmoid(weights)
    if spec.renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * spec.scale, ids


def sparsemixer(logits_TE: Tensor, jitter: float, top_k: int) -> tuple[Tensor, Tensor]:
    """The best expert, then the best of the rest (arXiv:2409.12136); each one's weight is a
    softmax over those whose logit is within 2 * jitter of it."""
    left, weights, ids = logits_TE, [], []
    for _ in range(top_k):
        best, chosen = left.max(-1, keepdim=True)
        size = logits_TE.abs().clamp(min=best)
        is_far = (best - logits_TE) / size > 2 * jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(weights, -1), torch.cat(ids, -1)


def _keep_groups(pick_TE: Tensor, num_groups: int, top_groups: int, rating: str) -> Tensor:
    grouped = pick_TE.view(pick_TE.shape[0], num_groups, -1)
    best = grouped.topk(2, -1)[0].sum(-1) if rating == "top2" else grouped.amax(-1)
    keep = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups, -1)[1], True)
    return grouped.masked_fill(~keep[..., None], float("-inf")).flatten(1)


class ReferenceExperts:
    """Runs the experts one after another on the tokens that chose them."""

    takes_adapters = True

    def __init__(
        self,
        up_E2ID: Tensor,
        down_EDI: Tensor,
        up_bias_E2I: Tensor | None,
        down_bias_ED: Tensor | None,
        act: str,
        fmts: tuple[str, str],
        scales: ExpertScales,
        limit: GateLimit,
    ) -> None:
        self.num_experts = int(up_E2ID.shape[0])
        self._up: list[PackedLinear] = []
        self._down: list[PackedLinear] = []
        for expert in range(self.num_experts):
            up_bias = None if up_bias_E2I is None else up_bias_E2I[expert]
            down_bias = None if down_bias_ED is None else down_bias_ED[expert]
            up, down = (expert_scales(one, expert) for one in scales)
            self._up.append(Gated(pack_linear(up_E2ID[expert], up_bias, fmts[0], up), act, limit))
            self._down.append(pack_linear(down_EDI[expert], down_bias, fmts[1], down))

    def run(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        lora: ExpertAdapters | None = None,
    ) -> Tensor:
        top_k = ids_TK.shape[1]
        order = ids_TK.flatten().argsort(stable=True)
        counts = torch.bincount(ids_TK.flatten(), minlength=self.num_experts).tolist()
        tokens = order // top_k
        weights = weights_TK.flatten()[order, None].to(x_TD.dtype)
        # One slot for each (token, choice), summed at the end in the order of the choice, so that a
        # token's result does not depend on its batch.
        outputs = x_TD.new_empty(order.shape[0], x_TD.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                y_MD = self._run_one(expert, x_TD[tokens[rows]], tokens[rows], lora)
                outputs[order[rows]] = y_MD * weights[rows]
                start += count
        return outputs.view(-1, top_k, x_TD.shape[1]).sum(1)

    def _run_one(
        self, expert: int, x_MD: Tensor, tokens_M: Tensor, lora: ExpertAdapters | None
    ) -> Tensor:
        up, down = self._up[expert], self._down[expert]
        if lora is None:
            return down.run(up.run(x_MD))
        assert isinstance(up, Gated)
        h_MI = up.run_changed(x_MD, partial(lora.up, expert, tokens_M, x_MD))
        y_MD = down.run(h_MI)
        lora.down(expert, tokens_M, h_MI, y_MD)
        return y_MD


class UngatedExperts:
    """Experts ``down(act(up))`` without a gate, one after another."""

    takes_adapters = True

    def __init__(
        self,
        up_EID: Tensor,
        down_EDI: Tensor,
        up_bias_EI: Tensor | None,
        down_bias_ED: Tensor | None,
        act: str,
        pack: Callable[..., PackedLinear] = pack_linear,
    ) -> None:
        """``pack``: an implementation of ``pack_linear``."""
        self._act = act
        self._up, self._down = (
            [pack(w, None if biases is None else biases[i], "") for i, w in enumerate(weights)]
            for weights, biases in ((up_EID, up_bias_EI), (down_EDI, down_bias_ED))
        )

    def run(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        lora: ExpertAdapters | None = None,
    ) -> Tensor:
        out_TKD = x_TD.new_empty(*ids_TK.shape, x_TD.shape[1])
        for expert in sorted(set(ids_TK.flatten().tolist())):
            rows, ranks = (ids_TK == expert).nonzero(as_tuple=True)
            x = x_TD[rows]
            h = self._up[expert].run(x)
            if lora is not None:
                lora.up(expert, rows, x, h)
            h = self.activate(h)
            y = self._down[expert].run(h)
            if lora is not None:
                lora.down(expert, rows, h, y)
            out_TKD[rows, ranks] = self.norm(y)
        return (out_TKD * weights_TK[..., None].to(x_TD.dtype)).sum(1)

    def activate(self, h: Tensor) -> Tensor:
        """What ``down`` takes, of the outputs of ``up``."""
        return activation.activate(h, self._act)

    def norm(self, y: Tensor) -> Tensor:
        """An expert's outcome, of the outputs of ``down``."""
        return y


def combine(out_ND: Tensor, place_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum of the outcomes at each token's places, in the order of the choice: [T, D]
    in the dtype of ``out``."""
    return (out_ND[place_TK] * weights_TK[..., None].to(out_ND.dtype)).sum(1)


def pack_experts(
    up_E2ID: Tensor,
    down_EDI: Tensor,
    up_bias_E2I: Tensor | None,
    down_bias_ED: Tensor | None,
    act: str,
    fmts: tuple[str, str] = ("", ""),
    scales: ExpertScales = (None, None),
    limit: GateLimit = NO_LIMIT,
) -> PackedExperts:
    """Experts ``down(act(gate) * up)`` with gate above up in the rows of ``up``. ``fmts`` are the
    formats of up and down, ``scales`` as in ``pack_linear``, ``limit`` of ``activate_gated``."""
    biases = up_bias_E2I, down_bias_ED
    return ReferenceExperts(up_E2ID, down_EDI, *biases, act, fmts, scales, limit)
