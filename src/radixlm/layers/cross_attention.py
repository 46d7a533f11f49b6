"""Layers that attend to a prompt's images and not to its text (Llama 3.2 Vision), and those that
attend to an audio clip besides (Whisper).

What a layer makes of an image's rows is kept beside them (``EncoderOutput``), so that it
is computed once however many chunks, steps and requests see the image.

Legend: T tokens, D model channels, H query heads, K KV heads, C head channels, N rows of images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Block, CrossAttention
from radixlm.base.record import Record
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.layers.whole_block import WholeBlock
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import ForwardBatch

MAX_SCORES = 1 << 24  # numbers of the score matrix at once; longer chunks are split


@dataclass(slots=True, eq=False)
class EncoderOutput:
    """An encoded image that cross-attention layers read: ``rows()`` gives its float32 rows [N, D],
    in ``num_tiles`` equal tiles of which the first ``num_used_tiles`` show something; ``made``
    holds what each layer has computed from them."""

    rows: Callable[[], Tensor]
    num_used_tiles: int
    num_tiles: int
    made: dict[int, tuple[Any, ...]] = field(default_factory=dict)


class CrossAttentionSpan(Record):
    """Tokens [first, first + count) of the step and the images that they attend to: the used tiles,
    or all tiles where the tokens come before the images (``is_before``)."""

    first: int
    count: int
    images: tuple[EncoderOutput, ...]
    is_before: bool


class CrossAttentionLayer(Module):
    """q of the tokens, k and v of the images' rows; q and k may be normed; no rope."""

    def __init__(self, spec: CrossAttention, dim: int, context: LayerContext, layer: int) -> None:
        """``layer`` is the key under which the layer's k and v of an image are kept."""
        self.spec, self._layer, self._dtype = spec, layer, context.compute_dtype
        q_rows, kv_rows = spec.rows
        self.q = context.linear(dim, q_rows, spec.bias, Shard(0))
        self.kv = context.linear(dim, 2 * kv_rows, spec.bias, Shard(0, (kv_rows, kv_rows)))
        self.o = context.linear(q_rows, dim, spec.bias, Shard(1))
        if spec.norm is not None:
            self.q_norm, self.k_norm = (
                NormLayer(spec.norm, (spec.head_dim,), context.kernels, context.device)
                for _ in range(2)
            )

    def finish(self) -> None:
        self._version = object()  # k and v made with earlier weights are not reused

    def run(self, x_TD: Tensor, cross_attention_spans: Sequence[CrossAttentionSpan]) -> Tensor:
        """The mixer's branch [T, D]; zeros for tokens of no span."""
        spec = self.spec
        q_THC = self.q.run(x_TD).view(-1, spec.head_dim)
        if spec.norm is not None:
            q_THC = self.q_norm.run(q_THC)
        q_THC = q_THC.view(-1, spec.heads, spec.head_dim)
        out_THC = torch.zeros_like(q_THC)
        for span in cross_attention_spans:
            self._attend(q_THC, span, out_THC)
        return self.o.run(out_THC.flatten(1))

    def _attend(self, q_THC: Tensor, span: CrossAttentionSpan, out_THC: Tensor) -> None:
        parts = [self._keys_and_values(image, span.is_before) for image in span.images]
        k_KNC, v_KNC = (
            (one[0] if len(one) == 1 else torch.cat(one)).transpose(0, 1)
            for one in zip(*parts, strict=True)
        )
        step = max(1, MAX_SCORES // (self.spec.heads * k_KNC.shape[1]))
        for first in range(span.first, span.first + span.count, step):
            rows = slice(first, min(first + step, span.first + span.count))
            q_HTC = q_THC[rows].transpose(0, 1)
            grouped = q_HTC.reshape(self.spec.kv_heads, -1, q_HTC.shape[2])
            out = F.scaled_dot_product_attention(grouped, k_KNC, v_KNC)
            out_THC[rows] = out.view(q_HTC.shape).transpose(0, 1)

    def _keys_and_values(self, image: EncoderOutput, all_rows: bool) -> tuple[Tensor, Tensor]:
        """k and v [N, K, C] of an image."""
        kept = image.made.get(self._layer)
        if kept is None or kept[0] is not self._version:
            spec = self.spec
            rows_ND = image.rows().to(self._dtype)
            k, v = self.kv.run(rows_ND).chunk(2, -1)
            k = k.reshape(-1, spec.head_dim)
            if spec.norm is not None:
                k = self.k_norm.run(k)
            shape = (-1, spec.kv_heads, spec.head_dim)
            kept = (self._version, k.view(shape), v.reshape(shape))
            image.made[self._layer] = kept
        num = kept[1].shape[0]
        if not all_rows:
            num = num // image.num_tiles * image.num_used_tiles
        return kept[1][:num], kept[2][:num]


class GatedCrossBlock(WholeBlock):
    """A block of layout "gated_cross"; skipped in a step without images."""

    def __init__(self, spec: Block, dim: int, context: LayerContext, layer: int) -> None:
        assert isinstance(spec.mixer, CrossAttention)
        super().__init__(spec, dim, context, -1, (-1, -1))
        self.cross = CrossAttentionLayer(spec.mixer, dim, context, layer)
        self.cross_gate, self.ffn_gate = Param((1,), "float32"), Param((1,), "float32")

    def finish(self) -> None:
        super().finish()
        self._gates = [torch.tanh(gate.take()) for gate in (self.cross_gate, self.ffn_gate)]

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """See ``WholeBlock``."""
        if not batch.cross_attention_spans:
            return x_TD
        cross_gate, ffn_gate = (gate.to(x_TD.dtype) for gate in self._gates)
        x_TD += self.cross.run(self.norm1.run(x_TD), batch.cross_attention_spans) * cross_gate
        fed = self._feed(self.norm2.run(x_TD), batch) * ffn_gate
        for span in batch.cross_attention_spans:
            if not span.is_before:
                rows = slice(span.first, span.first + span.count)
                x_TD[rows] += fed[rows]
        return x_TD


class EncoderDecoderBlock(BlockLayer):
    """A block of layout "pre" that attends to rows of an encoder between its two branches; skipped
    for a text without any."""

    def __init__(
        self,
        spec: Block,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
        layer: int,
    ) -> None:
        assert spec.cross is not None
        super().__init__(spec, dim, context, rope, pool)
        self.cross = CrossAttentionLayer(spec.cross, dim, context, layer)

    def run_deferred(
        self,
        x_TD: Tensor,
        pending_TD: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
    ) -> tuple[Tensor, Tensor | None]:
        """See ``BlockLayer``."""
        x_TD += self._mix(self.norm1.add_run(x_TD, pending_TD), batch, angles)
        if batch.cross_attention_spans:
            read_TD = self.cross.run(self.norm2.run(x_TD), batch.cross_attention_spans)
            for span in batch.cross_attention_spans:
                rows = slice(span.first, span.first + span.count)
                x_TD[rows] += read_TD[rows]
        return x_TD, self._feed(self.norm3.run(x_TD), batch)
