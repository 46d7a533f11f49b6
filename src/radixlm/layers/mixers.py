"""The mixer of a block: attention, a recurrent state, both in parallel, or one matrix.

Legend: T tokens, D model channels.
"""

from collections.abc import Sequence

from torch import Tensor

from radixlm.arch.spec import (
    Attention,
    Block,
    CenteredConv,
    ClippedRelativeAttention,
    CompressedSparseAttention,
    ConvAttention,
    LatentAttention,
    MatrixLstm,
    ParallelHybrid,
    RotatedLightning,
    RwkvChannel,
    RwkvTime,
    SquareLinear,
)
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.clipped_attention import ClippedRelativeAttentionLayer
from radixlm.layers.compressed_attention import CompressedSparseAttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.convolved_attention import ConvolvedLayer, make_convolved
from radixlm.layers.expert_attention import ExpertAttentionLayer
from radixlm.layers.extended_attention import ExtendedAttentionLayer
from radixlm.layers.latent import LatentAttentionLayer
from radixlm.layers.looped_attention import LoopedAttentionLayer
from radixlm.layers.mlstm import MatrixLstmLayer
from radixlm.layers.module import Module
from radixlm.layers.program import Branch, ProgramBuilder, Unsupported, handles
from radixlm.layers.recurrent import CenteredConvLayer, make_state_layer
from radixlm.layers.rope import Angles
from radixlm.layers.rotated_lightning import RotatedLightningLayer
from radixlm.layers.rwkv import RwkvChannelLayer, RwkvTimeLayer
from radixlm.layers.state import StateLayer
from radixlm.step.batch import AttentionSite, ForwardBatch

SelfAttention = (
    AttentionLayer
    | LatentAttentionLayer
    | ExtendedAttentionLayer
    | CompressedSparseAttentionLayer
    | ExpertAttentionLayer
)


class SquareLinearLayer(Module):
    """One matrix where others have a mixer or a feed-forward."""

    def __init__(self, spec: SquareLinear, dim: int, context: LayerContext) -> None:
        self.matrix = context.linear(dim, dim, spec.bias)

    def run(self, x_TD: Tensor, *_: object) -> Tensor:
        """The branch: [T, D]."""
        return self.matrix.run(x_TD)


class ParallelHybridLayer(Module):
    """Attention and a state mixer on the same input, added."""

    def __init__(self, spec: ParallelHybrid, attention: SelfAttention, state: StateLayer) -> None:
        self.spec, self.attention, self.state = spec, attention, state

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        return self.attention.run(x_TD, batch, angles) + self.state.run(x_TD, batch, angles)

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """See ``emit_mixer``."""
        handles(self.spec, "attention", "state")
        return [
            *emit_mixer(self.attention, program, source),
            *emit_mixer(self.state, program, source),
        ]


Mixer = (
    SelfAttention
    | StateLayer
    | ParallelHybridLayer
    | SquareLinearLayer
    | CenteredConvLayer
    | ConvolvedLayer
    | ClippedRelativeAttentionLayer
    | RwkvTimeLayer
    | RwkvChannelLayer
)
EMITTED = AttentionLayer | LatentAttentionLayer | ExtendedAttentionLayer | ParallelHybridLayer


def emit_mixer(mixer: Module, program: ProgramBuilder, source: int) -> list[Branch]:
    """What the mixer leaves before its output projections."""
    if not isinstance(mixer, EMITTED | StateLayer):
        raise Unsupported(type(mixer).__name__)
    return mixer.emit(program, source)


def make_mixer(
    spec: Block,
    dim: int,
    context: LayerContext,
    rope: int,
    pool: tuple[int, int],
    state_row: int,
) -> Mixer | None:
    """The layer of a block's mixer; the arguments are those of ``BlockLayer``."""
    mixer = spec.mixer
    if isinstance(mixer, ClippedRelativeAttention):
        return ClippedRelativeAttentionLayer(mixer, dim, context, (pool, state_row))
    if isinstance(mixer, ConvAttention):
        return make_convolved(mixer, dim, context, rope, pool, state_row)
    if isinstance(mixer, MatrixLstm):
        return MatrixLstmLayer(mixer, dim, context, state_row)
    if isinstance(mixer, RotatedLightning):
        return RotatedLightningLayer(mixer, dim, context, state_row, rope)
    if isinstance(mixer, RwkvTime):
        return RwkvTimeLayer(mixer, dim, context, state_row)
    if isinstance(mixer, RwkvChannel):
        return RwkvChannelLayer(mixer, dim, context, state_row)
    if isinstance(mixer, CenteredConv):
        return CenteredConvLayer(mixer, dim, context)
    if isinstance(mixer, SquareLinear):
        return SquareLinearLayer(mixer, dim, context)
    attention = state = None
    if spec.attention is not None:
        attention = make_attention(spec.attention, dim, context, rope, pool)
    if spec.state is not None:
        state = make_state_layer(spec.state, dim, context, state_row)
    if isinstance(mixer, ParallelHybrid) and attention is not None and state is not None:
        return ParallelHybridLayer(mixer, attention, state)
    return attention or state


def make_attention(
    spec: Attention | LatentAttention | CompressedSparseAttention,
    dim: int,
    context: LayerContext,
    rope: int,
    pool: tuple[int, int],
) -> SelfAttention:
    """The layer of an attention's record."""
    if isinstance(spec, LatentAttention):
        return LatentAttentionLayer(spec, dim, context, rope, pool)
    if isinstance(spec, CompressedSparseAttention):
        return CompressedSparseAttentionLayer(spec, dim, context, rope, pool)
    if spec.extras is not None and spec.extras.experts:
        return ExpertAttentionLayer(spec, dim, context, rope, pool)
    if spec.extras is not None and spec.extras.later_window:
        return LoopedAttentionLayer(spec, dim, context, rope, pool)
    kind = AttentionLayer if spec.extras is None else ExtendedAttentionLayer
    return kind(spec, dim, context, rope, pool)


def site_of_mixer(mixer: Mixer | None) -> AttentionSite | None:
    """The site of a mixer that attends."""
    attention = mixer.attention if isinstance(mixer, ParallelHybridLayer) else mixer
    return getattr(attention, "site", None)
