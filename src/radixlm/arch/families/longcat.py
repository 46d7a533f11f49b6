"""LongCat Flash (arXiv:2509.01322): layers of two attentions and two feed-forwards, with
experts."""

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    activation,
    build_decoder,
    moe,
    rms,
)
from radixlm.arch.families.deepseek import latent
from radixlm.arch.names import AnyOf, Named, Names
from radixlm.arch.recipes import FirstRows, Scaled
from radixlm.arch.spec import Block, Decoder, Mlp
from radixlm.base.record import replace

_LAYER = "model.layers.{half}."
_ATTENTION, _MLP = _LAYER + "self_attn.{odd}.", _LAYER + "mlp."


def longcat_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The usual names of both widths, unless the config has them."""
    both = {
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
    }
    return {**{own: raw[usual] for usual, own in both.items() if usual in raw}, **raw}


def longcat_flash(c: Config) -> Decoder:
    """A layer is two blocks. The experts read the first block's feed-forward input, and their
    output is added after the second block; zero experts return their input. The factors of the
    latents are multiplied into weights."""
    c.refuse("router_bias", False)
    c.refuse("attention_method", "MLA")
    mixer = latent(c, interleaved=True)
    sparse = moe(
        c,
        inner=c.expert_ffn_hidden_size,
        correction=True,
        scale=c.routed_scaling_factor,
        zero_experts=c.get("zero_expert_num", 0),
    )
    dense, norm = Mlp(c.ffn_hidden_size, activation(c)), rms(c)
    pair = (Block(mixer, dense, norm, deferred_moe=sparse), Block(mixer, dense, norm))
    q_scale, kv_scale = ((c.hidden_size / r) ** 0.5 for r in (c.q_lora_rank, c.kv_lora_rank))
    mlps, experts = _LAYER + "mlps.{odd}.", _MLP + "experts."
    names: Names = {
        "norm1": _LAYER + "input_layernorm.{odd}",
        "norm2": _LAYER + "post_attention_layernorm.{odd}",
        "mixer.q_a": _ATTENTION + "q_a_proj",
        "mixer.q_a_norm": _ATTENTION + "q_a_layernorm",
        "mixer.q_b": Named((_ATTENTION + "q_b_proj",), Scaled(q_scale)),
        "mixer.kv_a": _ATTENTION + "kv_a_proj_with_mqa",
        "mixer.kv_a_norm": Named((_ATTENTION + "kv_a_layernorm",), Scaled(kv_scale)),
        "mixer.kv_b": _ATTENTION + "kv_b_proj",
        "mixer.o": _ATTENTION + "o_proj",
        "ffn.up": (mlps + "gate_proj", mlps + "up_proj"),
        "ffn.down": mlps + "down_proj",
        "moe.router": _MLP + "router.classifier",
        "moe.correction": _MLP + "router.e_score_correction_bias",
        "moe.up": AnyOf(
            (experts + "{e}.gate_proj", experts + "{e}.up_proj"),
            Named((experts + "gate_up_proj",), FirstRows(c.num_experts)),
        ),
        "moe.down": AnyOf(experts + "{e}.down_proj", experts + "down_proj"),
    }
    described = build_decoder(c, mixer, dense, norm, names=names)
    return replace(described, blocks=pair * c.num_hidden_layers)
