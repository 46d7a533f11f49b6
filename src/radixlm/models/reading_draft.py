"""ReadingDraft: a draft without keys and values of its own, whose layers read those of its target
(assistants of Gemma 4). All drafts of a step are made at the place of the last known token.

Legend: R rows, N channels of the target's hidden states, D of the draft's, V vocabulary, k clusters
that are read, M tokens in all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.arch.draft import Draft
from radixlm.arch.spec import Attention, Block
from radixlm.base.record import replace
from radixlm.layers.context import LayerContext
from radixlm.layers.embedding import Embedding
from radixlm.layers.extended_attention import ExtendedAttentionLayer
from radixlm.layers.linear import Linear
from radixlm.layers.module import Module
from radixlm.models.decoder import DecoderModel
from radixlm.models.drafts import DraftInputs, DraftModel, DraftOutput
from radixlm.models.kv_groups import pool_places
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


class Ordering(Module):
    """The tokens of the first cluster, those of the second, and so on."""

    def __init__(self, size: int) -> None:
        self.weight = Param((size,), "int64")

    def finish(self) -> None:
        self.ids_V = self.weight.take()


class ReadingInputs(DraftInputs):
    """With what follows the blocks: the way back to N channels, and the clusters of a head."""

    table: Embedding
    centroids: Linear
    token_ordering: Ordering

    def __init__(self, spec: Draft, context: LayerContext) -> None:
        super().__init__(spec, context)
        dim, vocab = spec.decoder.dim, spec.decoder.vocab
        self.back = context.linear(dim, spec.target_dim)
        if spec.clusters[0]:
            self.table = Embedding(vocab, dim, context)
            self.centroids = context.linear(dim, spec.clusters[0])
            self.token_ordering = Ordering(vocab)


class ReadingDraft(DraftModel):
    """``bind`` lends it the target's token table and places of its cache; a step's batch has the
    target's backend and page tables, and stores nothing."""

    inputs_kind = ReadingInputs
    draft: ReadingInputs

    def bind(self, target: DecoderModel, kept_ids_K: Tensor | None = None) -> None:
        super().bind(target, None)
        if self.spec.clusters[0]:
            self._make_logits = self._of_clusters
            self.use_program = False  # which has no head of this kind
        places = pool_places(target.decoder, target.kv_groups)
        layers = read_layers(self.spec, target.decoder.blocks)
        for block, layer in zip(self.blocks, layers, strict=True):
            assert isinstance(block.mixer, ExtendedAttentionLayer)
            group, row = places[layer]
            block.mixer.site = replace(block.mixer.site, group=group, layer=row)

    def _of_clusters(self, x_RD: Tensor) -> Tensor:
        """Logits of the tokens in the best clusters; minus infinity of all others."""
        count, num_read = self.spec.clusters
        best_Rk = self.draft.centroids.run(x_RD).topk(min(num_read, count)).indices
        ids_RM = self.draft.token_ordering.ids_V.view(count, -1)[best_Rk].flatten(1)
        rows_RMD = self.draft.table.run(ids_RM.flatten()).view(*ids_RM.shape, -1)
        logits_RM = torch.einsum("rd,rmd->rm", x_RD.to(rows_RMD.dtype), rows_RMD).float()
        none_RV = logits_RM.new_full((len(x_RD), self.decoder.vocab), -torch.inf)
        return none_RV.scatter_(1, ids_RM, logits_RM)

    def draft_step(
        self, batch: ForwardBatch, hidden_TD: Tensor | None, passes_all: bool = False
    ) -> DraftOutput:
        """As of a ``DraftModel``; ``hidden_TD`` and the output's hidden states have N channels."""
        made = super().draft_step(batch, hidden_TD, passes_all)
        assert made.hidden_RD is not None
        return DraftOutput(made.logits_RV, self.draft.back.run(made.hidden_RD))


def read_layers(spec: Draft, blocks: tuple[Block, ...]) -> list[int]:
    """The target's layers whose keys and values the draft's read: the last one of the same kind,
    with a window or without; -1 where there is none with heads of the same shape."""
    layers = []
    for own in spec.decoder.blocks:
        mixer, found = own.mixer, -1
        assert isinstance(mixer, Attention)
        for layer, block in enumerate(blocks):
            other = block.mixer
            if isinstance(other, Attention) and bool(other.window) == bool(mixer.window):
                fits = (other.kv_heads, other.head_dim) == (mixer.kv_heads, mixer.head_dim)
                found = layer if fits else -1
        layers.append(found)
    return layers
