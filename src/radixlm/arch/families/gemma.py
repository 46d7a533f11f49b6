"""Gemma 1 to 4 (text; arXiv:2403.08295, 2408.00118, 2503.19786): norms that store weight - 1,
scaled embeddings, sandwich norms."""

from __future__ import annotations

from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, SANDWICH, AnyOf, Named, Names
from radixlm.arch.recipes import Scaled
from radixlm.base.record import replace


def _scaled(c: Config, **parts: Any) -> spec.Decoder:
    c.refuse("use_bidirectional_attention", False)
    return b.build_decoder(c, norm=b.rms(c, offset=1.0), embed_scale=c.hidden_size**0.5, **parts)


def gemma(c: Config) -> spec.Decoder:
    # Old checkpoints say "gelu" where their authors meant its tanh approximation.
    feed_forward = (
        spec.Mlp(c.intermediate_size, "gelu_tanh") if c.hidden_act == "gelu" else b.mlp(c)
    )
    bias = c.attention_bias
    return _scaled(c, mixer=b.attention(c, qkv_bias=bias, o_bias=bias), ffn=feed_forward)


def _alternating(c: Config, layer: int, every: int) -> int:
    """The window of a layer, where each ``every``-th layer is full."""
    if c.layer_types is not None:
        return b.window(c, layer)
    return int(c.sliding_window) if (layer + 1) % every else 0


def _attention(c: Config, every: int, layer: int, **fields: Any) -> spec.Attention:
    bias = c.attention_bias
    return b.attention(
        c,
        qkv_bias=bias,
        o_bias=bias,
        scale=c.query_pre_attn_scalar**-0.5,
        window=_alternating(c, layer, every),
        **fields,
    )


def gemma2(c: Config) -> spec.Decoder:
    return _scaled(
        c,
        mixer=lambda i: _attention(c, 2, i, softcap=c.attn_logit_softcapping or 0.0),
        ffn=b.mlp(c, act="hidden_activation"),
        layout="sandwich",
        logit_softcap=c.final_logit_softcapping or 0.0,
        names=SANDWICH,
    )


def vault_gemma(c: Config) -> spec.Decoder:
    return _scaled(
        c,
        mixer=lambda i: _attention(c, 2, i, softcap=c.attn_logit_softcapping or 0.0),
        ffn=b.mlp(c, act="hidden_activation"),
        logit_softcap=c.final_logit_softcapping or 0.0,
        names={"norm2": SANDWICH["norm3"]},
    )


def gemma3(c: Config) -> spec.Decoder:
    # attn_logit_softcapping is a leftover of Gemma 2 in these configs: the model does not use it.
    every = c.sliding_window_pattern

    def mixer(i: int) -> spec.Attention:
        kind = "sliding_attention" if _alternating(c, i, every) else "full_attention"
        position = b.rope(c, b.head_dim(c), kind)
        norm = b.rms(c, offset=1.0)
        return _attention(c, every, i, rope=position, qk_norm="head", qk_norm_spec=norm)

    return _scaled(
        c,
        mixer=mixer,
        ffn=b.mlp(c, act="hidden_activation"),
        layout="sandwich",
        logit_softcap=c.final_logit_softcapping or 0.0,
        names=SANDWICH,
    )


_ALTUP: Names = {
    "altup.per_layer": "model.embed_tokens_per_layer",
    "altup.project": "model.per_layer_model_projection",
    "altup.project_norm": "model.per_layer_projection_norm",
    "block.correct_scale": LAYER + "altup.correct_output_scale",
    "predict": LAYER + "altup.prediction_coefs",
    "correct": LAYER + "altup.correction_coefs",
    "router": LAYER + "altup.modality_router",
    "router_norm": LAYER + "altup.router_norm",
    "left": LAYER + "laurel.linear_left",
    "right": LAYER + "laurel.linear_right",
    "laurel_norm": LAYER + "laurel.post_laurel_norm",
    "layer_gate": LAYER + "per_layer_input_gate",
    "layer_out": LAYER + "per_layer_projection",
    "layer_norm": LAYER + "post_per_layer_input_norm",
}


def _of_layer(value: Any, layer: int) -> Any:
    return value[layer] if isinstance(value, list | tuple) else value


def gemma3n(c: Config) -> spec.Decoder:
    """The last layers read K and V of the last earlier layer of their type."""
    c.refuse("altup_active_idx", 0)
    count, bias = c.num_hidden_layers, c.attention_bias
    kinds = c.layer_types or ["sliding_attention"] * 4 + ["full_attention"]
    kinds = [kinds[i % len(kinds)] for i in range(count)]
    first_reader = count - c.num_kv_shared_layers
    sparsity = c.get("activation_sparsity_pattern") or [0.95] * 10 + [0.0] * max(0, count - 10)

    v_norm = spec.Norm(c.rms_norm_eps, affine=False)

    def mixer(i: int) -> spec.Attention:
        own = i < first_reader
        source = max(j for j in range(first_reader) if kinds[j] == kinds[i]) if not own else None
        return b.attention(
            c,
            rope=b.rope(c, b.head_dim(c), kinds[i]),
            qkv_bias=bias,
            o_bias=bias,
            scale=1.0,
            window=c.sliding_window if kinds[i] == "sliding_attention" else 0,
            qk_norm="head",
            qk_norm_spec=b.rms(c),
            extras=spec.AttentionExtras(v_norm=v_norm, kv_from=source),
        )

    act = b.activation(c, "hidden_activation")

    def ffn(i: int) -> spec.Mlp:
        share = float(_of_layer(sparsity, i) or 0.0)
        return spec.Mlp(_of_layer(c.get("intermediate_size", 16384), i), act, sparsity=share)

    if not c.hidden_size_per_layer_input:
        raise c.error("hidden_size_per_layer_input", "= 0 is not supported (must be positive)")
    sizes = (c.hidden_size_per_layer_input, c.vocab_size_per_layer_input)
    altup = spec.AltUp(c.altup_num_inputs, c.laurel_rank, *sizes, act, c.altup_correct_scale)
    return b.build_decoder(
        c,
        mixer,
        ffn,
        layout="sandwich",
        embed_scale=c.hidden_size**0.5,
        logit_softcap=c.final_logit_softcapping or 0.0,
        altup=altup,
        names={**SANDWICH, **_ALTUP, **_altup_ends(c.altup_num_inputs)},
    )


def _altup_ends(streams: int) -> Names:
    return {
        f"altup.{role}.{i}": f"model.altup_{stored}.{i}"
        for role, stored in (("spread", "projections"), ("join", "unembed_projections"))
        for i in range(streams - 1)
    }


_INPUTS: Names = {
    "inputs.per_layer": "model.embed_tokens_per_layer",
    "inputs.project": "model.per_layer_model_projection",
    "inputs.project_norm": "model.per_layer_projection_norm",
    "layer_input.gate": LAYER + "per_layer_input_gate",
    "layer_input.out": LAYER + "per_layer_projection",
    "layer_input.norm": LAYER + "post_per_layer_input_norm",
}


def _overrides(c: Config, kinds: list[str]) -> list[dict[str, Any]]:
    """What differs by layer: the heads of full layers, or what per_layer_config lists."""
    listed = c.get("per_layer_config")
    if listed is None:
        own = {"head_dim": c.get("global_head_dim", 512)}
        if c.get("num_global_key_value_heads") and c.get("attention_k_eq_v", True):
            own["num_key_value_heads"] = c.num_global_key_value_heads
        return [own if kind == "full_attention" else {} for kind in kinds]
    found = [listed.get(str(layer), listed.get(layer, {})) for layer in range(len(kinds))]
    for layer, own in enumerate(found):
        if set(own) - {"head_dim", "num_key_value_heads"}:
            raise c.error("per_layer_config", f"changes {sorted(own)} of layer {layer}")
    return found


def _experts_beside(c: Config) -> tuple[spec.Moe | None, Names]:
    if not c.enable_moe_block:
        return None, {}
    act, count = b.activation(c, "hidden_activation"), c.top_k_experts
    if not c.num_experts or not count or count > c.num_experts:
        raise c.error("top_k_experts", f"= {count!r} does not fit 'num_experts' {c.num_experts!r}")
    norm = spec.Norm(c.rms_norm_eps)
    fields: dict[str, Any] = {"renorm": True, "router_norm": norm, "expert_scale": True}
    names: Names = {
        "norm5": LAYER + "post_feedforward_layernorm_1",
        "norm6": LAYER + "pre_feedforward_layernorm_2",
        "norm7": LAYER + "post_feedforward_layernorm_2",
        "moe.router": Named((LAYER + "router.proj",), Scaled(c.hidden_size**-0.5)),
        "moe.router_norm": LAYER + "router.scale",
        "moe.expert_scale": LAYER + "router.per_expert_scale",
        "moe.up": AnyOf(
            LAYER + "experts.gate_up_proj",
            (LAYER + "experts.{e}.gate_proj", LAYER + "experts.{e}.up_proj"),  # quantized
        ),
        "moe.down": AnyOf(LAYER + "experts.down_proj", LAYER + "experts.{e}.down_proj"),
    }
    return spec.Moe(c.num_experts, count, c.moe_intermediate_size, act, **fields), names


def gemma4(c: Config) -> spec.Decoder:
    """Only sliding layers are bidirectional within an image."""
    return _fourth(c, is_full_causal=True)


def gemma4_unified(c: Config) -> spec.Decoder:
    """All layers are bidirectional within an image."""
    return _fourth(c, is_full_causal=False)


def _fourth(c: Config, *, is_full_causal: bool) -> spec.Decoder:
    """Full layers have their own head size and may use keys as values; the last layers read K and V
    of earlier ones; some have experts beside the feed-forward."""
    c.refuse("use_bidirectional_attention", "vision")
    count, bias, norm = c.num_hidden_layers, c.attention_bias, b.rms(c)
    kinds = [*(c.layer_types or [_sixth(i) for i in range(count)])[:-1], "full_attention"]
    overrides, first_reader = _overrides(c, kinds), count - c.num_kv_shared_layers

    def mixer(i: int) -> spec.Attention:
        own, is_full = overrides[i], kinds[i] == "full_attention"
        before = [j for j in range(min(i, first_reader)) if kinds[j] == kinds[i]]
        if i >= first_reader and not before:
            raise c.error("num_kv_shared_layers", f"leaves layer {i} no keys to read")
        dim = own.get("head_dim") or b.head_dim(c)
        return b.attention(
            c,
            kv_heads=own.get("num_key_value_heads"),
            head_dim=dim,
            rope=b.rope(c, dim, kinds[i]),
            qkv_bias=bias,
            o_bias=bias,
            scale=1.0,
            window=0 if is_full else c.sliding_window,
            qk_norm="head",
            qk_norm_spec=norm,
            extras=spec.AttentionExtras(
                v_norm=spec.Norm(c.rms_norm_eps, affine=False),
                k_is_v=is_full and c.attention_k_eq_v and i < first_reader,
                kv_from=before[-1] if i >= first_reader else None,
                is_causal=is_full and is_full_causal,
            ),
        )

    act, width = b.activation(c, "hidden_activation"), c.get("hidden_size_per_layer_input", 0)
    wide = 2 if c.use_double_wide_mlp else 1
    beside, names = _experts_beside(c)
    described = b.build_decoder(
        c,
        mixer,
        lambda i: spec.Mlp(c.intermediate_size * (wide if i >= first_reader else 1), act),
        layout="sandwich",
        embed_scale=c.hidden_size**0.5,
        logit_softcap=c.final_logit_softcapping or 0.0,
        layer_inputs=spec.LayerInputs(width, c.vocab_size_per_layer_input, act) if width else None,
        names={**SANDWICH, **_INPUTS, **names, "block.out_scale": LAYER + "layer_scalar"},
    )
    blocks = tuple(
        replace(block, out_scale=True, parallel_moe=beside) for block in described.blocks
    )
    return replace(described, blocks=blocks)


def _sixth(layer: int) -> str:
    return "sliding_attention" if (layer + 1) % 6 else "full_attention"
