"""BlockDraft: a draft that makes a block of tokens in one step (DFlash, DFlash 2, DSpark).

Its KV cache has an entry of each token but the last known one, which comes from the target's hidden
states of that token and from no layer before it: keys and values of all layers are projected from
the same channels.

Legend: E entries, R rows (requests), T packed tokens of their blocks, N channels of the target's
hidden states, D of the draft's, V vocabulary, M channels of a Markov head's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.draft import Draft, MaskedBlock
from radixlm.base.record import replace
from radixlm.layers.block import BlockLayer
from radixlm.layers.compressed_attention import CompressedSparseAttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.models.block_parts import ConvolvedBlock, MarkovHead, Selector
from radixlm.models.decoder import DecoderModel
from radixlm.models.drafts import DraftInputs, DraftModel
from radixlm.step.batch import AttentionSite, ForwardBatch, InputEmbeds


class BlockInputs(DraftInputs):
    """With what chooses by the token before."""

    markov: MarkovHead
    selector: Selector

    def __init__(self, spec: Draft, context: LayerContext) -> None:
        super().__init__(spec, context)
        assert spec.block is not None
        if spec.block.markov:
            self.markov = MarkovHead(spec, spec.block, context)
        if spec.block.selector_rank:
            self.selector = Selector(spec, spec.block, context)


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
        if not self.block.conv_taps:
            return DecoderModel._block(self, layer, rope, place, state)
        spec, dim = self.decoder.blocks[layer], self.decoder.dim
        return ConvolvedBlock(spec, self.block, dim, self.context, rope, place)

    def bind(self, target: DecoderModel, kept_ids_K: Tensor | None = None) -> None:
        super().bind(target, kept_ids_K)
        if self.block.selector_rank and not self.spec.owns_head:  # it scales logits by itself
            own = self.spec.decoder
            self._run_head, self._make_logits = target.whole_head.run, self.logits
            self.decoder = replace(
                self.decoder, logit_scale=own.logit_scale, logit_softcap=own.logit_softcap
            )

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
            if isinstance(block.mixer, CompressedSparseAttentionLayer):
                block.mixer.store(read_ED, batch, angles)
            else:
                block.mixer.run(read_ED, batch, angles)

    def block_step(self, batch: ForwardBatch) -> Tensor:
        """What the head reads at ``logits_rows_R``: [R, D]."""
        embeds_TD = self._embed_tokens(batch.token_ids_T)
        if self.block.embed_scale != 1.0:
            embeds_TD = embeds_TD * self.block.embed_scale
        if self.decoder.streams is not None:
            embeds_TD = self.streams.begin(embeds_TD)
        batch.embeds = InputEmbeds(embeds_TD)
        batch.attn.begin(batch)  # type: ignore[attr-defined]
        return self._normed(self._stream(batch)[batch.logits_rows_R])

    def block_logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 [R, V] of these rows."""
        return self._make_logits(hidden_RD)

    def behind(
        self, tokens_R: Tensor, logits_RV: Tensor, hidden_RD: Tensor, state_RM: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of a place behind the target's ``tokens_R``, and what the next place gets as
        ``state_RM``, which is None at the first."""
        if self.block.markov:
            bias_RV, state_RM = self.draft.markov.bias(tokens_R, hidden_RD, state_RM)
            logits_RV = logits_RV + bias_RV
        elif self.block.selector_rank:
            own_R = self._own_ids(tokens_R)
            logits_RV = self.draft.selector.choose(logits_RV, own_R, hidden_RD)
        return logits_RV, state_RM

    def _own_ids(self, tokens_R: Tensor) -> Tensor:
        """The draft's tokens of the target's; of those that it lacks, the nearest lower ones."""
        if self.target_ids_V is None:
            return tokens_R
        sorted_V, order_V = self.target_ids_V.sort()
        at_R = torch.searchsorted(sorted_V, tokens_R, right=True) - 1
        return order_V[at_R.clamp(min=0)]
