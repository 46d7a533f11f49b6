"""Command R (Cohere 1 and 2): parallel branches, interleaved rotation."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, Named
from radixlm.arch.recipes import Scaled
from radixlm.arch.spec import Attention, Decoder, Mlp, Norm
from radixlm.base.record import replace


def cohere(c: Config) -> Decoder:
    norm = Norm(c.layer_norm_eps, "layer")
    bias = c.attention_bias
    mixer = b.attention(
        c,
        rope=b.rope(c, b.head_dim(c), interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="each" if c.use_qk_norm else "",
        qk_norm_spec=norm if c.use_qk_norm else None,
    )
    return b.build_decoder(c, mixer, norm=norm, layout="parallel", logit_scale=c.logit_scale)


def cohere2(c: Config) -> Decoder:
    bias, every = c.attention_bias, c.sliding_window_pattern

    def mixer(i: int) -> Attention:
        if c.layer_types is not None:
            span = b.window(c, i)
        else:
            span = c.sliding_window if (i + 1) % every else 0
        position = b.rope(c, b.head_dim(c), interleaved=True) if span else None
        return b.attention(c, rope=position, qkv_bias=bias, o_bias=bias, window=span)

    norm = Norm(c.layer_norm_eps, "layer")
    return b.build_decoder(c, mixer, norm=norm, layout="parallel", logit_scale=c.logit_scale)


def cohere_compass(c: Config) -> Decoder:
    """Cohere 2 rotating halves as in Llama, with a rope for each layer type, or none."""
    bias = c.attention_bias
    c = c.replace(layer_types=c.layer_types or ["full_attention"] * c.num_hidden_layers)

    def mixer(i: int) -> Attention:
        span, kind = b.window(c, i), c.layer_types[i]
        if kind not in c.rope_parameters:
            raise c.error("rope_parameters", f"has nothing for layers of type {kind!r}")
        position = b.rope(c, b.head_dim(c), kind) if c.rope_parameters[kind] else None
        if position is not None and position.mrope_sections:
            position = replace(position, mrope_interleaved=True)  # whatever the config says
        return b.attention(c, rope=position, qkv_bias=bias, o_bias=bias, window=span)

    norm = Norm(c.layer_norm_eps, "layer")
    scale = c.get("logit_scale", 1.0)
    return b.build_decoder(c, mixer, norm=norm, layout="parallel", logit_scale=scale)


def cohere2_moe(c: Config) -> Decoder:
    """Cohere 2 with experts. Averaging with the shared expert becomes a factor of both."""
    c.refuse("shared_expert_combination_strategy", "average", "sum")
    c.refuse("expert_selection_fn", "softmax", "sigmoid")
    is_softmax, num_shared = c.expert_selection_fn == "softmax", c.num_shared_experts
    part = 0.5 if num_shared and c.shared_expert_combination_strategy == "average" else 1.0
    sparse = b.moe(
        c,
        inner=c.intermediate_size,
        score="softmax_topk" if is_softmax else "sigmoid",
        renorm=c.norm_topk_prob and not is_softmax,
        scale=part,
        shared=Mlp(c.intermediate_size * num_shared, b.activation(c)) if num_shared else None,
    )
    bias, dense = c.attention_bias, c.get("first_k_dense_replace", 0)
    kinds = c.mlp_layer_types or ["dense"] * dense + ["sparse"] * (c.num_hidden_layers - dense)

    def mixer(i: int) -> Attention:
        every = c.prefix_dense_sliding_window_pattern if i < dense else c.sliding_window_pattern
        place = i if i < dense else i - dense
        span = b.window(c, i) if c.layer_types else c.sliding_window if (place + 1) % every else 0
        has_rope = span or (kinds[i] == "dense" and c.prefix_dense_sliding_window_pattern == 1)
        position = b.rope(c, b.head_dim(c), interleaved=True) if has_rope else None
        return b.attention(c, rope=position, qkv_bias=bias, o_bias=bias, window=span)

    def ffn(i: int) -> b.Ffn:
        if kinds[i] != "dense":
            return sparse
        return Mlp(c.get("prefix_dense_intermediate_size", c.intermediate_size), b.activation(c))

    down = Named((LAYER + "mlp.shared_experts.down_proj",), Scaled(part))
    eps = c.get("rms_norm_eps")
    norm = Norm(c.layer_norm_eps, "layer") if eps is None else Norm(eps)
    return b.build_decoder(
        c,
        mixer,
        ffn,
        norm,
        "parallel",
        logit_scale=c.logit_scale,
        names={"moe.shared.down": down},
    )
