"""BlockDraft: a draft that makes a block of tokens in one step (DFlash, DSpark).

Its KV cache has an entry of each token but the last known one, which comes from the target's hidden
states of that token and from no layer before it: keys and values of all layers are projected from
the same channels.

Legend: E entries, R rows (requests), T packed tokens of their blocks, N channels of the target's
hidden states, D of the draft's, V vocabulary, M channels of the Markov head's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.draft import Draft, MaskedBlock
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.embedding import Embedding
from radixlm.layers.linear import Linear
from radixlm.layers.module import Module
from radixlm.models.decoder import DecoderModel
from radixlm.models.drafts import DraftInputs, DraftModel
from radixlm.step.batch import AttentionSite, ForwardBatch, InputEmbeds


class MarkovHead(Module):
    """What the token before a draft adds to its logits."""

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


class BlockInputs(DraftInputs):
    """With the Markov head."""

    markov: MarkovHead

    def __init__(self, spec: Draft, context: LayerContext) -> None:
        super().__init__(spec, context)
        assert spec.block is not None
        if spec.block.markov:
            self.markov = MarkovHead(spec, spec.block, context)


class _Storing:
    """The attention of a step of which only keys and values are wanted."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.pools: Sequence[Any] = batch.attn.pools
        self._store_GT = batch.store_GT

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V: zeros, [T, heads * v_dim]."""
        self.pools[site.group].store(site.layer, self._store_GT[site.group], k_TKD, v_TKV)
        return q_THD.new_zeros(len(q_THD), site.heads * site.v_dim)


class BlockDraft(DraftModel):
    """It runs layer by layer: a block is a step in which tokens see later ones."""

    inputs_kind = BlockInputs
    draft: BlockInputs

    def _block(self, layer: int, rope: int, place: tuple[int, int], state: int) -> BlockLayer:
        return DecoderModel._block(self, layer, rope, place, state)

    @property
    def block(self) -> MaskedBlock:
        assert self.spec.block is not None
        return self.spec.block

    def combine(self, hidden_TN: Tensor) -> Tensor:
        """The target's hidden states as entries read them: [T, D]."""
        return self.draft.hidden_norm.run(super().combine(hidden_TN))

    def store_entries(self, batch: ForwardBatch, hidden_EN: Tensor) -> None:
        """Store the entries of the batch's places, from the target's hidden states of them."""
        dtype = self.context.compute_dtype
        context_ED = self.combine(hidden_EN.to(dtype))
        batch.attn = _Storing(batch)
        angles = self.ropes.angles(batch)
        for block in self.blocks:
            assert block.mixer is not None
            read_ED = block.norm1.run(context_ED) if self.block.norms_entries else context_ED
            block.mixer.run(read_ED, batch, angles)

    def block_step(self, batch: ForwardBatch) -> Tensor:
        """What the head reads at ``logits_rows_R``: [R, D]."""
        batch.embeds = InputEmbeds(self._embed_tokens(batch.token_ids_T))
        batch.attn.begin(batch)  # type: ignore[attr-defined]
        return self._normed(self._stream(batch)[batch.logits_rows_R])

    def block_logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 [R, V] of these rows."""
        return self._make_logits(hidden_RD)
