"""What a language model IS, as frozen data: no torch, no layer code, no model names.

A family (``arch/families``) turns a checkpoint's config.json into a ``Decoder``; memory, config,
adapters, quantisation, kernels and benchmarks ask these records instead of testing a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Activation = Literal[
    "silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_oai", "xielu", "tanh"
]
Layout = Literal["pre", "post", "sandwich", "parallel", "parallel2"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS or layer norm. ``offset`` is 1.0 when the checkpoint stores (weight - 1)."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    bias: bool = False
    affine: bool = True


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaled rotary embedding, after Hugging Face's ``rope_parameters``; see ``arch/rope.py``.

    ``params`` are the sorted (key, value) pairs of the checkpoint (lists as tuples), without
    rope_type and rope_theta, completed with what the formula needs from the config
    (original_max_position_embeddings, max_position_embeddings).
    """

    kind: Literal["linear", "dynamic", "yarn", "longrope", "llama3"]
    params: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first ``dim`` channels of each head."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False  # rotate (0,1)(2,3).. instead of (0,d/2)(1,d/2+1)..

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on the length of the sequence (dynamic, longrope)."""
        return self.scaling is not None and self.scaling.kind in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Attention:
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

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); the cache holds
    ``kv_rank + rope_dim`` numbers a token."""

    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    q_rank: int  # 0 = a plain q projection
    rope: Rope
    norm: Norm
    scale: float  # already holds yarn's mscale squared
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Mlp:
    """Feed-forward; gated means down(act(gate(x)) * up(x))."""

    inner: int
    act: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts with top-k routing."""

    experts: int
    top_k: int
    inner: int
    act: Activation
    score: Literal["softmax", "sigmoid", "softmax_topk"] = "softmax"  # _topk: after the choice
    renorm: bool = False
    scale: float = 1.0
    correction: bool = False  # a bias that only takes part in the choice
    groups: tuple[int, int] = (1, 1)  # (groups, groups kept)
    group_score: Literal["top2", "max"] = "top2"  # how a group is rated
    shared: Mlp | None = None
    shared_gate: bool = False
    bias: bool = False  # router and experts have biases


@dataclass(frozen=True, slots=True)
class Block:
    """One layer. Layouts: pre x+f(n(x)); post x+n(f(x)); sandwich x+n(f(n(x)));
    parallel x+a(n(x))+f(n(x)); parallel2 the same with a norm each."""

    mixer: Attention | LatentAttention
    ffn: Mlp | Moe
    norm: Norm
    layout: Layout = "pre"
    residual: float = 1.0  # factor of each branch


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder-only language model."""

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
    names: Mapping[str, object] = field(default_factory=dict, hash=False, compare=False)
