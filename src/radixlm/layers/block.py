"""One layer of a decoder: a mixer and a feed-forward, joined to the residual stream by a layout.

Legend: T tokens, D model channels. Blocks own the residual x and change it in place. Where a block
ends with ``x += branch`` and the next begins with a norm, the branch goes there beside x: that norm
adds it, and no launch does only that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.spec import (
    Attention,
    Block,
    CompressedSparseAttention,
    ConvAttention,
    LatentAttention,
    LayerInputs,
    MatrixLstm,
    Moe,
    Norm,
    ParallelHybrid,
    RelativeAttention,
    RwkvChannel,
    RwkvTime,
    SquareLinear,
)
from radixlm.base.record import replace
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.compressed_attention import CompressedSparseAttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.convolved_attention import (
    ConvolvedLayer,
    RelativeAttentionLayer,
    make_convolved,
)
from radixlm.layers.expert_attention import ExpertAttentionLayer
from radixlm.layers.extended_attention import ExtendedAttentionLayer
from radixlm.layers.latent import LatentAttentionLayer
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.mlstm import MatrixLstmLayer
from radixlm.layers.modality_moe import ModalityMoeLayer
from radixlm.layers.module import Module
from radixlm.layers.moe import MoeLayer
from radixlm.layers.norm import GatedNormLayer, NormLayer
from radixlm.layers.rope import Angles
from radixlm.layers.rwkv import RwkvChannelLayer, RwkvTimeLayer
from radixlm.layers.state import StateLayer, make_state_layer
from radixlm.quant.param import Param
from radixlm.step.batch import AttentionSite, ForwardBatch

NUM_NORMS = {
    "pre": 2,
    "post": 2,
    "post_sum": 2,
    "sandwich": 4,
    "parallel": 1,
    "parallel2": 2,
    "prenorm_ffn_only": 1,
    "scaled_post": 2,
    "gated_cross": 2,
}


def num_norms(spec: Block) -> int:
    """Norms of a block: one for each branch that it has, or what the layout says."""
    if None in (spec.ffn, spec.mixer):
        return int(spec.ffn is not spec.mixer)
    return NUM_NORMS[spec.layout] + 3 * (spec.parallel_moe is not None) + (spec.cross is not None)


LEAST_KEPT = 1e-3  # of the square of the residual's factor

MixerLayer = (
    AttentionLayer
    | LatentAttentionLayer
    | ExtendedAttentionLayer
    | CompressedSparseAttentionLayer
    | ExpertAttentionLayer
)
Rwkv = RwkvTimeLayer | RwkvChannelLayer
Angled = Sequence[Angles]
Joining = tuple[Tensor, Tensor | None]  # the residual, and what is yet to be added to it
# begin with a norm of the residual and end with a sum: (x, fed, batch, angles) -> Joining
JOINED = ("one", "pre", "convolved", "sandwich", "beside", "parallel", "parallel2")


def joined(x_TD: Tensor, fed_TD: Tensor | None) -> Tensor:
    """``x += fed`` in place, where there is any."""
    if fed_TD is not None:
        x_TD += fed_TD
    return x_TD


def make_attention(
    spec: Attention | LatentAttention | CompressedSparseAttention,
    dim: int,
    context: LayerContext,
    rope: int,
    pool: tuple[int, int],
) -> MixerLayer:
    """The layer of an attention's record."""
    if isinstance(spec, LatentAttention):
        return LatentAttentionLayer(spec, dim, context, rope, pool)
    if isinstance(spec, CompressedSparseAttention):
        return CompressedSparseAttentionLayer(spec, dim, context, rope, pool)
    if spec.extras is not None and spec.extras.experts:
        return ExpertAttentionLayer(spec, dim, context, rope, pool)
    kind = AttentionLayer if spec.extras is None else ExtendedAttentionLayer
    return kind(spec, dim, context, rope, pool)


class SquareLinearLayer(Module):
    """One matrix where others have a mixer or a feed-forward."""

    def __init__(self, spec: SquareLinear, dim: int, context: LayerContext) -> None:
        self.matrix = context.linear(dim, dim, spec.bias)

    def run(self, x_TD: Tensor, *_: object) -> Tensor:
        """The branch: [T, D]."""
        return self.matrix.run(x_TD)


class PerLayerInputLayer(Module):
    """How a layer's own input joins the residual: x + norm(out(act(gate(x)) * input))."""

    def __init__(
        self, spec: LayerInputs, index: int, dim: int, context: LayerContext, norm: Norm
    ) -> None:
        self._spec, self._index, self._activate = spec, index, context.kernels.activate
        self.gate = context.plain_linear(dim, spec.dim)
        self.out = context.plain_linear(spec.dim, dim)
        self.norm = NormLayer(norm, (dim,), context.kernels, context.device)

    def run(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """x with the input joined."""
        assert batch.scratch.per_layer_TLP is not None
        own = self._activate(self.gate.run(x_TD), self._spec.act)
        x_TD += self.norm.run(self.out.run(own * batch.scratch.per_layer_TLP[:, self._index]))
        return x_TD


class AffineResidual(Module):
    """(x + a) * b + (branch + c) * d, learned numbers a channel."""

    def __init__(self, dim: int) -> None:
        for name in ("stream_bias", "stream_scale", "branch_bias", "branch_scale"):
            setattr(self, name, Param((dim,), "float32"))

    def finish(self) -> None:
        params = vars(self)
        self._stream = params["stream_bias"].take(), params["stream_scale"].take()
        self._branch = params["branch_bias"].take(), params["branch_scale"].take()

    def run(self, x_TD: Tensor, branch_TD: Tensor) -> Tensor:
        """The sum: [T, D]."""
        (bias, scale), (moved, scaled) = self._stream, self._branch
        joined: Tensor = (branch_TD + moved) * scaled + (x_TD + bias) * scale
        return joined.to(x_TD.dtype)


class ParallelHybridLayer(Module):
    """Attention and a state mixer on the same input, added."""

    def __init__(self, attention: MixerLayer, state: StateLayer) -> None:
        self.attention, self.state = attention, state

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Angled) -> Tensor:
        """The mixer's branch: [T, D]."""
        return self.attention.run(x_TD, batch, angles) + self.state.run(x_TD, batch, angles)


class BlockLayer(Module):
    """``run(x, batch, angles)`` adds the block's two branches to x and returns it; ``run_joined``
    takes and gives sums that are yet to be done."""

    norm1: NormLayer
    norm2: NormLayer
    norm3: NormLayer
    norm4: NormLayer
    norm5: NormLayer  # of a block with experts beside its feed-forward: behind the latter,
    norm6: NormLayer  # before the experts
    norm7: NormLayer  # and behind them
    ffn: MlpLayer | MoeLayer | SquareLinearLayer  # absent where the record has none

    def __init__(
        self,
        spec: Block,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
        state_row: int = -1,
    ) -> None:
        """``rope`` indexes the model's RopeTables, ``pool`` is (group, row), ``state_row`` a row
        of the state pool; -1 without."""
        self.spec = spec
        self.mixer = self._make_mixer(dim, context, rope, pool, state_row)
        if isinstance(spec.ffn, Moe):
            kind = MoeLayer if spec.ffn.vision is None else ModalityMoeLayer
            self.ffn = kind(spec.ffn, dim, context)
        elif isinstance(spec.ffn, SquareLinear):
            self.ffn = SquareLinearLayer(spec.ffn, dim, context)
        elif spec.ffn is not None:
            self.ffn = MlpLayer(spec.ffn, dim, context)
        if spec.deferred_moe is not None:
            self.deferred_moe = MoeLayer(spec.deferred_moe, dim, context)
        if spec.parallel_moe is not None:
            self.parallel_moe = MoeLayer(spec.parallel_moe, dim, context)
        for index in range(num_norms(spec)):
            own = spec.post_norms[index // 2] if spec.post_norms and index % 2 else spec.norm
            rank = spec.norm_ranks[index] if index < 2 else 0
            norm = (
                GatedNormLayer(own, dim, rank, context)
                if rank
                else NormLayer(own, (dim,), context.kernels, context.device)
            )
            setattr(self, f"norm{index + 1}", norm)
        self._make_factors(spec, dim)
        self._bind()

    def _bind(self) -> None:
        """Which functions run this very block."""
        layout = _layout(self.spec)
        self._run_layout: Callable[..., Any] = getattr(self, f"_run_{layout}")
        run: Callable[[Tensor, ForwardBatch, Sequence[Angles]], Tensor]
        run = self._run_and_join if layout in JOINED else self._run_layout
        self.run = self._run_scaled if self.spec.out_scale else run
        self._run_unscaled = run

    def _make_factors(self, spec: Block, dim: int) -> None:
        """What the residual and the branches are multiplied with."""
        if spec.out_scale:
            self.out_scale = Param((1,), "float32")
        if spec.affine_residual:
            self.affine1, self.affine2 = (AffineResidual(dim) for _ in range(2))
        if spec.residual_channels:
            self.kept1, self.kept2 = Param((dim,), "float32"), Param((dim,), "float32")
        if spec.gate_temperature:
            self.gate1, self.gate2 = Param((dim,), "float32"), Param((dim,), "float32")

    def add_per_layer_input(
        self, spec: LayerInputs, index: int, dim: int, ctx: LayerContext
    ) -> None:
        """The block is layer ``index`` of a model whose layers have inputs of their own."""
        own = self.layer_input = PerLayerInputLayer(spec, index, dim, ctx, self.spec.norm)
        run = self._run_unscaled

        def run_with_input(x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
            return own.run(run(x_TD, batch, angles), batch)

        self._run_unscaled = run_with_input
        self.run = self._run_scaled if self.spec.out_scale else run_with_input

    def _make_mixer(
        self, dim: int, context: LayerContext, rope: int, pool: tuple[int, int], row: int
    ) -> (
        MixerLayer
        | StateLayer
        | ParallelHybridLayer
        | SquareLinearLayer
        | ConvolvedLayer
        | Rwkv
        | None
    ):
        mixer, attends, keeps = self.spec.mixer, self.spec.attention, self.spec.state
        if isinstance(mixer, ConvAttention):
            return make_convolved(mixer, dim, context, rope, pool, row)
        if isinstance(mixer, MatrixLstm):
            return MatrixLstmLayer(mixer, dim, context, row)
        if isinstance(mixer, RwkvTime):
            return RwkvTimeLayer(mixer, dim, context, row)
        if isinstance(mixer, RwkvChannel):
            return RwkvChannelLayer(mixer, dim, context, row)
        attention = make_attention(attends, dim, context, rope, pool) if attends else None
        state = make_state_layer(keeps, dim, context, row) if keeps else None
        if isinstance(mixer, SquareLinear):
            return SquareLinearLayer(mixer, dim, context)
        if isinstance(mixer, ParallelHybrid) and attention is not None and state is not None:
            return ParallelHybridLayer(attention, state)
        return attention or state

    @property
    def site(self) -> AttentionSite | None:
        """The attention's site, if the block attends."""
        mixer = self.mixer.attention if isinstance(self.mixer, ParallelHybridLayer) else self.mixer
        return getattr(mixer, "site", None)

    def at(self, place: tuple[int, int]) -> BlockLayer:
        """A plain, loaded block whose keys and values lie at ``place`` (group, row) of the cache:
        this one, or another with its weights."""
        mixer = self.mixer
        assert isinstance(mixer, AttentionLayer | ExtendedAttentionLayer)
        group, row = place
        if (mixer.site.group, mixer.site.layer) == place:
            return self
        twin = copy(self)
        twin.mixer = copy(mixer)
        twin.mixer.site = replace(mixer.site, group=group, layer=row)
        twin._bind()
        return twin

    def finish(self) -> None:
        self._scale = self.out_scale.take() if self.spec.out_scale else None
        if self.spec.residual_channels:
            self._kept = self.kept1.take(), self.kept2.take()
        if self.spec.gate_temperature:
            temperature = self.spec.gate_temperature
            self._gates = [_shares(gate.take() / temperature) for gate in (self.gate1, self.gate2)]

    def run_joined(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        """``run`` on x + fed; x itself may be changed."""
        if self.run == self._run_and_join:
            joining: Joining = self._run_layout(x_TD, fed_TD, batch, angles)
            return joining
        return self.run(joined(x_TD, fed_TD), batch, angles), None

    def _run_and_join(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        return joined(*self._run_layout(x_TD, None, batch, angles))

    def _run_scaled(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        x_TD = self._run_unscaled(x_TD, batch, angles)
        assert self._scale is not None
        x_TD *= self._scale
        return x_TD

    def _mix(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        assert self.mixer is not None
        y = self.mixer.run(x_TD, batch, angles)
        return y if self.spec.residual == 1.0 else y * self.spec.residual

    def _feed(self, x_TD: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        if isinstance(self.ffn, ModalityMoeLayer):
            y = self.ffn.run(x_TD, None, batch)
        else:
            y = self.ffn.run(x_TD)
        return y if self.spec.residual == 1.0 else y * self.spec.residual

    def _run_none(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        return x_TD

    def _run_one(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        h = self.norm1.add_run(x_TD, fed_TD)
        return x_TD, self._feed(h) if self.mixer is None else self._mix(h, batch, angles)

    def _run_scaled_post(
        self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]
    ) -> Tensor:
        kept, mixed, kept2, fed = self.spec.post_scales
        h = self.norm1.run(x_TD)
        x_TD = h * kept + self._mix(h, batch, angles) * mixed
        h = self.norm2.run(x_TD)
        return h * kept2 + self._feed(h) * fed

    def _run_sided(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """As pre; the side experts' sum waits in the batch for the end of the next block."""
        mixed = self._mix(self.norm1.run(x_TD), batch, angles)
        h = self.norm2.run(x_TD := x_TD + mixed)
        before, batch.scratch.deferred_TD = batch.scratch.deferred_TD, self.deferred_moe.run(h)
        x_TD += self._feed(h)
        return x_TD if before is None else x_TD + before

    def _run_pre(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        mixed = self._mix(self.norm1.add_run(x_TD, fed_TD), batch, angles)
        fed = self._feed(self.norm2.add_run(x_TD, mixed), batch)
        if batch.scratch.deferred_TD is not None:
            x_TD += fed
            fed, batch.scratch.deferred_TD = batch.scratch.deferred_TD, None
        return x_TD, fed

    def _run_post(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        x_TD += self.norm1.run(self._mix(x_TD, batch, angles))
        x_TD += self.norm2.run(self._feed(x_TD))
        return x_TD

    def _run_post_sum(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        x_TD += self._mix(x_TD, batch, angles)
        x_TD = self.norm1.run(x_TD)
        x_TD += self._feed(x_TD)
        return self.norm2.run(x_TD)

    def _run_prenorm_ffn_only(
        self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]
    ) -> Tensor:
        x_TD += self._feed(self.norm1.add_run(x_TD, self._mix(x_TD, batch, angles)))
        return x_TD

    def _run_weighted(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """A sandwich whose residual and branches have factors."""
        assert self.spec.weights is not None
        kept, mixed, kept2, fed = self.spec.weights
        x_TD = x_TD * kept + self.norm2.run(self._mix(self.norm1.run(x_TD), batch, angles)) * mixed
        return x_TD * kept2 + self.norm4.run(self._feed(self.norm3.run(x_TD))) * fed

    def _run_affine(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """As pre, where both sides of each sum are moved and scaled first."""
        x_TD = self.affine1.run(x_TD, self._mix(self.norm1.run(x_TD), batch, angles))
        h_TD = self.norm2.run(x_TD)
        if isinstance(self.ffn, MoeLayer):
            return self.affine2.run(x_TD, self.ffn.run(h_TD, None, batch))
        return self.affine2.run(x_TD, self.ffn.run(h_TD))

    def _run_convolved(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        """As pre, where the mixer's layer also convolves what the feed-forward gives."""
        assert isinstance(self.mixer, RelativeAttentionLayer)
        mixed = self._mix(self.norm1.add_run(x_TD, fed_TD), batch, angles)
        return x_TD, self.mixer.behind_ffn(self._feed(self.norm2.add_run(x_TD, mixed)), batch)

    def _run_kept(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """As pre, where the residual has factors a channel."""
        mixed = self._mix(self.norm1.run(x_TD), batch, angles)
        x_TD = (x_TD * self._kept[0] + mixed).to(x_TD.dtype)
        return (x_TD * self._kept[1] + self._feed(self.norm2.run(x_TD))).to(x_TD.dtype)

    def _run_gated(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """A sandwich whose residual and branches have learned factors a channel."""
        (kept, mixed), (kept2, fed) = self._gates
        branch = self.norm2.run(self._mix(self.norm1.run(x_TD), batch, angles))
        x_TD = (x_TD * kept + branch * mixed).to(x_TD.dtype)
        branch = self.norm4.run(self._feed(self.norm3.run(x_TD)))
        return (x_TD * kept2 + branch * fed).to(x_TD.dtype)

    def _run_sandwich(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        mixed = self.norm2.run(self._mix(self.norm1.add_run(x_TD, fed_TD), batch, angles))
        return x_TD, self.norm4.run(self._feed(self.norm3.add_run(x_TD, mixed)))

    def _run_beside(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        mixed = self.norm2.run(self._mix(self.norm1.add_run(x_TD, fed_TD), batch, angles))
        fed = self.norm5.run(self._feed(self.norm3.add_run(x_TD, mixed)))
        fed += self.norm7.run(self.parallel_moe.run(self.norm6.run(x_TD), x_TD))
        return x_TD, self.norm4.run(fed)

    def _run_parallel(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        h = self.norm1.add_run(x_TD, fed_TD)
        mixed = self._mix(h, batch, angles)
        return x_TD, mixed.add_(self._feed(h))

    def _run_parallel2(
        self, x_TD: Tensor, fed_TD: Tensor | None, batch: ForwardBatch, angles: Angled
    ) -> Joining:
        mixed = self._mix(self.norm1.add_run(x_TD, fed_TD), batch, angles)
        return x_TD, mixed.add_(self._feed(self.norm2.run(x_TD)))


def _layout(spec: Block) -> str:
    """Which ``_run_`` is the block's."""
    if None in (spec.ffn, spec.mixer):
        return "none" if spec.ffn is spec.mixer else "one"
    special = {
        "convolved": isinstance(spec.mixer, RelativeAttention),
        "affine": spec.affine_residual,
        "kept": spec.residual_channels,
        "gated": spec.gate_temperature > 0,
        "weighted": spec.weights is not None,
        "beside": spec.parallel_moe is not None,
        "sided": spec.deferred_moe is not None,
    }
    return next((name for name, is_it in special.items() if is_it), spec.layout)


def _shares(gate_D: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the residual and of the branch, whose squares sum to one: [D] each."""
    share = torch.sigmoid(gate_D)
    return torch.sqrt((torch.sigmoid(-gate_D) * (1.0 + share)).clamp(min=LEAST_KEPT)), share
