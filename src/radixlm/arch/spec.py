"""What a language model IS, as frozen data: no torch, no layer code, no model names.

A family (``arch/families``) turns a checkpoint's config.json into a ``Decoder``; memory, config,
adapters, quantization, kernels and benchmarks ask these records instead of testing a name.
Over 500 lines: it is one vocabulary, looked up as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from radixlm.base.record import Record, field

Activation = Literal[
    "silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_oai", "xielu", "tanh"
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
]


class Norm(Record):
    """RMS or layer norm. ``offset`` is 1.0 when the checkpoint stores (weight - 1)."""

    eps: float
    kind: Literal["rms", "layer", "none"] = "rms"
    offset: float = 0.0
    bias: bool = False
    affine: bool = True
    scales_input: bool = False  # the weight multiplies what is normed, not the outcome


class RopeScaling(Record):
    """Scaled rotary embedding, after Hugging Face's ``rope_parameters``; see ``arch/rope.py``.

    ``params`` are the sorted (key, value) pairs of the checkpoint (lists as tuples), without
    rope_type and rope_theta, completed with what the formula needs from the config
    (original_max_position_embeddings, max_position_embeddings).
    """

    kind: Literal["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    params: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()


class Rope(Record):
    """Rotary position embedding of the first ``dim`` channels of each head."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False  # rotate (0,1)(2,3).. instead of (0,d/2)(1,d/2+1)..
    negative_angles: bool = False  # the other way round
    # frequencies that turn by the time, the row and the column of an image's place: so many of
    # each one after another, or dealt out in turn (``mrope_interleaved``)
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    mrope_paired: bool = False  # rows and columns take turns, and the time has the last ones
    # columns, rows and the image's number, before them the place in the prompt if there are four;
    # each has twice as many of the channels, one after another: a pair's two may differ
    mrope_by_channel: bool = False

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on the length of the sequence (dynamic, longrope)."""
        return self.scaling is not None and self.scaling.kind in ("dynamic", "longrope")


class LogNScaling(Record):
    """Queries grow with their position: times 1 + beta * log(1 + floor((position + offset) /
    period)), or times (1 + (position + offset) / period) ** beta."""

    beta: float
    period: float
    offset: int = 0
    is_power: bool = False


class BlockSparse(Record):
    """A token sees its own and the ``local`` - 1 blocks of ``size`` tokens before, and of the
    earlier ones every ``stride``-th; the choice moves on by ``step`` blocks from head to head."""

    size: int
    local: int
    stride: int
    step: int


class BlockIndexer(Record):
    """Which blocks of ``size`` tokens are read: each of ``heads`` queries, which stands for as many
    attention heads, takes the ``top`` blocks whose best key scores highest, the ``local`` newest
    before all others. The keys of ``dim`` numbers are kept in the cache beside K, a part with each
    KV head; they and the queries are normed and turn as those of the attention do."""

    heads: int
    dim: int
    size: int
    top: int
    local: int
    norm: Norm
    is_mean: bool = False  # instead: of the whole blocks the best ones for all heads together, each
    # by the mean of its keys, and what follows the last whole block


class AttentionExtras(Record):
    """What few attentions do besides. None of it is known to the fused kernels."""

    v_dim: int = 0  # channels of a value head; 0 = head_dim
    alibi_slopes: tuple[
        float, ...
    ] = ()  # ALiBi: slope * (key position - query position), a head each
    attention_chunk_size: int = 0  # a token sees only its own chunk of so many positions
    clip_qkv: float = 0.0  # q, k and v are clamped to +- clip
    clip_after_norm: bool = False  # after the norms of q and k, not before
    norm_after_rope: bool = False
    logn_scaling: LogNScaling | None = None
    out_norm: Norm | None = None  # of the heads' output, before the o projection
    out_norm_heads: bool = False  # every head alone, weights [head_dim]
    v_norm: Norm | None = None  # of every value head
    v_scale: float = 1.0
    k_scale: float = 1.0
    kv_from: int | None = (
        None  # reads the keys and values of this earlier layer, has none of its own
    )
    k_is_v: bool = False  # values are the keys before their norm and rotation
    gate: Literal["", "channel", "head"] = ""  # a projection that gates the output: all channels,
    # or one number a head
    gate_act: Literal["sigmoid", "softplus", "sigmoid2"] = "sigmoid"  # sigmoid2: times two
    gate_bias: bool = False
    block_sparse: BlockSparse | None = None
    indexer: BlockIndexer | None = None
    diff_lambda_init: float = (
        0.0  # of two attentions, each of half the heads with the other half's values
    )
    # too, a learned share of the second is taken from the first (arXiv:2410.05258), which starts
    # at this number
    dynamic_mask_topk: int = (
        0  # scores gain exp(a * softplus(.)) of a learned map of the token's values, a
    )
    # number a KV head; a query reads so many tokens with the largest ones; 0 = nothing of it
    experts: int = 0  # of the q and o projections, of which a token takes heads / kv_heads ones
    q_rank: int = 0  # q goes through so many channels, normed; 0 = a plain projection
    q_rank_norm: Norm | None = None
    is_causal: bool = False  # even where in other layers the places of an image see one another


class Attention(Record):
    """Softmax attention with grouped KV heads. ``scale`` None means head_dim ** -0.5."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["", "head", "each", "row"] = ""  # "head": all heads share [head_dim] weights;
    # "each": a head alone, weights [heads, head_dim]; "row": the whole projection at once
    qk_norm_spec: Norm | None = None
    scale: float | None = None
    window: int = 0  # 0 = full; w = a token sees itself and the w - 1 before it
    softcap: float = 0.0
    sinks: bool = False  # one learned logit a head joins the softmax
    gate: Literal["", "head"] = ""  # sigmoid output gate from a second half of q
    extras: AttentionExtras | None = None

    @property
    def v_dim(self) -> int:
        return (self.extras.v_dim if self.extras else 0) or self.head_dim

    @property
    def k_row(self) -> int:
        """Numbers a token and KV head in the cache, those of the value apart."""
        index = self.extras.indexer if self.extras else None
        return self.head_dim + (-(-index.dim // self.kv_heads) if index else 0)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class Indexer(Record):
    """Which tokens a latent attention reads: the ``top_k`` whose keys of ``dim`` numbers, kept in
    the cache beside the latent, score best over ``heads`` light queries (DeepSeek-V3.2). The first
    channels turn as those of the attention do. ``is_shared``: the choice of the last layer that
    made one, without queries and keys of its own."""

    heads: int
    dim: int
    top_k: int
    interleaved: bool
    norm: Norm
    is_shared: bool = False
    rope_on_tail: bool = False  # the last channels turn, not the first
    pool: int = 0  # tokens are chosen by whole pools of so many, those behind the last one always

    @property
    def row(self) -> int:
        """Numbers a token in the cache."""
        return self.dim * (2 if self.pool else 1)


class LatentAttention(Record):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); the cache holds
    ``kv_rank + rope_dim`` numbers a token. ``sinks`` and ``window`` as in ``Attention``, ``gate``
    as in ``AttentionExtras``."""

    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    q_rank: int  # 0 = a plain q projection
    rope: Rope | None
    norm: Norm
    scale: float  # already holds yarn's mscale squared
    bias: bool = False
    indexer: Indexer | None = None
    window: int = 0
    sinks: bool = False
    gate: Literal["", "channel", "head"] = ""
    rope_norm: Norm | None = None  # of the key that all heads share, before it turns
    logn_scaling: LogNScaling | None = None
    gate_from_q: bool = False  # the second q projection reads both sides of the norm before it, and
    # gives each head's gate, a channel of its value each, behind its query

    @property
    def row(self) -> int:
        """Numbers a token in the cache."""
        own = self.indexer.row if self.indexer and not self.indexer.is_shared else 0
        return self.kv_rank + self.rope_dim + own


class KVCompression(Record):
    """Entries that each sum up ``rate`` neighbouring tokens (with ``overlaps`` the ``rate`` before
    them too), channel by channel with learned shares; an entry is normed and turns as at the first
    of its tokens. A query reads the entries of all whole runs up to it, or the ``top_k`` that an
    index chooses: ``heads`` light queries of ``dim`` numbers over sums of its own."""

    rate: int
    overlaps: bool
    heads: int = 0
    dim: int = 0
    top_k: int = 0

    def raw(self, dim: int) -> int:
        """Numbers that a token gives to sums of ``dim`` channels: values and shares."""
        return 2 * dim * (2 if self.overlaps else 1)


class CompressedSparseAttention(Record):
    """Attention to the ``window`` newest tokens, each one key that is its value too, and to sums of
    earlier ones (DeepSeek-V4). The last channels turn; the output turns back at the query's place
    and is projected in ``groups`` of heads to ``group_rank`` numbers each, then all together."""

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
        """Numbers that are kept of each token while the window has not passed."""
        sums = self.sums
        return self.head_dim + (sums.raw(self.head_dim) + sums.raw(sums.dim) if sums else 0)

    @property
    def entry(self) -> int:
        """Numbers of an entry, which are kept with the last of its tokens."""
        return self.head_dim + self.sums.dim if self.sums else 0

    @property
    def window(self) -> int:
        """Tokens that are kept: those that are read and those that are summed up."""
        runs = 0 if self.sums is None else 2 if self.sums.overlaps else 1
        return max(self.sliding_window, runs * self.sums.rate if self.sums else 0)


State = tuple[tuple[int, ...], bool]  # shape a sequence, and whether it sums up the whole past


class ShortConv(Record):
    """A gated causal convolution (LFM2): out(c * conv(b * x)) where (b, c, x) = in(x)."""

    channels: int
    width: int
    bias: bool = False

    @property
    def states(self) -> tuple[State, ...]:
        return (((self.channels, self.width - 1), False),)


class Mamba1(Record):
    """Selective state space with a diagonal decay a channel (arXiv:2312.00752)."""

    inner: int
    state: int
    rank: int  # of the time step
    width: int  # of the convolution
    conv_bias: bool = True
    bias: bool = False
    norm: Norm | None = None  # of time step, b and c each
    heads: int = 1  # runs of channels, each with time steps, b and c made of itself alone

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.inner, self.width - 1), False), ((self.inner, self.state), True)


class Mamba2(Record):
    """State space duality, one decay a head (arXiv:2405.21060). The gate joins before the norm
    unless told; ``norm`` None leaves the gate alone."""

    heads: int
    head_dim: int
    state: int
    groups: int
    width: int
    norm: Norm | None
    norm_groups: int = 1
    gate_after_norm: bool = False
    conv_bias: bool = True
    bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)

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


Wide = tuple[int, ...]  # of any size


class Ngrams(Record):
    """What runs of up to ``length`` tokens say, hashed into tables of ``sizes`` rows (joined and
    padded to ``rows``) of ``dim`` numbers in all: it joins ``streams`` of ``width`` channels
    through a gate each, beside a convolution of every ``length``-th of ``conv`` tokens. A run does
    not reach beyond the token ``end``."""

    dim: int
    rows: int
    sizes: tuple[int, ...]  # a head each, those of shorter runs first
    multipliers: Wide
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
    """Gated delta rule (arXiv:2412.06464): a matrix a head that forgets, and corrects what it
    says for a key. ``channel_decay``: a decay a key channel (arXiv:2510.26692)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int
    norm: Norm
    beta_scale: float = 1.0
    gate_act: Literal["silu", "sigmoid"] = "silu"
    channel_decay: bool = False
    low_rank: bool = True  # a decay a channel, and then the gate too, pass v_dim channels
    ngrams: Ngrams | None = None  # what its block reads first keeps its states behind the net's
    decay_floor: float = 0.0  # log decays lie between this and 0, by a sigmoid; 0 = by a softplus

    @property
    def conv_channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def states(self) -> tuple[State, ...]:
        conv = (self.conv_channels, self.width - 1)
        own = (conv, False), ((self.v_heads, self.k_dim, self.v_dim), True)
        return own if self.ngrams is None else own + self.ngrams.states


class Lightning(Record):
    """Linear attention with a fixed decay a head (arXiv:2401.04658)."""

    heads: int
    head_dim: int
    decays: tuple[float, ...]  # log of the factor a token, a head each
    norm: Norm
    act: Activation = "silu"

    @property
    def states(self) -> tuple[State, ...]:
        return (((self.heads, self.head_dim, self.head_dim), True),)


class RgLru(Record):
    """Real-gated linear recurrent unit behind a convolution (arXiv:2402.19427)."""

    channels: int
    heads: int  # blocks of the gates' matrices
    width: int
    act: Activation

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.channels, self.width - 1), False), ((self.channels,), True)


class CompressedConvAttention(Record):
    """Attention whose queries and keys pass two convolutions, a channel and a head each, of
    ``widths`` tokens, beside a mean of both, and half of whose values are the token's before
    (arXiv:2510.04476). Each head of q and k has unit size, keys times a learned number."""

    attention: Attention
    widths: tuple[int, int]

    @property
    def conv_channels(self) -> int:
        return (self.attention.heads + self.attention.kv_heads) * self.attention.head_dim

    @property
    def late_channels(self) -> int:
        """Of the values those that come a token late."""
        return self.attention.kv_heads * self.attention.head_dim // 2

    @property
    def states(self) -> tuple[State, ...]:
        tokens = sum(self.widths) - 2
        return ((self.conv_channels, tokens), False), ((self.late_channels,), False)


class RelativeAttention(Record):
    """Attention without rotation whose scores gain, up to ``extent`` tokens back, what ``rank``
    numbers a query head make of as many learned profiles of the distance. Keys, values, the output
    and the feed-forward's output pass convolutions of ``width`` tokens each, beside themselves.
    Queries and profiles grow with log(length / ``grows_from``) ``* growth`` from there on."""

    attention: Attention
    dim: int  # channels of the model
    width: int
    rank: int
    extent: int
    grows_from: int = 0  # 0 = never
    growth: float = 0.0

    @property
    def kv_channels(self) -> int:
        return self.attention.kv_heads * self.attention.head_dim

    @property
    def states(self) -> tuple[State, ...]:
        channels = (self.kv_channels, self.kv_channels, self.dim, self.dim)
        return tuple(((count, self.width - 1), False) for count in channels)


class RwkvTime(Record):
    """Sums of values weighed by exponentials of keys, that fade a channel (arXiv:2305.13048); all
    projections read a share of the token before."""

    channels: int
    dim: int

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.dim,), False), *(((self.channels,), True),) * 3


class RwkvChannel(Record):
    """The feed-forward beside it, which reads the token before too."""

    inner: int
    dim: int

    @property
    def states(self) -> tuple[State, ...]:
        return (((self.dim,), False),)


class MatrixLstm(Record):
    """A matrix a head that sums keys times values, weighed by an exponential of one gate and fading
    by another (arXiv:2405.04517); what it says is over the sum of the keys."""

    heads: int
    k_dim: int
    v_dim: int
    norm: Norm  # of each head's outcome, without weights: those are all heads' in one vector
    gate_cap: float = 0.0
    eps: float = 1e-6

    @property
    def states(self) -> tuple[State, ...]:
        return ((self.heads, self.v_dim + 1, self.k_dim), True), ((self.heads,), True)


ConvAttention = (
    CompressedConvAttention | RelativeAttention
)  # mixers that attend and keep a state at once
Rwkv = RwkvTime | RwkvChannel
StateMixer = (
    ShortConv | Mamba1 | Mamba2 | DeltaNet | Lightning | RgLru | ConvAttention | Rwkv | MatrixLstm
)


class ParallelHybrid(Record):
    """Attention and a state mixer on the same input; their outputs are added."""

    attention: Attention
    state: StateMixer


class CrossAttention(Record):
    """Attention to the rows that an encoder makes of a prompt's images, without positions. A token
    sees the images of the last run of neighbouring ones that has begun; one that stands before
    them all sees all of them. ``bias``: of q, v and the output."""

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
    """One square matrix in place of a mixer or a feed-forward."""

    bias: bool = False


class Mlp(Record):
    """Feed-forward; gated means down(act(gate(x)) * up(x)). With ``limit`` the gate is cut at it,
    up on both sides, before anything else."""

    inner: int
    act: Activation
    gated: bool = True
    bias: bool = False
    down_bias: bool = False  # of the down projection, where ``bias`` is not set
    sub_norm: Norm | None = None  # of the inner channels, before the down projection
    sparsity: float = 0.0  # share of gate channels that are cut off, by mean and deviation
    limit: float = 0.0  # 0 = none, or the activation's own
    limit_after: bool = False  # the gate is cut behind its activation
    out_scale: bool = False  # a learned number multiplies the output


class DeepRouter(Record):
    """A router of three layers on ``width`` channels of the input. ``chained``: the channels of
    the layer before, times learned numbers, are added to them."""

    width: int
    norm: Norm
    chained: bool


class Moe(Record):
    """Mixture of experts with top-k routing."""

    experts: int
    top_k: int
    inner: int
    act: Activation
    score: Literal[
        "softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer", "sqrtsoftplus"
    ] = "softmax"
    # _topk: after the choice, which is by the logits; sparsemixer: arXiv:2409.12136
    renorm: bool = False
    scale: float = 1.0
    correction: bool = False  # a bias that only takes part in the choice
    groups: tuple[int, int] = (1, 1)  # (groups, groups kept)
    group_score: Literal["top2", "max"] = "top2"  # how a group is rated
    shared: Mlp | None = None
    shared_gate: bool = False
    bias: bool = False  # router and experts have biases
    gated: bool = True
    scale_input: bool = False  # the weight multiplies an expert's input, not its output
    zero_experts: int = 0  # further experts that hand their input through
    zero_experts_are_identity: bool = True  # or that give nothing
    out_bias: bool = False  # of the sum of all experts
    out_norm: Norm | None = None  # of the sum of all experts
    jitter: float = 0.0  # of sparsemixer
    router_softcap: float = 0.0
    limit: float = 0.0  # as in Mlp
    router_norm: Norm | None = None  # of the router's input
    expert_scale: bool = False  # a learned factor of every expert's weight, at the very end
    limit_after: bool = False  # as in Mlp
    deep_router: DeepRouter | None = None
    sinks: int = 0  # experts that every token takes and that share the chosen ones' weights, which
    # are then normed and times one learned number
    width: int = 0  # channels of the experts' inputs and outputs, to and from which x is projected
    width_norm: Norm | None = None  # of the projected input
    expert_norm: Norm | None = None  # of each expert's output, before its weight
    hash_vocab: int = 0  # the experts are looked up in a table of so many tokens, not chosen
    vision: Moe | None = None  # router and experts of the places of media, and of ``marks``
    marks: tuple[int, ...] = ()  # tokens that belong to media: what begins and ends them


class SharedLayer(Record):
    """A layer without residuals that several blocks ask, each at its place, with one set of
    weights: f(n2(a(n1([residual; embedding])))), where n1 and a read twice the model's channels.
    Blocks of one ``bank`` share its weights; ``call`` counts its calls. Each has low-rank changes
    of its own, of ``rank``, to the up projection and, where ``changes_qkv``, to q, k and v."""

    bank: int
    call: int
    attention: Attention
    ffn: Mlp
    norm: Norm
    rank: int = 0
    changes_qkv: bool = False


class Block(Record):
    """One layer. Layouts: pre x+f(n(x)); post x+n(f(x)); post_sum n(x+f(x)); sandwich x+n(f(n(x)));
    parallel x+a(n(x))+f(n(x)); parallel2 the same with a norm each; bare is pre without the
    mixer's norm; crossed is pre with a learned gate for each branch, skipped in a prompt without
    images (and its feed-forward by tokens that stand before them)."""

    mixer: (
        Attention
        | LatentAttention
        | CompressedSparseAttention
        | StateMixer
        | ParallelHybrid
        | CrossAttention
        | SquareLinear
        | None
    )
    ffn: Mlp | Moe | SquareLinear | None  # only layout "pre" may lack the one or the other, or both
    norm: Norm
    layout: Layout = "pre"
    residual: float = 1.0  # factor of each branch
    out_scale: bool = False  # a learned number multiplies the block's output
    deferred_moe: Moe | None = (
        None  # more experts on the feed-forward's input, added one block later
    )
    parallel_moe: Moe | None = None  # of layout sandwich: experts on the residual, through norms of
    # their own, join the feed-forward's normed output before the last norm
    post_scales: tuple[float, float, float, float] = (
        1.0,
        1.0,
        1.0,
        1.0,
    )  # of layout "scaled_post":
    # factors of the mixer's normed input and its output, then of the feed-forward's
    weights: tuple[float, float, float, float] | None = None  # of layout sandwich: factors of the
    # residual and the mixer's branch, then of the residual and the feed-forward's
    post_norms: tuple[Norm, Norm] | None = None  # of layout sandwich: those behind the branches,
    # where they are others
    cross: CrossAttention | None = None  # of layout pre: a third branch between the two
    norm_ranks: tuple[int, int] = (0, 0)  # of layout pre: the first and second norm's outcome is
    # gated by itself through so many channels
    residual_channels: bool = False  # of layout pre: learned factors a channel of the residual
    affine_residual: bool = False  # of layout pre: the residual and each branch are moved and
    # scaled by learned numbers a channel before they are added
    gate_temperature: float = 0.0  # of layout sandwich, above 0: learned numbers a channel say how
    # much of the residual and how much of the branch is kept
    shared_block: SharedLayer | None = (
        None  # of layout pre without a feed-forward: what it gives, through
    )
    # a matrix of the block's own, joins what the mixer reads, and nothing else

    @property
    def attention(self) -> Attention | LatentAttention | CompressedSparseAttention | None:
        """What attends, if anything does."""
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
        """What keeps a state, if anything does."""
        mixer = self.mixer.state if isinstance(self.mixer, ParallelHybrid) else self.mixer
        return mixer if isinstance(mixer, StateMixer) else None


class Dense(Record):
    """One linear layer of a head: act(W x + b), ``act`` "" for none. Its weights have the role
    ``pool.{n}`` (n counts ``Pool.head``)."""

    inputs: int
    outputs: int
    act: Activation | Literal["", "selu", "sigmoid"] = ""
    bias: bool = True


class Pool(Record):
    """What becomes of the last hidden states of a model that does not generate.

    ``pooling``: how places become one vector: last, cls (the first), mean, max, mean_sqrt (mean
    times the root of their number), weighted (later places weigh more), marked (the last place
    whose token is in ``marks``, else the last), steps (every such place by itself); several joined
    by "+" are put one after another. Then ``head``, then ``after``: nothing, unit length, a
    squashing of the scores, the second of two probabilities of every step, or "gated": the first
    number of each pair of scores times its gate (a head of its own, ``gate``), summed.
    """

    pooling: str = "last"
    head: tuple[Dense | Norm, ...] = ()
    after: Literal["", "unit", "sigmoid", "softmax", "second", "gated"] = ""
    gives: Literal["vector", "scores"] = "vector"
    marks: tuple[int, ...] = ()
    gate: tuple[Dense, ...] = ()  # roles gate.{n}
    labels: tuple[str, ...] = ()  # names of the scores, where the checkpoint has them
    dimensions: tuple[int, ...] = ()  # lengths to which a vector may be cut; () = any


class Disentangled(Record):
    """Scores that a learned vector for each distance takes part in (DeBERTa, arXiv:2006.03654):
    query with the distance's key, key with the distance's query. Distances from half ``buckets`` on
    share vectors up to ``farthest``; 0 buckets: each up to ``farthest`` has its own."""

    buckets: int
    farthest: int
    norm: Norm | None = None  # of the distances' vectors

    @property
    def span(self) -> int:
        """Vectors to each side."""
        return self.buckets or self.farthest


class Encoder(Record):
    """A model that reads a text at once: every token sees all others (within the layer's window,
    which counts to both sides), and nothing is kept."""

    token_types: int = 0  # rows of a table of token types: first text, second text
    embed_dim: int = 0  # width of the tables, projected to the model's; 0 = the same
    distances: tuple[int, int, int] | None = None  # (buckets, farthest, heads): a learned bias of
    # a score by how far the key is from the query
    disentangled: Disentangled | None = None
    has_final_norm: bool = True
    is_shared: bool = False  # one block's weights serve all layers


class AltUp(Record):
    """``streams`` residual streams of which each block computes the first (arXiv:2301.13310), with
    low-rank residuals of ``rank`` and an input of ``layer_dim`` channels a layer of its own, from
    a table of ``layer_vocab`` tokens. Blocks have layout sandwich."""

    streams: int
    rank: int
    layer_dim: int
    layer_vocab: int
    act: Activation
    scales: bool = True  # a learned factor of the corrected stream


class HyperConnections(Record):
    """Hyper-connections (arXiv:2409.19606): each branch reads a weighted sum of ``count`` residual
    streams, and its output joins each with a weight of up to ``gain``; weights are made of all
    streams of the token. With ``rounds`` the streams also mix by a matrix that so many rounds of
    Sinkhorn make doubly stochastic (arXiv:2512.24880). Blocks have layout pre."""

    count: int
    norm: Norm  # of all streams at once, without weights
    eps: float  # joins weights
    gain: float = 2.0
    rounds: int = 0
    ends: Literal["weighted", "mean"] = "weighted"  # how one stream is made of all at the end

    @property
    def rows(self) -> int:
        """Numbers that a branch asks of the streams."""
        return self.count * (2 + (self.count if self.rounds else 0))


class LayerInputs(Record):
    """An input of ``dim`` channels for every layer, from a table of ``vocab`` tokens (where that is
    above 0) and from the embedding; it joins the residual at the end of each block, through a
    gate."""

    dim: int
    vocab: int
    act: Activation


class GatedHyperConnections(Record):
    """``count`` residual streams. A branch reads their mean, each normed and every channel gated
    by all of them through ``rank`` channels, and joins each with a weight of its own. Blocks have
    layout pre, and norms of kind "none"."""

    count: int
    rank: int
    norm: Norm


class HierarchicalRecurrence(Record):
    """Two stacks of ``size`` blocks that run again and again (arXiv:2506.21734) over two streams,
    the second of which begins as a learned vector. ``outer`` times: ``inner`` times the first stack
    remakes the second stream from the sum of both, then the second stack remakes the first. Every
    run norms what it gives and has keys and values of its own: ``Decoder.blocks`` lists the blocks
    of all runs in order. ``{stack}`` in a name is one of ``stacks``, ``{i}`` the block in it."""

    outer: int
    inner: int
    size: int
    stacks: tuple[str, str]

    @property
    def runs(self) -> tuple[int, ...]:
        """Which stack each run takes: 0 or 1."""
        return ((0,) * self.inner + (1,)) * self.outer


class SkipConnection(Record):
    """Before block ``at`` the residual becomes ``share`` of what it was before block ``source``,
    which is no later one, and the rest of itself."""

    source: int
    at: int
    share: float


class HeadLayer(Record):
    """A layer before the output head: norm(act(W x + b))."""

    act: Activation
    norm: Norm
    bias: bool = False


class Decoder(Record):
    """A decoder-only language model; with ``pool`` one that gives vectors or scores, with
    ``encoder`` one that is none."""

    vocab: int
    dim: int
    blocks: tuple[Block, ...]
    norm: Norm
    max_positions: int
    tied: bool = False
    embed_scale: float = 1.0
    positions: tuple[int, int] | None = None  # (rows, offset) of a learned position table
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    head_bias: bool = False
    embed_norm: Norm | None = None  # of the embeddings
    embed_affine: bool = False  # embeddings are moved and scaled by learned numbers a channel
    embed_norm_text_only: bool = (
        False  # ... of the token table's alone: what encoders make passes it by
    )
    altup: AltUp | None = None
    streams: HyperConnections | None = None
    layer_inputs: LayerInputs | None = None
    sinusoidal_positions: bool = False  # the position table is sines then cosines, not learned
    sinusoid_steps: int = 0  # frequency i is 10000 ** (-i / steps); 0 = half the width - 1
    head_layer: HeadLayer | None = None
    embed_dim: int = 0  # width of the token table, projected to the model's; 0 = the same
    cycles: HierarchicalRecurrence | None = None
    gated_streams: GatedHyperConnections | None = None
    extra_vocab_rows: int = 0  # rows of the token table beyond the vocabulary: only ever read
    suppressed_tokens: tuple[int, ...] = ()  # tokens that are never the next one
    skips: tuple[SkipConnection, ...] = ()
    add_media_embeds: bool = False  # what encoders make is added to the embeddings of its tokens
    # behind which layers rows of an encoder's own join, in order; () = behind the first ones
    deep_layers: tuple[int, ...] = ()
    pool: Pool | None = None
    encoder: Encoder | None = None
    names: Mapping[str, object] = field(default_factory=dict)
