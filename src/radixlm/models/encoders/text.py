"""Text encoders: whole texts in, a hidden state for each token out; no KV cache, no head.

Legend: T packed tokens, D model channels, E channels of the tables, H heads, M longest text.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Attention, Block, Decoder, Disentangled, Encoder
from radixlm.attention.ragged import RaggedAttention, Tables
from radixlm.base.record import replace
from radixlm.kernels import cpu
from radixlm.kernels.ops.lora import LoraRows
from radixlm.layers.altup import PerLayerInputsMaker
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.embedding import Embedding
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import RopeTables
from radixlm.models.encoders.program import EncoderProgram, make_encoder_program
from radixlm.models.program.step import rope_table
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch

_KEPT_IN_TRAINING = 1 - 0.15 * 0.8  # of 15% of the tokens, 80% were dropped


class EncoderModel(Module):
    """Tables, blocks, norm. Load weights, then ``finish``, then ``forward``."""

    kv_groups: tuple[KvGroup, ...] = ()
    pool: list[Module]
    gate: list[Module]

    def __init__(
        self, decoder: Decoder, context: LayerContext, weight_dtype: torch.dtype | None
    ) -> None:
        assert decoder.encoder is not None
        context = replace(context, cuts_heads=False)  # tables of distances are for all heads
        self.decoder, self.context, self.weight_dtype = decoder, context, weight_dtype
        self.spec: Encoder = decoder.encoder
        kernels, device = context.kernels, context.device
        self.use_program = cpu.available and device.type == "cpu"
        positions = [
            block.mixer.rope if isinstance(block.mixer, Attention) else None
            for block in decoder.blocks
        ]
        ropes = list(dict.fromkeys(rope for rope in positions if rope is not None))
        self.ropes = RopeTables(ropes, kernels, device)
        self._make_tables(self.spec.embed_dim or decoder.dim)
        self.blocks = [
            BlockLayer(
                block,
                decoder.dim,
                context,
                ropes.index(rope) if rope is not None else -1,
                (0, 0),
            )
            for block, rope in zip(self._blocks_with_weights, positions, strict=False)
        ]
        if decoder.layer_inputs is not None:
            inputs, count = decoder.layer_inputs, len(self.blocks)
            self.inputs = PerLayerInputsMaker(inputs, decoder.dim, count, decoder.norm, context)
            for layer, block in enumerate(self.blocks):
                block.add_per_layer_input(inputs, layer, decoder.dim, context)
        if self.spec.has_final_norm:
            self.norm = NormLayer(decoder.norm, (decoder.dim,), kernels, device)

    @property
    def _blocks_with_weights(self) -> tuple[Block, ...]:
        return self.decoder.blocks[: 1 if self.spec.is_shared else None]

    @property
    def _num_biases(self) -> int:
        """Tables of distances, one below the other."""
        return len(self._blocks_with_weights) if self.spec.has_distances_each else 1

    def _make_tables(self, width: int) -> None:
        decoder, context, spec = self.decoder, self.context, self.spec
        self.embed = Embedding(decoder.vocab, width, context, decoder.embed_scale)
        if decoder.positions is not None:
            self.positions = Embedding(decoder.positions[0], width, context)
        if spec.token_types:
            self.types = Embedding(spec.token_types, width, context)
        if decoder.embed_norm is not None:
            self.embed_norm = NormLayer(
                decoder.embed_norm, (width,), context.kernels, context.device
            )
        if spec.embed_dim:
            self.embed_proj = context.linear(width, decoder.dim, True)
        if spec.distances is not None:
            buckets_, _, heads = spec.distances
            self.distances = Embedding(buckets_ * self._num_biases, heads, context)
        if spec.disentangled is not None:
            self.relative = Embedding(2 * spec.disentangled.span, decoder.dim, context)
            if spec.disentangled.norm is not None:
                shape = (decoder.dim,)
                norm = NormLayer(spec.disentangled.norm, shape, context.kernels, context.device)
                self.relative_norm = norm

    def finish(self) -> None:
        """After the loader has filled and finished every layer."""
        self.program: EncoderProgram | None  # an old one knows the addresses of old weights
        self._bias_BHW: Tensor | None = None
        each = self.sites if self.spec.has_distances_each else ()
        self._places = {id(site): place for place, site in enumerate(each)}
        self._rows_W: Tensor | None = None
        self._tables: dict[int, Tables] = {}
        self._has_looked, self.program = False, None
        if self.spec.disentangled is not None:
            self._tables = dict(self._relative_tables())

    def _relative_tables(self) -> Iterator[tuple[int, Tables]]:
        """Each layer's queries and keys of the distances, by the identity of its site."""
        spec = self.spec.disentangled
        assert spec is not None
        x_RD = self.relative.run(torch.arange(self.relative.rows, device=self.context.device))
        if hasattr(self, "relative_norm"):
            x_RD = self.relative_norm.run(x_RD)
        for block in self.blocks:
            layer = block.mixer
            assert isinstance(layer, AttentionLayer)
            q, k, _ = layer.qkv.run(x_RD).split_with_sizes(layer.rows, -1)
            heads = (-1, layer.spec.heads, layer.spec.head_dim)
            queries = q.reshape(heads) if spec.has_queries else None
            yield id(layer.site), (queries, k.reshape(heads) if spec.has_keys else None)

    @property
    def sites(self) -> tuple[AttentionSite, ...]:
        """The site of each layer with weights, in order; known once they are loaded."""
        return tuple(block.site for block in self.blocks if block.site is not None)

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        """The hidden states of all tokens [T, D], and no logits."""
        return self.forward(batch), None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of the step's tokens: [T, D]. The step holds whole texts only."""
        program = self._program_for()
        if program is None:
            return self._run_layers(batch)
        fits_S = batch.query_start_S1.diff().long() <= program.longest  # may exceed 32 bits
        if fits_S.all():
            return self._run_program(batch)
        if not fits_S.any():
            return self._run_layers(batch)
        out_TD = torch.empty(batch.num_tokens, self.decoder.dim)
        for texts_S, run in ((fits_S, self._run_program), (~fits_S, self._run_layers)):
            rows_T = torch.repeat_interleave(texts_S, batch.query_start_S1.diff())
            out_TD[rows_T] = run(_some_texts(batch, texts_S, rows_T)).float()
        return out_TD

    def _run_program(self, batch: ForwardBatch) -> Tensor:
        assert self.program is not None
        ropes = [rope_table(maker, batch) for maker in self.ropes.makers]
        return self.program.run(self._embed(batch), batch.query_start_S1, ropes)

    def _run_layers(self, batch: ForwardBatch) -> Tensor:
        longest = batch.max_query_len
        bias_BHW, rows_W = self._bias(longest), self._rows(longest)
        ragged = RaggedAttention(batch, bias_BHW, self._places, self._tables, rows_W)
        before, batch.attn = batch.attn, ragged
        try:
            x_TD = self._embed(batch)
            angles = self.ropes.angles(batch)
            if self.decoder.layer_inputs is not None:
                batch.scratch.per_layer_TLP = self.inputs.inputs(batch.token_ids_T, x_TD)
            repeats = len(self.decoder.blocks) // len(self.blocks)
            for block in self.blocks * repeats:
                x_TD = block.run(x_TD, batch, angles)
        finally:
            batch.attn = before
        return x_TD if self.final_norm is None else self.final_norm.run(x_TD)

    def _program_for(self) -> EncoderProgram | None:
        """The program of the loaded weights, made at the first step."""
        if not self._has_looked:
            self._has_looked = True
            self.program = make_encoder_program(self) if self.use_program else None
        return self.program

    @property
    def final_norm(self) -> NormLayer | None:
        """The norm after the last block, if there is one."""
        return self.norm if self.spec.has_final_norm else None

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        """An encoder has no logits; requests for them are refused before."""
        raise AssertionError("an encoder gives no logits")

    def _embed(self, batch: ForwardBatch) -> Tensor:
        x_TE = self.embed.run(batch.token_ids_T)
        if self.spec.dropped_token is not None:
            x_TE *= kept_tokens(batch, self.spec.dropped_token)[:, None].to(x_TE.dtype)
        if self.decoder.positions is not None:
            x_TE += self.positions.run(batch.positions_T + self.decoder.positions[1])
        if self.spec.token_types:
            second_T = batch.token_types_T
            rows_T = torch.zeros_like(batch.token_ids_T) if second_T is None else second_T.long()
            x_TE += self.types.run(rows_T.clamp(max=self.spec.token_types - 1))
        if self.decoder.embed_norm is not None:
            x_TE = self.embed_norm.run(x_TE)
        return self.embed_proj.run(x_TE) if self.spec.embed_dim else x_TE

    def _rows(self, longest: int) -> Tensor | None:
        """Rows of the table of distances, [2M - 1]; rebuilt for a longer text."""
        if self.spec.disentangled is None:
            return None
        if self._rows_W is None or self._rows_W.shape[0] < 2 * longest - 1:
            ahead_W = torch.arange(1 - longest, longest, device=self.context.device)
            self._rows_W = rows_of(ahead_W, self.spec.disentangled)
        return self._rows_W

    def _bias(self, longest: int) -> Tensor | None:
        """The learned biases by distance, [B, H, 2M - 1], B being 1 or the number of layers;
        rebuilt for a longer text."""
        if self.spec.distances is None:
            return None
        if self._bias_BHW is None or self._bias_BHW.shape[2] < 2 * longest - 1:
            ahead_W = torch.arange(1 - longest, longest, device=self.context.device)
            rows_W = buckets(ahead_W, *self.spec.distances[:2])
            firsts = range(0, self.distances.rows, self.spec.distances[0])
            biases = [self.distances.run(rows_W + first).T for first in firsts]
            self._bias_BHW = torch.stack(biases).contiguous()
        return self._bias_BHW


def _some_texts(batch: ForwardBatch, texts_S: Tensor, rows_T: Tensor) -> ForwardBatch:
    """A step of the texts that are True in ``texts_S``; ``rows_T``: the same of their tokens."""
    lengths_S, types_T = batch.query_start_S1.diff()[texts_S], batch.token_types_T
    longest = int(lengths_S.max())
    return dataclasses.replace(
        batch,
        token_ids_T=batch.token_ids_T[rows_T],
        positions_T=batch.positions_T[rows_T],
        rope_len_T=batch.rope_len_T[rows_T],
        query_start_S1=F.pad(lengths_S.cumsum(0), (1, 0)).int(),
        kv_len_S=batch.kv_len_S[texts_S],
        token_types_T=None if types_T is None else types_T[rows_T],
        max_query_len=longest,
        max_kv_len=longest,
    )


def kept_tokens(batch: ForwardBatch, dropped: int) -> Tensor:
    """The factor of each token's embedding, [T]: 0 of the token ``dropped``; of others the share of
    tokens that were kept in training, divided by that share in their text."""
    lengths_S = batch.query_start_S1.diff().long()
    text_T = torch.repeat_interleave(lengths_S)
    keeps_T = (batch.token_ids_T != dropped).float()
    shares_S = torch.zeros(len(lengths_S), device=keeps_T.device).index_add(0, text_T, keeps_T)
    return keeps_T * (_KEPT_IN_TRAINING * lengths_S / shares_S.clamp(min=1))[text_T]


def rows_of(ahead_W: Tensor, spec: Disentangled) -> Tensor:
    """The row of each distance key - query in the table of ``spec``: distances up to half the
    buckets have rows of their own, those beyond grow as the logarithm."""
    behind_W = -ahead_W
    if spec.buckets:
        half = spec.buckets // 2
        away = behind_W.abs().clamp(min=half)
        grown = torch.log(away / half) / math.log((spec.farthest - 1) / half) * (half - 1)
        far_W = (torch.ceil(grown) + half).long() * behind_W.sign()
        behind_W = torch.where(behind_W.abs() <= half, behind_W, far_W)
    return (behind_W + spec.span).clamp(0, 2 * spec.span - 1)


def buckets(ahead_W: Tensor, num_buckets: int, farthest: int) -> Tensor:
    """The bucket of each distance key - query: half of them for keys ahead; of each half, half
    are single distances and the others grow as the logarithm up to ``farthest`` (T5)."""
    half = num_buckets // 2
    single = half // 2
    distance = ahead_W.abs()
    grown = torch.log(distance.clamp(min=1).float() / single) / math.log(farthest / single)
    far = (single + (grown * (half - single)).long()).clamp(max=half - 1)
    return torch.where(distance < single, distance, far) + half * (ahead_W > 0)
