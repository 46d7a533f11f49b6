"""Step 3.5 and the text model of Step 3.7: gated heads, more of them in window layers, and experts
whose gates are clamped after the activation."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import Experts
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, Mlp

_MLP, _MOE, _SHARED = LAYER + "mlp.", LAYER + "moe.", LAYER + "share_expert."
_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)


def step_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Published lists include multi-token-prediction layers, which get lists "mtp_..." here; there
    is one rope for each layer, and keys have older names."""
    out, count = dict(raw), raw.get("num_hidden_layers", 45)
    for key in _BY_LAYER:
        if isinstance(out.get(key), list):
            out["mtp_" + key] = out.get("mtp_" + key) or out[key][count:]
            out[key] = out[key][:count]
    for new_key, old_key in (
        ("num_key_value_heads", "num_attention_groups"),
        ("share_expert_dim", "share_expert_dims"),
    ):
        if old_key in out:
            out.setdefault(new_key, out[old_key])
    listed = out.get("moe_layers_enum")
    if listed is not None and out.get("mlp_layer_types") is None:
        items = listed.split(",") if isinstance(listed, str) else listed
        sparse = {int(one) for one in items if str(one).strip()}
        out["mlp_layer_types"] = ["sparse" if i in sparse else "dense" for i in range(count)]
        later = range(count, count + (raw.get("num_nextn_predict_layers") or 0))
        out["mtp_mlp_layer_types"] = ["sparse" if i in sparse else "dense" for i in later]
    other = out.get("attention_other_setting")
    if out.get("num_sliding_attention_heads") is None and other:
        out["num_sliding_attention_heads"] = other.get("num_attention_heads")
    out["rope_parameters"] = _ropes(out, count)
    return {key: out[key] for key in out if key not in ("rope_theta", "rope_scaling")}


def _ropes(out: dict[str, Any], count: int) -> dict[str, Any]:
    """Rotary parameters by layer type, from any layer of the type."""
    kinds = out.get("layer_types") or ["full_attention"] * count
    params = out.get("rope_parameters") or {}
    if all(isinstance(params.get(kind), dict) for kind in kinds):
        return {kind: params[kind] for kind in kinds}
    theta, shares = out.get("rope_theta", 10000.0), out.get("partial_rotary_factors")
    made: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        i = kinds.index(kind)
        made[kind] = {"rope_theta": theta[i] if isinstance(theta, list) else theta}
        made[kind] |= {"partial_rotary_factor": shares[i]} if shares else {}
    if out.get("rope_scaling") and "full_attention" in made:
        made["full_attention"] |= out["rope_scaling"]
    return made


def step3p5(c: Config) -> Decoder:
    c.refuse("use_bidirectional_attention", False)
    bias, dim, norm = c.attention_bias, b.head_dim(c), b.rms(c, offset=1.0)
    limits, of_dense = c.swiglu_limits or (), c.swiglu_limits_shared or ()
    kinds, own = c.mlp_layer_types, c.get("per_layer_config", {})
    act, extras = b.activation(c), AttentionExtras(gate="head")
    scale = (c.query_pre_attn_scalar or dim) ** -0.5

    def heads(i: int, slides: bool) -> int:
        listed = own.get(str(i), {})
        if set(listed) - {"num_attention_heads"}:
            raise c.error("per_layer_config", f"changes {sorted(listed)} of layer {i}")
        others = c.num_sliding_attention_heads if slides else None
        return int(listed.get("num_attention_heads") or others or c.num_attention_heads)

    def mixer(i: int) -> Attention:
        kind = c.layer_types[i] if c.layer_types else "full_attention"
        span = b.window(c, i) if c.layer_types else 0
        position = b.rope(c, dim, kind, partial=True)
        fields: dict[str, Any] = {"heads": heads(i, span > 0), "rope": position, "window": span}
        fields |= {"qkv_bias": bias, "o_bias": bias, "scale": scale, "extras": extras}
        return b.attention(c, qk_norm="head", qk_norm_spec=norm, **fields)

    def limit(of: Any, i: int) -> float:
        return float(of[i] or 0.0) if of else 0.0

    def ffn(i: int) -> b.Ffn:
        width, cut = c.share_expert_dim, limit(of_dense, i)
        if kinds[i] != "sparse" if kinds else i < 3:
            return Mlp(c.intermediate_size, act, bias=c.mlp_bias, limit=cut, limit_after=cut > 0)
        return b.moe(
            c,
            score="sigmoid",
            correction=True,
            renorm=True,
            scale=c.moe_router_scaling_factor,
            limit=limit(limits, i),
            limit_after=True,
            shared=Mlp(width, act, bias=c.mlp_bias, limit=cut, limit_after=True),
        )

    return b.build_decoder(c, mixer, ffn, norm, names=_names(c))


def _names(c: Config) -> Names:
    experts = Named((_MOE + "gate_proj", _MOE + "up_proj"), Experts(c.num_experts, 2))
    shared = _MLP + "shared_experts."
    return {
        "mixer.gate": LAYER + "self_attn.g_proj",
        "moe.router": AnyOf(_MOE + "gate", _MLP + "gate"),
        "moe.correction": AnyOf(_MOE + "router_bias", _MLP + "gate.e_score_correction_bias"),
        "moe.up": AnyOf(experts, _MLP + "experts.gate_up_proj"),
        "moe.down": AnyOf(_MOE + "down_proj", _MLP + "experts.down_proj"),
        "moe.shared.up": AnyOf(
            (_SHARED + "gate_proj", _SHARED + "up_proj"), (shared + "gate_proj", shared + "up_proj")
        ),
        "moe.shared.down": AnyOf(_SHARED + "down_proj", shared + "down_proj"),
    }
