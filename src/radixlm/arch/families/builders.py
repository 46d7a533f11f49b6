"""What most families share: functions from config keys to records."""

from collections.abc import Callable, Mapping
from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config, is_number
from radixlm.arch.names import Names
from radixlm.base.record import replace

Mixer = (
    spec.Attention
    | spec.LatentAttention
    | spec.CompressedSparseAttention
    | spec.StateMixer
    | spec.ParallelHybrid
)
Ffn = spec.Mlp | spec.Moe


_ACTIVATIONS: Mapping[str, spec.Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
}


def activation(c: Config, key: str = "hidden_act") -> spec.Activation:
    """The activation that config[key] names; CheckpointError for an unknown name."""
    name = getattr(c, key)
    if name not in _ACTIVATIONS:
        raise c.error(key, f"= {name!r} is unknown; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


_SCALING_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "factor",
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "attention_factor",
    ),
    "proportional": ("factor", "partial_rotary_factor"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_OPTIONAL_KEYS = frozenset(
    (
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        "partial_rotary_factor",
    )
)


def _scaling(c: Config, p: Mapping[str, Any], dim: int) -> spec.RopeScaling | None:
    kind = p["rope_type"]
    if kind == "default":
        return None
    if kind == "dynamic" and dim <= 2:
        raise c.error("rope_parameters", "of type 'dynamic' needs more than two rotated channels")
    if kind not in _SCALING_KEYS:
        known = ", ".join(("default", *_SCALING_KEYS))
        raise c.error("rope_parameters", f"rope_type {kind!r} is unknown; known: {known}")
    values = {"max_position_embeddings": c.get("max_position_embeddings"), **p}
    params: dict[str, float | bool | tuple[float, ...]] = {}
    for key in sorted(_SCALING_KEYS[kind]):
        value = values.get(key)
        if value is None:
            may_miss = key in _OPTIONAL_KEYS or (
                key == "factor" and kind in ("yarn", "longrope", "proportional")
            )
            if not may_miss:
                raise c.error("rope_parameters", f"of type {kind!r} lacks {key!r}")
        elif key in ("short_factor", "long_factor"):
            if not isinstance(value, list | tuple) or len(value) != dim // 2 or 0 in value:
                raise c.error("rope_parameters", f"{key!r} must be a list of {dim // 2} numbers")
            params[key] = tuple(float(one) for one in value)
        elif not is_number(value) or value < 0 or (value == 0 and key not in _OPTIONAL_KEYS):
            raise c.error("rope_parameters", f"{key!r} = {value!r} is not a positive number")
        else:
            params[key] = value
    return spec.RopeScaling(kind, tuple(sorted(params.items())))


def rope(
    c: Config, head_dim: int, kind: str = "", *, partial: bool = False, interleaved: bool = False
) -> spec.Rope:
    """The rotary embedding of config.rope_parameters, of the layer type ``kind`` if it has several.

    ``partial``: the model honors partial_rotary_factor; others rotate the whole head.
    """
    p: Mapping[str, Any] = c.rope_parameters[kind] if kind else c.rope_parameters
    share = p.get("partial_rotary_factor") if partial else None
    if (
        p["rope_type"] == "proportional"
    ):  # the share is in the frequencies: the whole head is rotated
        share = None
    dim = head_dim if share is None else int(head_dim * share)
    if dim <= 0 or dim % 2 or dim > head_dim:
        raise c.error("rope_parameters", f"rotate {dim} of {head_dim} channels; must be even")
    sections = p.get("mrope_section") or ()
    is_dealt = bool(p.get("mrope_interleaved"))  # then longer sections are cut
    if sections and (len(sections) != 3 or (not is_dealt and sum(sections) != dim // 2)):
        raise c.error(
            "rope_parameters", f"mrope_section {sections!r} must be 3 parts of {dim // 2}"
        )
    return spec.Rope(
        dim,
        float(p["rope_theta"]),
        _scaling(c, p, dim),
        interleaved,
        mrope_sections=tuple(sections),
        mrope_interleaved=is_dealt,
    )


def head_dim(c: Config) -> int:
    """Channels of a head: config.head_dim, else hidden_size / num_attention_heads."""
    return int(c.get("head_dim") or c.divide("hidden_size", "num_attention_heads"))


# keys and what they are when left out
_DUAL_CHUNK = {"chunk_size": 8192, "local_size": 1024, "original_max_position_embeddings": 0}


def dual_chunk(c: Config) -> spec.DualChunk:
    """config.dual_chunk_attention_config, as Qwen2.5-1M has it. Its ``sparse_attention_config``,
    which only makes prompts faster, is not read."""
    given: Mapping[str, Any] = c.dual_chunk_attention_config
    size, local, trained = (given.get(key, default) for key, default in _DUAL_CHUNK.items())
    are_whole = all(isinstance(one, int) and one >= 0 for one in (size, local, trained))
    if not are_whole or local >= size:
        raise c.error(
            "dual_chunk_attention_config",
            f"= {dict(given)!r} needs whole numbers, local_size smaller than chunk_size",
        )
    return spec.DualChunk(size - local, size, trained)


def attention(c: Config, **fields: Any) -> spec.Attention:
    """Attention with the config's heads; ``fields`` are further fields of the record."""
    heads = fields.pop("heads", None) or c.num_attention_heads
    kv_heads = fields.pop("kv_heads", None) or c.get("num_key_value_heads") or heads
    dim = fields.pop("head_dim", None) or head_dim(c)
    if heads % kv_heads:
        raise c.error(
            "num_attention_heads", f"= {heads} is not a multiple of the {kv_heads} key-value heads"
        )
    if "rope" not in fields:
        fields["rope"] = rope(c, dim)
    if c.get("dual_chunk_attention_config") and not fields.get("window"):
        chunks = dual_chunk(c)
        fields["rope"] = replace(fields["rope"], chunk=chunks.chunk)
        extras = fields.get("extras") or spec.AttentionExtras()
        fields["extras"] = replace(extras, dual_chunk=chunks)
    return spec.Attention(heads, kv_heads, dim, **fields)


def mlp(c: Config, *, gated: bool = True, bias: bool = False, act: str = "hidden_act") -> spec.Mlp:
    """Feed-forward of config.intermediate_size."""
    return spec.Mlp(c.intermediate_size, activation(c, act), gated, bias)


def rms(c: Config, offset: float = 0.0) -> spec.Norm:
    """RMS norm with config.rms_norm_eps."""
    return spec.Norm(c.rms_norm_eps, offset=offset)


def is_sliding(c: Config, layer: int) -> bool:
    """Whether config.layer_types gives this layer a sliding window."""
    kind = c.layer_types[layer]
    if kind not in ("sliding_attention", "full_attention"):
        raise c.error("layer_types", f"has the unknown type {kind!r} at layer {layer}")
    return bool(kind == "sliding_attention")


def window(c: Config, layer: int) -> int:
    """Tokens that this layer sees, itself included; 0 = all."""
    if not is_sliding(c, layer):
        return 0
    if not c.get("sliding_window"):
        raise c.error("sliding_window", f"is missing, but layer {layer} slides")
    return int(c.sliding_window)


def build_decoder(
    c: Config,
    mixer: Mixer | Callable[[int], Mixer] | None = None,
    ffn: Ffn | Callable[[int], Ffn] | None = None,
    norm: spec.Norm | None = None,
    layout: spec.Layout = "pre",
    *,
    residual: float = 1.0,
    final_norm: spec.Norm | None = None,
    names: Names | None = None,
    **fields: Any,
) -> spec.Decoder:
    """A decoder with Llama's defaults; ``fields`` are further fields of Decoder.

    ``mixer`` and ``ffn`` may be one record for all layers or a function of the layer's index.
    """
    norm = norm or rms(c)
    one_mixer = mixer or attention(c)
    one_ffn = ffn or mlp(c)
    blocks = tuple(
        spec.Block(
            one_mixer(i) if callable(one_mixer) else one_mixer,
            one_ffn(i) if callable(one_ffn) else one_ffn,
            norm,
            layout,
            residual,
        )
        for i in range(c.num_hidden_layers)
    )
    fields.setdefault("tied", bool(c.tie_word_embeddings))
    return spec.Decoder(
        c.vocab_size,
        c.hidden_size,
        blocks,
        final_norm or norm,
        c.max_position_embeddings,
        names=names or {},
        **fields,
    )


def moe(c: Config, **fields: Any) -> spec.Moe:
    """Routed experts of config.moe_intermediate_size; ``fields`` are further fields of Moe."""
    inner = fields.pop("inner", None) or c.moe_intermediate_size
    act = fields.pop("act", None) or activation(c)
    if not c.num_experts or not c.num_experts_per_tok:
        raise c.error("num_experts", "and 'num_experts_per_tok' must be positive")
    groups, kept = fields.setdefault("groups", (1, 1))
    size, rest = divmod(c.num_experts, groups)
    max_chosen = kept * size + fields.get("zero_experts", 0)
    if rest or kept > groups or max_chosen < c.num_experts_per_tok or (groups > 1 and size < 2):
        raise c.error(
            "num_experts",
            f"= {c.num_experts} does not give {c.num_experts_per_tok} experts a token "
            f"out of {kept} of {groups} groups",
        )
    return spec.Moe(c.num_experts, c.num_experts_per_tok, inner, act, **fields)


def corrected_moe(c: Config, shared: spec.Mlp | None = None, **fields: Any) -> spec.Moe:
    """Sigmoid routing with a correction bias, as in DeepSeek V3; ``shared`` is the shared expert,
    of width 0 = none. ``fields`` as of ``moe``."""
    if "renorm" not in fields:
        fields["renorm"] = c.norm_topk_prob
    fields.setdefault("scale", c.get("routed_scaling_factor", 1.0))
    fields.setdefault("groups", (c.get("n_group", 1), c.get("topk_group", 1)))
    shared = shared if shared is not None and shared.inner else None
    return moe(c, score="sigmoid", correction=True, shared=shared, **fields)
