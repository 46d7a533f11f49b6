"""Parameters of the mixers that keep a state."""

from __future__ import annotations

from radixlm.arch.spec import (
    CompressedAttention,
    DeltaNet,
    Lightning,
    Mamba1,
    Mamba2,
    MatrixLstm,
    RelativeAttention,
    RgLru,
    RwkvChannel,
    RwkvTime,
    ShortConv,
    StateMixer,
)


def state_parameters(mixer: StateMixer, dim: int) -> tuple[int, int]:
    """Parameters of (matrices, everything else) of a mixer in a model of width ``dim``."""
    match mixer:
        case ShortConv():
            matrices = 4 * mixer.channels * dim
            return matrices, mixer.channels * (mixer.width + 4 * mixer.bias) + _extra(mixer, dim)
        case Mamba1():
            return _mamba1(mixer, dim)
        case Mamba2():
            rows = mixer.inner + mixer.conv_channels + mixer.heads
            vectors = mixer.conv_channels * (mixer.width + mixer.conv_bias) + 3 * mixer.heads
            vectors += (rows + dim) * mixer.bias + (mixer.inner if mixer.norm else 0)
            return (rows + mixer.inner) * dim, vectors
        case DeltaNet():
            return _delta(mixer, dim)
        case Lightning():
            width = mixer.heads * mixer.head_dim
            return 5 * width * dim, width
        case CompressedAttention():  # beside what attention has
            channels = mixer.conv_channels
            widths = mixer.widths[0] + mixer.attention.head_dim * mixer.widths[1]
            return 0, channels * (widths + 2) + mixer.attention.kv_heads
        case RelativeAttention():
            rows = mixer.attention.heads * mixer.rank
            channels = 2 * mixer.kv_channels + 2 * mixer.dim
            return rows * dim, mixer.rank * mixer.extent + channels * mixer.width
        case RwkvTime():
            return 4 * mixer.channels * dim, 2 * mixer.channels + 3 * dim
        case RwkvChannel():
            return dim * (2 * mixer.inner + dim), 2 * dim
        case MatrixLstm():
            values = mixer.heads * mixer.v_dim
            rows = 2 * mixer.heads * mixer.k_dim + 3 * values + 2 * mixer.heads
            return rows * dim, 2 * mixer.heads + values
        case RgLru():
            block = mixer.channels // mixer.heads
            matrices = 3 * dim * mixer.channels + 2 * mixer.channels * block
            return matrices, mixer.channels * (mixer.width + 6) + dim


def _extra(mixer: ShortConv, dim: int) -> int:
    return (dim - 0) * mixer.bias


def _mamba1(mixer: Mamba1, dim: int) -> tuple[int, int]:
    inner = mixer.inner
    projections = inner * (mixer.rank + 2 * mixer.state) + mixer.rank * inner
    vectors = inner * (mixer.state + 2 + mixer.width + mixer.conv_bias)
    vectors += (2 * inner + dim) * mixer.bias
    if mixer.norm is not None and mixer.norm.affine:
        vectors += mixer.rank + 2 * mixer.state
    return 3 * inner * dim + projections, vectors


def _delta(mixer: DeltaNet, dim: int) -> tuple[int, int]:
    values = mixer.v_heads * mixer.v_dim
    matrices = (mixer.conv_channels + mixer.v_heads + values) * dim
    decays = mixer.v_heads
    if mixer.channel_decay:
        decays = mixer.v_heads * mixer.k_dim
    if mixer.channel_decay and mixer.low_rank:
        matrices += 2 * dim * mixer.v_dim + mixer.v_dim * (decays + values)
    else:
        matrices += (decays + values) * dim
    vectors = mixer.conv_channels * mixer.width + mixer.v_heads + decays + mixer.v_dim
    runs = mixer.ngrams
    if runs is not None:  # the table is looked up
        wide = runs.streams * runs.width
        matrices += runs.dim * (wide + runs.width)
        vectors += runs.rows * (runs.dim // len(runs.sizes)) + wide * (3 + runs.conv)
    return matrices, vectors
