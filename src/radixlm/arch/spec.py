"""What a language model is, as frozen records: no torch, no layer code, no model names.

A family (``arch/families``) turns a checkpoint's config.json into a ``Decoder``. Layers, memory,
weights, quantization and benchmarks read these records instead of testing a model's name. Read
``Decoder`` at the end first, then ``Block``, ``Attention``, ``Mlp`` and ``Moe``; everything else is
for some models only. The file is over 500 lines because it is one vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from radixlm.base.record import Record, field

Activation = Literal[
    "silu",
    "gelu",
    "gelu_tanh",
    "gelu_quick",
    "relu",
    "relu2",
    "swiglu_oai",
    "xielu",
    "tanh",
    "poly_norm",
]
Layout = Literal[
    "pre",
    "post",
    "post_sum",
    "sandwich",
    "parallel",
    "parallel2",
    "prenorm_ffn_only",
    "scaled_post",
    "gated_cross",
    "early_experts",
]


class Norm(Record):
    """RMS norm or layer norm."""

    eps: float
    kind: Literal["rms", "layer", "none"] = "rms"
    offset: float = 0.0  # added to the stored weight: 1.0 where checkpoints store (weight - 1)
    bias: bool = False
    affine: bool = True  # has weights
    scales_input: bool = False  # the weight multiplies the input before it is normalized


class RopeScaling(Record):
    """Scaled rotary embedding, as Hugging Face's ``rope_parameters``; see ``arch/rope.py``."""

    kind: Literal["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    # sorted (key, value) pairs of the checkpoint without rope_type and rope_theta, lists as tuples,
    # with the lengths from the config that the formula needs
    params: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()


class Rope(Record):
    """Rotary position embedding of the first ``dim`` channels of each head.

    With ``mrope_sections`` a token has three positions (time, row, column of an image patch), and
    the sections say how many frequencies use each of them (M-RoPE, arXiv:2409.12191).
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False  # rotates pairs (0,1)(2,3).. instead of (0,d/2)(1,d/2+1)..
    negative_angles: bool = False  # rotates in the other direction
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = False  # frequencies are dealt out to the sections one by one
    mrope_paired: bool = False  # row and column alternate first, time has the last frequencies
    # sections are (column, row, image index), after the prompt position if there are four; each
    # covers twice as many channels, so that the two of a rotated pair may use different positions
    mrope_by_channel: bool = False
    chunk: int = 0  # positions count anew after so many tokens; 0 = never
    learned: bool = False  # each frequency is multiplied by e to the power of a learned number

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on the length of the sequence (dynamic, longrope)."""
        return self.scaling is not None and self.scaling.kind in ("dynamic", "longrope")


class LogNScaling(Record):
    """Queries are scaled by their position: by 1 + beta * log(1 + floor((position + offset) /
    period)), or with ``is_power`` by (1 + (position + offset) / period) ** beta."""

    beta: float
    period: float
    offset: int = 0
    is_power: bool = False


class BlockSparse(Record):
    """Block-sparse attention (Phi-3-small). A query sees its own block of ``size`` tokens, the
    ``local`` - 1 blocks before it and every ``stride``-th earlier block; the pattern is shifted by
    ``step`` blocks from head to head."""

    size: int
    local: int
    stride: int
    step: int


class BlockIndexer(Record):
    """Chooses the blocks of ``size`` tokens that a query reads (MiniMax-M3).

    Each of ``heads`` index queries stands for an equal share of the attention heads. It takes the
    ``top`` blocks whose best index key scores highest, always with the ``local`` newest ones.
    Index keys of ``dim`` channels are cached beside K, a part with each KV head. Index queries and
    keys are normalized and rotated like those of the attention.
    """

    heads: int
    dim: int
    size: int
    top: int
    local: int
    norm: Norm
    # instead: all heads share the best whole blocks, scored by the mean of their index keys, and
    # the tokens after the last whole block
    is_mean: bool = False


class DualChunk(Record):
    """Dual chunk attention (arXiv:2402.17463, Qwen2.5-1M: arXiv:2501.15383): no key looks farther
    away than ``size`` tokens.

    Positions are cut into chunks of ``chunk`` tokens; a key is rotated by its place in its chunk.
    A query is rotated by its place p for keys of its own chunk, by min(p + chunk, size) for those
    of the chunk before, and by min(2 * chunk - 1, size) for all earlier ones. Beyond ``trained``
    positions (0: never) scores are multiplied by (1 + 0.1 * log(length / trained)) ** 2.
    """

    chunk: int
    size: int
    trained: int = 0


class AttentionExtras(Record):
    """What only some attentions have. The fused kernels know none of it."""

    v_dim: int = 0  # channels of a value head; 0 = head_dim
    alibi_slopes: tuple[float, ...] = ()  # a head each: slope * (key - query position) is added
    alibi_of_root: bool = False  # slope * -sqrt(query - key position) instead
    attention_chunk_size: int = 0  # a token sees only its own chunk of this many positions
    chunk_lookback: int = 0  # and so many chunks before it
    clip_qkv: float = 0.0  # q, k and v are clamped to +- this number
    clip_after_norm: bool = False  # after the norms of q and k, not before
    norm_after_rope: bool = False
    logn_scaling: LogNScaling | None = None
    out_norm: Norm | None = None  # of the attention output, before the o projection
    out_norm_heads: bool = False  # each head is normalized alone, weights [head_dim]
    v_norm: Norm | None = None  # of each value head
    v_scale: float = 1.0
    k_scale: float = 1.0
    out_scale: float = 1.0  # of what the heads read, before norms and gates
    # reads K and V of this earlier layer and has none of its own; -1: of a layer of another model
    kv_from: Annotated[int, "may be negative"] | None = None
    k_is_v: bool = False  # values are the keys before their norm and rotation
    gate: Literal["", "channel", "head"] = ""  # a projection that gates the output: a number for
    # each channel or for each head
    # sigmoid2: 2 * sigmoid
    gate_act: Literal["sigmoid", "softplus", "sigmoid2", "silu"] = "sigmoid"
    gate_bias: bool = False
    block_sparse: BlockSparse | None = None
    dual_chunk: DualChunk | None = None  # with a rope that has the same ``chunk``
    indexer: BlockIndexer | None = None
    # differential attention (arXiv:2410.05258): the two halves of the heads attend apart, both over
    # the values of both, and a learned share of the second is subtracted; its initial value, 0 = no
    diff_lambda_init: Annotated[float, "may be negative"] = 0.0
    # dynamic mask attention (arXiv:2508.02124): scores gain exp(a * softplus(.)) of a learned map
    # of the token's values, one number a KV head; a query reads this many with the largest; 0 = no
    dynamic_mask_topk: int = 0
    experts: int = 0  # of the q and o projections; a token takes heads / kv_heads of them (JetMoe)
    q_rank: int = 0  # q is projected down to this width, normalized and up; 0 = one projection
    q_rank_norm: Norm | None = None
    # of blocks that run several times (HierarchicalRecurrence): a later run has keys of its own
    # with this window; a gate of each head weighs what they give against the first run's keys
    later_window: int = 0
    is_causal: bool = False  # causal even where tokens of an image see one another in other layers
    # each head's query and value are multiplied by sigmoid(rate * log(1 + position)) + 1 / 2 + tanh
    # of a learned map of gelu(q, k and v of all heads); kv_heads = heads
    scaled_by_token: bool = False


class Attention(Record):
    """Softmax attention with grouped KV heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    qkv_bias: bool = False
    o_bias: bool = False
    # "head": weights [head_dim] shared by all heads; "each": a head alone, weights
    # [heads, head_dim]; "row": the whole projection is normalized at once
    qk_norm: Literal["", "head", "each", "row"] = ""
    qk_norm_spec: Norm | None = None
    scale: float | None = None  # None = head_dim ** -0.5
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0 = all
    softcap: float = 0.0
    sinks: bool = False  # one learned logit a head joins the softmax
    gate: Literal["", "head"] = ""  # sigmoid output gate from a second half of the q projection
    extras: AttentionExtras | None = None

    @property
    def v_dim(self) -> int:
        return (self.extras.v_dim if self.extras else 0) or self.head_dim

    @property
    def k_row(self) -> int:
        """Numbers of a token and KV head in the K cache: the key and its part of the index key."""
        index = self.extras.indexer if self.extras else None
        return self.head_dim + (-(-index.dim // self.kv_heads) if index else 0)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class Indexer(Record):
    """Chooses the ``top_k`` tokens that a latent attention reads (DeepSeek-V3.2, arXiv:2512.02556).

    ``heads`` light queries score index keys of ``dim`` channels, which are cached beside the
    latent. The first channels are rotated like those of the attention.
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool
    norm: Norm
    is_shared: bool = False  # reuses the choice of the last layer that made one
    rope_on_tail: bool = False  # the last channels are rotated, not the first
    pool: int = 0  # chooses whole pools of this many tokens; those after the last pool are read too
    # its queries read the layer's input under this norm, not the attention's low-rank queries
    input_norm: Norm | None = None
    log_scaling: bool = False  # as in LatentAttention

    @property
    def row(self) -> int:
        """Numbers of a token in the cache."""
        return self.dim * (2 if self.pool else 1)


class LatentAttention(Record):
    """Multi-head latent attention (MLA, arXiv:2405.04434). The cache holds ``kv_rank + rope_dim``
    numbers a token. ``sinks`` and ``window`` as in ``Attention``, ``gate`` as in its extras."""

    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    q_rank: int  # 0 = one q projection
    rope: Rope | None
    norm: Norm
    scale: float  # with YaRN's mscale squared in it
    bias: bool = False
    indexer: Indexer | None = None
    window: int = 0
    sinks: bool = False
    gate: Literal["", "channel", "head"] = ""
    rope_norm: Norm | None = None  # of the rotated key that all heads share, before its rotation
    logn_scaling: LogNScaling | None = None
    # the second q projection reads its input before and after the norm, and its outputs behind
    # each head's query are a gate for each channel of the head's value
    gate_from_q: bool = False
    # each head's query is multiplied by bias + scale * log(1 + position), both learned
    log_scaling: bool = False
    # of layers that have as many rotated channels: the last that "keeps" its latents lends them to
    # those after it that "borrow", which have no kv_a
    latents: Literal["own", "keeps", "borrows"] = "own"

    @property
    def row(self) -> int:
        """Numbers of a token in the cache."""
        own = self.indexer.row if self.indexer and not self.indexer.is_shared else 0
        return self.kv_rank + self.rope_dim + own


class KVCompression(Record):
    """Cache entries that each sum up ``rate`` neighboring tokens, channel by channel with learned
    weights. An entry is normalized, and rotated by the position of its first token. A query reads
    the entries of all complete runs before it, or the ``top_k`` that an indexer chooses."""

    rate: int
    overlaps: bool  # an entry also sums up the ``rate`` tokens before its own
    heads: int = 0  # of the indexer
    dim: int = 0  # of the indexer's own entries
    top_k: int = 0

    def raw(self, dim: int) -> int:
        """Numbers that a token contributes to entries of ``dim`` channels: values and weights."""
        return 2 * dim * (2 if self.overlaps else 1)


class CompressedSparseAttention(Record):
    """Attention to the ``sliding_window`` newest tokens, whose key is also their value, and to
    compressed entries of earlier ones (DeepSeek-V4). The last channels are rotated; the output is
    rotated back by the query's position and projected in ``groups`` of heads to ``group_rank``
    channels each, then all together."""

    heads: int
    head_dim: int
    rope: Rope
    sliding_window: int
    q_rank: int
    norm: Norm
    groups: int
    group_rank: int
    sums: KVCompression | None = None

    @property
    def row(self) -> int:
        """Numbers cached of each token until the window has passed."""
        sums = self.sums
        return self.head_dim + (sums.raw(self.head_dim) + sums.raw(sums.dim) if sums else 0)

    @property
    def entry(self) -> int:
        """Numbers of a compressed entry, which is stored with the last of its tokens."""
        return self.head_dim + self.sums.dim if self.sums else 0

    @property
    def window(self) -> int:
        """Tokens to keep in the cache: those that are read and those not yet compressed."""
        runs = 0 if self.sums is None else 2 if self.sums.overlaps else 1
        return max(self.sliding_window, runs * self.sums.rate if self.sums else 0)


State = tuple[
    tuple[int, ...], bool
]  # (shape, whether it accumulates all past tokens), of a sequence


class ShortConv(Record):
    """A gated causal convolution (LFM2): out(c * conv(b * x)) where (b, c, x) = in(x)."""

    channels: int
    width: int
    bias: bool = False

    @property
    def states(self) -> tuple[State, ...]:
        return (((self.channels, self.width - 1), False),)


class CenteredConv(Record):
    """``ShortConv`` of an encoder: a token sees its neighbours on both sides, of its text only."""

    channels: int
    width: int
    bias: bool = False


class Mamba1(Record):
    """Selective state space model (Mamba, arXiv:2312.00752)."""

    inner: int
    state: int
    rank: int  # of the time step projection
    width: int  # of the convolution
    conv_bias: bool = True
    bias: bool = False
    norm: Norm | None = None  # of time step, B and C, each
    heads: int = 1  # groups of channels, each with a time step, B and C made of its own channels
    act: Activation = "silu"  # of the convolution

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.inner, self.width - 1), False), ((self.inner, self.state), True)


class Mamba2(Record):
    """State space duality: one decay a head (Mamba-2, arXiv:2405.21060). ``norm`` is of the
    output times the gate, or with ``gate_after_norm`` of the output alone; None = only the gate."""

    heads: int
    head_dim: int
    state: int
    groups: int
    width: int
    norm: Norm | None
    norm_groups: int = 1
    gate_after_norm: bool = False
    conv_bias: bool = True
    bias: bool = False  # of the projection in
    out_bias: bool = False
    dt_limit: tuple[float, Annotated[float, "may be infinite"]] = (0.0, math.inf)
    act: Activation = "silu"  # of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def states(self) -> tuple[State, ...]:
        conv = (self.conv_channels, self.width - 1)
        return (conv, False), ((self.heads, self.head_dim, self.state), True)


Wide = Annotated[int, "may exceed 32 bits"]


class Ngrams(Record):
    """Hashed n-gram embeddings (Qwen4-Exp): every run of up to ``length`` tokens is hashed into
    tables of ``sizes`` rows, joined and padded to ``rows``, of ``dim`` channels in all. The result
    is added to ``streams`` of ``width`` channels through a gate each and a convolution over every
    ``length``-th of ``conv`` tokens. A run does not reach back beyond the token ``end``."""

    dim: int
    rows: int
    sizes: tuple[int, ...]  # of each hash head, shorter runs first
    multipliers: tuple[Wide, ...]
    length: int
    end: int
    streams: int
    width: int
    conv: int
    norm: Norm

    @property
    def states(self) -> tuple[State, ...]:
        kept = (self.conv - 1) * self.length
        return ((self.streams * self.width, kept), False), ((self.length - 1,), False)


class DeltaNet(Record):
    """Gated delta rule (arXiv:2412.06464): a state matrix a head that decays and is corrected
    towards each new key and value."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int
    norm: Norm
    beta_scale: float = 1.0
    gate_act: Literal["silu", "sigmoid"] = "silu"
    channel_decay: bool = False  # one decay for each key channel (KDA, arXiv:2510.26692)
    low_rank: bool = (
        True  # with channel_decay: decay and gate are projected by way of v_dim channels
    )
    ngrams: Ngrams | None = None  # of its block; their states follow those of the delta rule
    decay_floor: float = 0.0  # below 0: log decay = floor * sigmoid(.); 0 = by a softplus
    act: Activation = "silu"  # of the convolution
    # above 0, the convolution is of the values alone, and its taps are made of the token by way of
    # this many channels (Jet-Nemotron, arXiv:2508.15884)
    tap_rank: int = 0

    @property
    def qkv_channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def conv_channels(self) -> int:
        return self.v_heads * self.v_dim if self.tap_rank else self.qkv_channels

    @property
    def states(self) -> tuple[State, ...]:
        conv = (self.conv_channels, self.width - 1)
        own = (conv, False), ((self.v_heads, self.k_dim, self.v_dim), True)
        return own if self.ngrams is None else own + self.ngrams.states


class Lightning(Record):
    """Linear attention with a fixed decay a head (Lightning Attention, arXiv:2401.04658)."""

    heads: int
    head_dim: int
    decays: tuple[float, ...]  # of each head: log of the factor for each token
    norm: Norm
    act: Activation = "silu"

    @property
    def states(self) -> tuple[State, ...]:
        return (((self.heads, self.head_dim, self.head_dim), True),)


class RotatedLightning(Record):
    """Lightning attention whose queries and keys are normalized and rotated (Ling 2.5). ``norm`` is
    of the outputs, in ``norm_groups`` groups of channels; then they are gated."""

    heads: int
    head_dim: int
    decays: tuple[float, ...]  # as in ``Lightning``
    norm: Norm
    norm_groups: int
    rope: Rope | None
    qk_norm: Norm | None
    act: Literal["", "silu"] = ""  # of queries, keys and values
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def states(self) -> tuple[State, ...]:
        return (((self.heads, self.head_dim, self.head_dim), True),)


class RgLru(Record):
    """Real-gated linear recurrent unit after a convolution (Griffin, arXiv:2402.19427)."""

    channels: int
    heads: int  # diagonal blocks of the gate projections
    width: int
    act: Activation

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.channels, self.width - 1), False), ((self.channels,), True)


class CompressedConvAttention(Record):
    """Compressed convolutional attention (Zaya, arXiv:2510.04476). Queries and keys pass two
    convolutions of ``widths`` tokens, one by channel and one by head, and a mean of both is added.
    Each head of q and k is scaled to unit length, keys times a learned number. Half of the value
    channels are those of the token before."""

    attention: Attention
    widths: tuple[int, int]

    @property
    def conv_channels(self) -> int:
        return (self.attention.heads + self.attention.kv_heads) * self.attention.head_dim

    @property
    def late_channels(self) -> int:
        """Value channels that come one token late."""
        return self.attention.kv_heads * self.attention.head_dim // 2

    @property
    def states(self) -> tuple[State, ...]:
        tokens = sum(self.widths) - 2
        return ((self.conv_channels, tokens), False), ((self.late_channels,), False)


class _ConvolvedHeads(Record):
    """Attention with a bias by distance and four convolutions of ``width`` tokens, of keys, values,
    the output and the feed-forward's output."""

    attention: Attention
    dim: int  # channels of the model
    width: int
    rank: int
    extent: int

    @property
    def kv_channels(self) -> int:
        return self.attention.kv_heads * self.attention.head_dim

    @property
    def states(self) -> tuple[State, ...]:
        channels = (self.kv_channels, self.kv_channels, self.dim, self.dim)
        return tuple(((count, self.width - 1), False) for count in channels)


class RelativeAttention(_ConvolvedHeads):
    """Attention without rotation (Inkling). A score gains, up to ``extent`` tokens back, a bias by
    distance: ``rank`` numbers of the query head times as many learned profiles. Keys, values, the
    attention output and the feed-forward output each pass a residual convolution of ``width``
    tokens."""

    grows_from: int = 0  # from this position on queries and profiles are scaled by
    growth: float = 0.0  # 1 + growth * log(position / grows_from); 0 = never


class ClippedRelativeAttention(_ConvolvedHeads):
    """Relative attention of vectors of bounded length (Inkling 2). A longer head of a query, a key
    or the ``rank`` numbers is scaled down to ``longest`` or ``longest_rank``, queries and numbers
    after learned factors a channel. The convolutions divide their sums by the root of the terms.
    Each token has a sink of its own for each head; the output is gated a channel."""

    longest: float
    longest_rank: float
    norm: Norm  # of each head's value, without weights
    # queries, keys and values read inputs of their own, and tokens add to the weights of the
    # convolutions of keys and values, those of a head alike
    is_dynamic: bool = False
    grows_from: int = 0  # as in RelativeAttention
    growth: float = 0.0


class RwkvTime(Record):
    """RWKV's time mixing (arXiv:2305.13048): values weighed by exp(key), decaying by channel.
    All projections read a learned mix of the token and the token before."""

    channels: int
    dim: int

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.dim,), False), *(((self.channels,), True),) * 3


class RwkvChannel(Record):
    """RWKV's channel mixing, the feed-forward, which reads the token before too."""

    inner: int
    dim: int

    @property
    def states(self) -> tuple[State, ...]:
        return (((self.dim,), False),)


class MatrixLstm(Record):
    """The mLSTM of xLSTM (arXiv:2405.04517): a matrix a head that sums up keys times values
    with exponential input gates and forget gates; its output is divided by the sum of the keys."""

    heads: int
    k_dim: int
    v_dim: int
    norm: (
        Norm  # of each head's output, without weights; one vector of weights for all heads follows
    )
    gate_cap: float = 0.0
    eps: float = 1e-6

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.heads, self.v_dim + 1, self.k_dim), True), ((self.heads,), True)


# attention with a recurrent state
ConvAttention = CompressedConvAttention | RelativeAttention | ClippedRelativeAttention
Rwkv = RwkvTime | RwkvChannel
StateMixer = (
    ShortConv
    | Mamba1
    | Mamba2
    | DeltaNet
    | Lightning
    | RotatedLightning
    | RgLru
    | ConvAttention
    | Rwkv
    | MatrixLstm
)


class ParallelHybrid(Record):
    """Attention and a state mixer on the same input, their outputs added (Falcon-H1)."""

    attention: Attention
    state: StateMixer


class CrossAttention(Record):
    """Attention to the rows that the vision encoder makes of a prompt's images, without
    positions. A token sees the images of the last group of adjacent ones before it; a token before
    all images sees all of them. ``bias``: of q, v and the output."""

    heads: int
    kv_heads: int
    head_dim: int
    norm: Norm | None  # of q and k, a head
    bias: bool = False

    @property
    def rows(self) -> tuple[int, int]:
        """Outputs of the projections: q; k and v each."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim


class SquareLinear(Record):
    """One square matrix in place of a mixer or a feed-forward (DeciLM)."""

    bias: bool = False


class Mlp(Record):
    """Feed-forward: down(act(up(x))), or gated: down(act(gate(x)) * up(x))."""

    inner: int
    act: Activation
    gated: bool = True
    bias: bool = False
    down_bias: bool = False  # of the down projection, where ``bias`` is not set
    sub_norm: Norm | None = None  # of the inner channels, before the down projection
    sparsity: float = 0.0  # share of gate channels set to 0, by mean and standard deviation
    limit: float = 0.0  # clamps the gate from above and up on both sides; 0 = none, or that of act
    limit_after: bool = False  # the gate is clamped after its activation
    out_scale: bool = False  # a learned number multiplies the output


class DeepRouter(Record):
    """A router of three layers of ``width`` channels."""

    width: int
    norm: Norm
    chained: bool  # adds the same channels of the layer before, times learned numbers


class Moe(Record):
    """Mixture of experts with top-k routing."""

    experts: int
    top_k: int
    inner: int
    act: Activation
    # how logits become weights; _topk: the softmax or sigmoid is over the chosen logits only;
    # sparsemixer: arXiv:2409.12136
    score: Literal[
        "softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer", "sqrtsoftplus"
    ] = "softmax"
    renorm: bool = False  # chosen weights are divided by their sum
    scale: float = 1.0  # of the chosen weights
    correction: bool = False  # a learned bias for the choice that does not change the weights
    groups: tuple[int, int] = (1, 1)  # (groups of experts, groups that a token may choose from)
    group_score: Literal["top2", "max"] = "top2"  # of a group: the sum of its best two, or the best
    shared: Mlp | None = None  # an expert that every token takes
    shared_gate: bool = False
    bias: bool = False  # router and experts have biases
    gated: bool = True
    scale_input: bool = False  # the weight multiplies an expert's input, not its output
    zero_experts: int = 0  # further experts without weights, which return their input
    zero_experts_are_identity: bool = True  # or zero
    out_bias: bool = False  # of the sum of all experts
    out_norm: Norm | None = None  # of the sum of all experts
    jitter: float = 0.0  # of sparsemixer
    router_softcap: float = 0.0
    limit: float = 0.0  # as in Mlp
    router_norm: Norm | None = None  # of the router's input
    expert_scale: bool = False  # a learned factor of each expert's weight, applied last
    limit_after: bool = False  # as in Mlp
    # softcaps of the gate, behind its sigmoid, and of up; act silu
    softcaps: tuple[float, float] = (0.0, 0.0)
    deep_router: DeepRouter | None = None
    sinks: int = 0  # experts that every token takes beside the chosen ones; the weights of both are
    # normalized together and multiplied by one learned number
    width: int = 0  # channels of the experts' inputs and outputs where x is projected to fewer
    width_norm: Norm | None = None  # of the projected input
    expert_norm: Norm | None = None  # of each expert's output, before its weight
    hash_vocab: int = 0  # experts are looked up by token id in a table of this many rows
    vision: Moe | None = None  # router and experts for media tokens
    marks: tuple[int, ...] = ()  # text tokens that count as media: boundary tokens


class SharedLayer(Record):
    """A transformer layer whose weights several blocks share (Zamba, arXiv:2405.16712):
    mlp(norm2(attention(norm1([residual; embedding])))), where norm1 and the attention read twice
    the model's channels. Each block that calls it adds low-rank adapters of its own."""

    bank: int  # layers of one bank share their weights
    call: int  # counts the calls of a bank
    attention: Attention
    ffn: Mlp
    norm: Norm
    rank: int = 0  # of the adapters of the up projection
    changes_qkv: bool = False  # q, k and v have adapters too


class Block(Record):
    """One layer. Layouts, with x the residual, n a norm, a the mixer, f the feed-forward:

    pre               x = x + a(n(x)), then the same with f
    post              x = x + n(a(x)), then the same with f
    post_sum          x = n(x + a(x)), then the same with f
    sandwich          x = x + n(a(n(x))), then the same with f
    parallel          x = x + a(n(x)) + f(n(x)), one norm
    parallel2         x = x + a(n1(x)) + f(n2(x))
    prenorm_ffn_only  pre without the mixer's norm
    scaled_post       y = n(x); x = y * s0 + a(y) * s1, then the same with f (``post_scales``)
    gated_cross       pre with a learned gate on each branch; skipped in a prompt without images,
                      and its feed-forward by tokens before the first image
    early_experts     pre; e(n(x)) of what x was before the mixer joins last, e being deferred_moe
    """

    mixer: (
        Attention
        | LatentAttention
        | CompressedSparseAttention
        | StateMixer
        | ParallelHybrid
        | CrossAttention
        | SquareLinear
        | CenteredConv
        | None
    )
    ffn: Mlp | Moe | SquareLinear | None  # only layout "pre" may lack mixer or ffn
    norm: Norm
    layout: Layout = "pre"
    residual: float = 1.0  # factor of each branch
    out_scale: bool = False  # a learned number multiplies the block's output
    deferred_moe: Moe | None = None  # experts on the feed-forward's input whose output is added
    # one block later; of layout early_experts: on the block's input
    parallel_moe: Moe | None = None  # of layout sandwich: experts on the residual, with norms of
    # their own; their output is added to the feed-forward's before the last norm
    post_scales: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)  # of layout scaled_post
    weights: tuple[float, float, float, float] | None = None  # of layout sandwich: factors of the
    # residual and the mixer's branch, then of the residual and the feed-forward's
    post_norms: tuple[Norm, Norm] | None = None  # of layout sandwich: norms after the branches,
    # where they differ from ``norm``
    cross: CrossAttention | None = None  # of layout pre: a branch between mixer and feed-forward
    norm_ranks: tuple[int, int] = (0, 0)  # of layout pre: the outputs of the two norms are gated by
    # themselves, by way of this many channels
    # of layout pre: the residual is multiplied by learned numbers a channel
    residual_channels: bool = False
    # of layout pre: residual and branches each get a learned scale and bias a channel
    affine_residual: bool = False
    # of layout sandwich, above 0: learned numbers a channel weigh the residual against the branch
    gate_temperature: float = 0.0
    # of layout pre without a feed-forward: its projected output is added to the mixer's input
    shared_block: SharedLayer | None = None

    @property
    def attention(self) -> Attention | LatentAttention | CompressedSparseAttention | None:
        if self.shared_block is not None:
            return self.shared_block.attention
        mixer = self.mixer
        mixer = mixer.attention if isinstance(mixer, ParallelHybrid | ConvAttention) else mixer
        return (
            mixer
            if isinstance(mixer, Attention | LatentAttention | CompressedSparseAttention)
            else None
        )

    @property
    def state(self) -> StateMixer | None:
        """The mixer with a recurrent state, or None."""
        mixer = self.mixer.state if isinstance(self.mixer, ParallelHybrid) else self.mixer
        return mixer if isinstance(mixer, StateMixer) else None


class Dense(Record):
    """A linear layer of a pooled model's head: act(W x + b). Its weights have the role
    ``pool.{n}``, n being its place in ``Pool.head``."""

    inputs: int
    outputs: int
    act: Activation | Literal["", "selu", "sigmoid"] = ""
    bias: bool = True


class Pool(Record):
    """How an embedding, classification or reward model turns hidden states into its answer:
    pooling, then the layers of ``head``, then ``after``."""

    # last, cls (the first), mean, max, mean_sqrt (mean times the root of the count), weighted
    # (later tokens weigh more), marked (the last token that is in ``marks``, else the last), steps
    # (each token that is in ``marks``, or every token where it is empty); several joined by "+"
    # are concatenated
    pooling: str = "last"
    head: tuple[Dense | Norm, ...] = ()
    # unit: to length 1; second: the second of two probabilities; gated: the first score of each
    # pair times its gate (``gate``), summed
    after: Literal["", "unit", "sigmoid", "softmax", "second", "gated"] = ""
    gives: Literal["vector", "scores"] = "vector"
    marks: tuple[int, ...] = ()
    gate: tuple[Dense, ...] = ()  # roles gate.{n}
    labels: tuple[str, ...] = ()  # names of the scores, where the checkpoint has them
    dimensions: tuple[int, ...] = ()  # lengths to which a vector may be cut; () = any

    @property
    def scores_tokens(self) -> bool:
        """Whether every token has scores of its own."""
        return self.pooling == "steps" and not self.marks


class Disentangled(Record):
    """Disentangled attention (DeBERTa, arXiv:2006.03654): scores gain query times the distance's
    key and key times the distance's query."""

    buckets: int  # distances from buckets / 2 on share vectors; 0 = each has its own
    farthest: int  # distances are clamped to this number
    norm: Norm | None = None  # of the distances' vectors
    has_keys: bool = True  # of distances, for the tokens' queries
    has_queries: bool = True  # of distances, for the tokens' keys

    @property
    def span(self) -> int:
        """Vectors in each direction."""
        return self.buckets or self.farthest


class Encoder(Record):
    """A bidirectional model: every token sees all others, within the layer's window, which counts
    in both directions. It has no KV cache."""

    token_types: int = 0  # rows of the token type table: first text, second text
    embed_dim: int = 0  # width of the tables, projected to the model's; 0 = the same
    # (buckets, farthest, heads) of a learned bias of scores by distance (T5)
    distances: tuple[int, int, int] | None = None
    has_distances_each: bool = False  # every layer has a bias of its own
    disentangled: Disentangled | None = None
    has_final_norm: bool = True
    is_shared: bool = False  # one block's weights serve all layers
    # a token without an embedding; others grow by what a text has less of it than in training (ESM)
    dropped_token: int | None = None
    is_padded: bool = False  # texts are filled up with padding tokens, which are read like others


class AltUp(Record):
    """Alternating updates (arXiv:2301.13310): ``streams`` residual streams of which each block
    computes the first, with low-rank residuals of ``rank`` and an input of ``layer_dim`` channels a
    layer from a table of ``layer_vocab`` tokens. Blocks have layout sandwich."""

    streams: int
    rank: int
    layer_dim: int
    layer_vocab: int
    act: Activation
    scales: bool = True  # a learned factor of the corrected stream


class HyperConnections(Record):
    """Hyper-connections (arXiv:2409.19606): each branch reads a weighted sum of ``count`` residual
    streams, and its output is added to each with a weight; the weights are computed from all
    streams of the token. Blocks have layout pre."""

    count: int
    norm: Norm  # of all streams at once, without weights
    eps: float  # added to the weights of the sum
    gain: float = 2.0  # largest weight with which an output is added
    rounds: int = 0  # Sinkhorn rounds of the matrix that mixes the streams (arXiv:2512.24880)
    ends: Literal["weighted", "mean"] = "weighted"  # how the streams become one at the end

    @property
    def rows(self) -> int:
        """Numbers that a branch computes from the streams."""
        return self.count * (2 + (self.count if self.rounds else 0))


class LayerInputs(Record):
    """Per-layer embeddings (Gemma 3n and 4): an input of ``dim`` channels for every layer, from the
    embedding and from a table of ``vocab`` tokens (0 = no table), added through a gate at the end
    of each block."""

    dim: int
    vocab: int
    act: Activation


class GatedHyperConnections(Record):
    """``count`` residual streams. A branch reads the mean of the normalized streams, each channel
    gated by all of them by way of ``rank`` channels, and is added to each with a weight of its own.
    Blocks have layout pre and norms of kind "none"."""

    count: int
    rank: int
    norm: Norm


class HierarchicalRecurrence(Record):
    """Hierarchical reasoning (HRM, arXiv:2506.21734): two stacks of ``size`` blocks run again and
    again over two streams, the second of which starts as a learned vector. ``outer`` times, the
    first stack recomputes the second stream ``inner`` times from the sum of both, then the second
    stack recomputes the first. Each run normalizes its output and has a KV cache of its own:
    ``Decoder.blocks`` lists the blocks of all runs. ``{stack}`` in a tensor's name is one of
    ``stacks``, ``{i}`` the block in it. With ``inner`` 0 there is one stack and one stream (Ouro,
    arXiv:2510.25741)."""

    outer: int
    inner: int
    size: int
    stacks: tuple[str, str]
    norms_each: bool = True  # or the last run alone

    @property
    def runs(self) -> tuple[int, ...]:
        """The stack of each run: 0 or 1."""
        return ((0,) * self.inner + (1,)) * self.outer if self.inner else (0,) * self.outer


class SkipConnection(Record):
    """Before block ``at`` the residual becomes share * (what it was before block ``source``) +
    (1 - share) * itself. ``source`` is not later than ``at``."""

    source: int
    at: int
    share: float


class HeadLayer(Record):
    """A layer before the output head: norm(act(W x + b))."""

    act: Activation
    norm: Norm
    bias: bool = False


class MessageLoop(Record):
    """The layers [``first``, ``end``) of a checkpoint run ``passes`` times (Inkling 2 Mini), each
    time on the residual before the first of them. ``Decoder.blocks`` lists the blocks of all
    passes. From the second pass on, what a layer's queries, keys, values and feed-forward read is
    mixed with messages: averages of the pass before, as of ``Decoder.residual_sums``, by gates of
    ``rank`` channels."""

    first: int
    end: int
    passes: int
    rank: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def stored(self, block: int) -> int:
        """The checkpoint's layer of a block."""
        repeated = (self.passes - 1) * self.size
        if block < self.end:
            return block
        behind = block - self.end
        return self.first + behind % self.size if behind < repeated else block - repeated

    def is_repeated(self, block: int) -> bool:
        """Whether an earlier block has the same weights."""
        return 0 <= block - self.end < (self.passes - 1) * self.size


class Decoder(Record):
    """A language model; with ``pool`` an embedding, classification or reward model, with
    ``encoder`` a bidirectional one."""

    vocab: int
    dim: int
    blocks: tuple[Block, ...]
    norm: Norm
    max_positions: int
    tied: bool = False  # the output head is the token table
    embed_scale: float = 1.0
    positions: tuple[int, int] | None = None  # (rows, offset) of a table of absolute positions
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    head_bias: bool = False
    embed_norm: Norm | None = None  # of the embeddings
    embed_affine: bool = False  # embeddings get a learned scale and bias a channel
    embed_norm_text_only: bool = False  # embed_norm is of the token table alone, not of media
    altup: AltUp | None = None
    streams: HyperConnections | None = None
    layer_inputs: LayerInputs | None = None
    sinusoidal_positions: bool = False  # the position table is sines then cosines, not learned
    sinusoid_steps: int = 0  # frequency i is 10000 ** (-i / steps); 0 = half the width - 1
    head_layer: HeadLayer | None = None
    embed_dim: int = 0  # width of the token table, projected to the model's; 0 = the same
    cycles: HierarchicalRecurrence | None = None
    gated_streams: GatedHyperConnections | None = None
    extra_vocab_rows: int = 0  # rows of the token table for input tokens that are never sampled
    suppressed_tokens: tuple[int, ...] = ()  # tokens that are never sampled
    skips: tuple[SkipConnection, ...] = ()
    # blocks whose branches are summed apart: each branch reads an average of the finished sums and
    # of the present one, weighed by a learned query (attention residuals)
    residual_sums: int = 0
    message_loop: MessageLoop | None = None
    add_media_embeds: bool = False  # media embeddings are added to those of the placeholder tokens
    # layers after which further media embeddings are added, in order (DeepStack); () = the first
    deep_layers: tuple[int, ...] = ()
    pool: Pool | None = None
    encoder: Encoder | None = None
    names: Mapping[str, object] = field(default_factory=dict)  # see ``arch/names.py``
