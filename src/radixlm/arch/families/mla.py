"""Latent attention besides DeepSeek: Mistral 4, A.X K2 and Ling 3 (Bailing hybrid)."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    activation,
    build_decoder,
    corrected_moe,
)
from radixlm.arch.families.deepseek import deepseek_v32, latent, routed
from radixlm.arch.families.linear import channel_delta
from radixlm.arch.families.mistral_native import either, native
from radixlm.arch.families.moe import by_layer_type
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import flat
from radixlm.arch.spec import Block, Decoder, LatentAttention, LogNScaling, Mlp, Moe
from radixlm.base.record import replace

_MLP = LAYER + "mlp."


def mistral4(c: Config) -> Decoder:
    """Queries are scaled by position; softmax routing in groups."""
    p, mixer = c.rope_parameters, latent(c, interleaved=c.rope_interleave)
    if p.get("llama_4_scaling_beta"):
        period = float(p.get("original_max_position_embeddings") or c.max_position_embeddings)
        mixer = replace(mixer, logn_scaling=LogNScaling(p["llama_4_scaling_beta"], period))
    return native(c, build_decoder(c, mixer, routed(c)))


def mistral_large3(c: Config) -> Decoder:
    """Mistral 4 as SGLang and vLLM name it. Tensors have the names of Mistral's files or those of
    Hugging Face; the scaling by position has a key of its own."""
    if scaling := c.get("llama_4_scaling"):
        length = scaling["original_max_position_embeddings"]
        own = {"llama_4_scaling_beta": scaling["beta"], "original_max_position_embeddings": length}
        c = c.replace(rope_parameters={**c.rope_parameters, **own})
    return either(mistral4(c))


def _gated_norm(role: str, stored: str) -> Names:
    at = LAYER + stored
    return {
        role: AnyOf(at + ".norm", at),
        role + ".down": AnyOf(at + ".W_down", at + ".mlp.fc1"),
        role + ".up": AnyOf(at + ".W_up", at + ".mlp.fc2"),
    }


def axk2_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Older names of the keys that say which layers have experts."""
    if raw.get("mlp_layer_types") is not None:
        return raw
    first, step = raw.get("first_k_dense_replace", 1), max(raw.get("moe_layer_freq", 1), 1)
    layers = range(raw.get("num_hidden_layers", 48))
    kinds = ["sparse" if i >= first and i % step == 0 else "dense" for i in layers]
    return {**raw, "mlp_layer_types": kinds}


def axk2(c: Config) -> Decoder:
    """DeepSeek V3.2 with values gated by the q projection and with gated norms."""
    if (c.get("n_group") is None) != (c.get("topk_group") is None):
        raise c.error("n_group", "and 'topk_group' must be given together")
    described = deepseek_v32(c)
    attn, rank = LAYER + "self_attn.", c.gated_norm_rank

    def block(one: Block) -> Block:
        assert isinstance(one.mixer, LatentAttention)
        ranks = (rank, rank if isinstance(one.ffn, Moe) else 0)
        return replace(one, mixer=replace(one.mixer, gate_from_q=True), norm_ranks=ranks)

    names: Names = {
        **_gated_norm("norm1", "input_layernorm"),
        **_gated_norm("norm2", "post_attention_layernorm"),
        "mixer.q_b": AnyOf(attn + "q_b_proj", attn + "q_gate_proj"),
    }
    blocks = tuple(block(one) for one in described.blocks)
    return replace(described, blocks=blocks, names=names)


def bailing_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The usual names of the class's keys."""
    out = dict(raw)
    for new_key, old_key in (
        ("n_group", "num_expert_group"),
        ("norm_topk_prob", "moe_renormalize"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("max_position_embeddings", "model_max_length"),
    ):
        if out.get(old_key) is not None:
            out[new_key] = out[old_key]
    count, first = out.get("num_hidden_layers", 42), out.get("first_k_dense_replace", 2)
    if out.get("layer_types") is None:
        every = max(out.get("layer_group_size", 6), 1)
        kinds = [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
        ]
        out["layer_types"] = kinds
    if out.get("mlp_layer_types") is None:
        out["mlp_layer_types"] = ["dense" if i < first else "sparse" for i in range(count)]
    return out


_SELF, _PUBLISHED = LAYER + "self_attn.", LAYER + "attention."


def _either(part: str, stored: str = "") -> AnyOf:
    """A tensor of the attention under both naming schemes."""
    return AnyOf(_PUBLISHED + (stored or part.rpartition(".")[2]), _SELF + part)


def _convs(at: str) -> tuple[str, ...]:
    return tuple(f"{at}{one}_conv1d" for one in "qkv")


BAILING: Names = {
    "embed": AnyOf("model.word_embeddings", "model.embed_tokens"),
    "mixer.q": _either("q_proj"),
    "mixer.q_a": _either("q_a_proj"),
    "mixer.q_a_norm": _either("q_a_layernorm"),
    "mixer.q_b": _either("q_b_proj"),
    "mixer.kv_a": _either("kv_a_proj_with_mqa"),
    "mixer.kv_a_norm": _either("kv_a_layernorm"),
    "mixer.kv_b": _either("kv_b_proj"),
    "mixer.gate": _either("g_proj"),
    "mixer.o": _either("o_proj", "dense"),
    "state.qkv": AnyOf(*(tuple(f"{at}{one}_proj" for one in "qkv") for at in (_PUBLISHED, _SELF))),
    "state.conv": AnyOf(_convs(_PUBLISHED), _convs(_SELF), _SELF + "conv1d"),
    "state.a_log": AnyOf(
        *(Named((one,), flat) for one in (_PUBLISHED + "A_log", _SELF + "forget_gate.A_log"))
    ),
    "state.dt_bias": _either("forget_gate.dt_bias"),
    "state.decay": _either("forget_gate.f_proj"),
    "state.gate": _either("g_proj"),
    "state.beta": _either("b_proj"),
    "state.norm": _either("o_norm"),
    "state.out": _either("o_proj", "dense"),
    "moe.correction": AnyOf(_MLP + "gate.expert_bias", _MLP + "gate.e_score_correction_bias"),
}


def bailing_hybrid(c: Config) -> Decoder:
    """KDA delta nets and gated latent attention, as in Kimi Linear."""
    heads, dim = c.get("linear_num_heads", c.num_attention_heads), c.get("linear_head_dim")
    width = c.get("linear_conv_kernel_dim", c.short_conv_kernel_size)
    fades = channel_delta(c, heads, dim or c.head_dim, width)
    floor = float(c.kda_lower_bound) if c.kda_safe_gate else 0.0
    state = replace(fades, low_rank=False, decay_floor=floor)
    attends = replace(latent(c, interleaved=True), gate="head")
    shared = c.moe_intermediate_size * c.get("n_shared_experts", 0)
    sparse = corrected_moe(c, Mlp(shared, activation(c)))
    kinds = c.layer_types
    return build_decoder(
        c,
        lambda i: attends if kinds[i] == "full_attention" else state,
        by_layer_type(c, sparse),
        names=BAILING,
        tied=False,
    )


def bailing_moe_v3(c: Config) -> Decoder:
    """Ling 3 as published: Bailing hybrid with further keys, which hold its values."""
    c.refuse("no_kda_lora", True)
    c.refuse("gated_attention_proj_granularity_type", "head_wise")
    c.refuse("moe_shared_expert_intermediate_size", c.moe_intermediate_size)
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(c.get(key, ())):
            raise c.error(key, "is not supported (must have no limits)")
    return bailing_hybrid(c)
