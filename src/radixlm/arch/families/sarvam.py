"""Sarvam: 30B, with BailingMoe's names, and 105B, which is DeepSeek V3."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.deepseek import deepseek_v3, routed
from radixlm.arch.names import LAYER, AnyOf, Names
from radixlm.arch.spec import Decoder

_ATTENTION, _SELF, _GATE = LAYER + "attention.", LAYER + "self_attn.", LAYER + "mlp.gate."
_NAMES: Names = {
    "embed": AnyOf("model.word_embeddings", "model.embed_tokens"),
    "mixer.qkv": AnyOf(
        _ATTENTION + "query_key_value", tuple(f"{_SELF}{part}_proj" for part in "qkv")
    ),
    "mixer.o": AnyOf(_ATTENTION + "dense", _SELF + "o_proj"),
    "mixer.q_norm": AnyOf(_ATTENTION + "query_layernorm", _SELF + "q_norm"),
    "mixer.k_norm": AnyOf(_ATTENTION + "key_layernorm", _SELF + "k_norm"),
    "moe.correction": AnyOf(_GATE + "expert_bias", _GATE + "e_score_correction_bias"),
}


def sarvam_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The published keys under the names of the class; ``deepseek_yarn`` is YaRN."""
    out = dict(raw)
    for new_key, old_key in (
        ("n_shared_experts", "num_shared_experts"),
        ("attention_bias", "use_qkv_bias"),
    ):
        if out.get(old_key) is not None:
            out[new_key] = out[old_key]
    scaling = out.get("rope_scaling")
    kinds = ("type", "rope_type")
    if isinstance(scaling, dict) and "deepseek_yarn" in map(scaling.get, kinds):
        kept = {key: value for key, value in scaling.items() if key not in kinds}
        out["rope_scaling"] = {**kept, "rope_type": "yarn"}
    return out


def sarvam_moe(c: Config) -> Decoder:
    is_normed = c.use_qk_norm
    mixer = b.attention(
        c,
        rope=b.rope(c, b.head_dim(c), partial=True),
        qkv_bias=c.attention_bias,
        qk_norm="head" if is_normed else "",
        qk_norm_spec=b.rms(c) if is_normed else None,
    )
    return b.build_decoder(c, mixer, routed(c, score="sigmoid", correction=True), names=_NAMES)


def sarvam_mla(c: Config) -> Decoder:
    return deepseek_v3(c)
