"""Parts of drafts that make blocks of tokens: what the token before a draft adds to its logits
(DSpark, DFlash 2), and convolutions along a block (DFlash 2).

Legend: R rows (requests), T packed tokens of blocks of B, D channels, V vocabulary, M channels of a
table, C candidates, K taps, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.draft import Draft, MaskedBlock
from radixlm.arch.spec import Block
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.embedding import Embedding
from radixlm.layers.linear import Linear
from radixlm.layers.module import Module
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


class MarkovHead(Module):
    """Adds to the logits of all tokens."""

    table: Embedding
    out: Linear
    gate: Linear
    joint: Linear

    def __init__(self, draft: Draft, spec: MaskedBlock, context: LayerContext) -> None:
        rank, self.kind, dim = spec.markov_rank, spec.markov, draft.decoder.dim
        vocab = draft.decoder.vocab
        self.table = Embedding(draft.target_vocab or vocab, rank, context)
        self.out = context.linear(rank, vocab)
        if self.kind == "gated":
            self.gate = context.linear(dim + rank, rank, True)
        elif self.kind == "rnn":
            self.joint = context.linear(2 * rank + dim, 3 * rank, True)

    def bias(
        self, tokens_R: Tensor, hidden_RD: Tensor, state_RM: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """float32 [R, V], and the state of the next place; ``state_RM``: None at the first."""
        before_RM = self.table.run(tokens_R)
        if self.kind == "gated":
            gate_RM = self.gate.run(torch.cat((hidden_RD, before_RM), -1)).sigmoid()
            before_RM = before_RM * gate_RM
        elif self.kind == "rnn":
            if state_RM is None:
                state_RM = torch.zeros_like(before_RM)
            joint = self.joint.run(torch.cat((state_RM, before_RM, hidden_RD), -1))
            gate_RM, new_RM, out_RM = joint.chunk(3, -1)
            gate_RM = gate_RM.sigmoid()
            state_RM = gate_RM * state_RM + (1 - gate_RM) * new_RM.tanh()
            before_RM = out_RM.tanh()
        return self.out.run(before_RM).float(), state_RM


class Selector(Module):
    """Chooses among the best tokens of a place. Its tables are of the draft's tokens."""

    def __init__(self, draft: Draft, spec: MaskedBlock, context: LayerContext) -> None:
        vocab, rank = draft.decoder.vocab, spec.selector_rank
        self.count = min(spec.num_candidates, vocab)
        self.before, self.token = (Embedding(vocab, rank, context) for _ in range(2))
        self.hidden = context.plain_linear(draft.decoder.dim, rank)

    def choose(self, logits_RV: Tensor, tokens_R: Tensor, hidden_RD: Tensor) -> Tensor:
        """The logits of the best tokens and what the tokens before, ``tokens_R`` of the draft's,
        add; minus infinity of all others."""
        best_RC, ids_RC = logits_RV.topk(self.count)
        context_RM = (self.before.run(tokens_R) * self.hidden.run(hidden_RD)).float()
        found_RCM = self.token.run(ids_RC.flatten()).view(*ids_RC.shape, -1).float()
        best_RC = best_RC + torch.einsum("rm,rcm->rc", context_RM, found_RCM)
        return torch.full_like(logits_RV, -torch.inf).scatter_(1, ids_RC, best_RC)


class GroupedConv(Module):
    """Convolves what goes into a branch, and what comes out of it, along each block, by a kernel
    that the channels of a group have together and one of their own."""

    def __init__(self, spec: MaskedBlock, dim: int, context: LayerContext) -> None:
        self._size, self._taps, self._group = spec.size, spec.conv_taps, spec.conv_group
        self._dtype, self._num_groups = context.compute_dtype, dim // spec.conv_group
        self.base = Param((2, self._taps, dim))
        self.factors = context.plain_linear(dim, 2 * self._taps * self._num_groups)

    def finish(self) -> None:
        base_2KD = self.base.take().to(self._dtype)
        self._base_2KGC = base_2KD.view(2, self._taps, self._num_groups, self._group)

    def kernels(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Before and behind the branch that reads ``x_TD``, of each token: [T, K, G, D / G]."""
        own = self.factors.run(x_TD).view(len(x_TD), 2, self._taps, self._num_groups, 1)
        before, behind = (self._base_2KGC + own).unbind(1)
        return before, behind

    def run(self, x_TD: Tensor, kernel: Tensor) -> Tensor:
        """Convolved: [T, D]; tap k reads the token k places before in the block."""
        x = x_TD.view(-1, self._size, self._num_groups, self._group)
        weight = kernel.view(-1, self._size, *kernel.shape[1:])
        out = weight[:, :, 0] * x
        for tap in range(1, min(self._taps, self._size)):
            out[:, tap:] += weight[:, tap:, tap] * x[:, :-tap]
        return out.view(x_TD.shape)


class ConvolvedBlock(BlockLayer):
    """A layer with convolutions around its branches."""

    def __init__(
        self,
        spec: Block,
        block: MaskedBlock,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
    ) -> None:
        super().__init__(spec, dim, context, rope, pool)
        self.conv1, self.conv2 = (GroupedConv(block, dim, context) for _ in range(2))

    def _mix(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        before, behind = self.conv1.kernels(x_TD)
        mixed_TD = super()._mix(self.conv1.run(x_TD, before), batch, angles)
        return self.conv1.run(mixed_TD, behind)

    def _feed(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        before, behind = self.conv2.kernels(x_TD)
        return self.conv2.run(super()._feed(self.conv2.run(x_TD, before), batch), behind)
