"""MiniCPM-SALA: lightning attention with rotated queries and keys, and attention without positions
in some layers. Beyond ``dense_len`` tokens its authors make those layers sparse (InfLLM v2); here
they read every token."""

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.alibi import alibi_slopes
from radixlm.arch.families.custom import minicpm_scales
from radixlm.arch.names import LAYER, Names
from radixlm.arch.spec import AttentionExtras, Decoder, RotatedLightning

_ATTENTION = LAYER + "self_attn."
_FULL, _LIGHTNING = "minicpm4", ("lightning", "lightning_attn", "lightning-attn")
_NAMES: Names = {
    "mixer.gate": _ATTENTION + "o_gate",
    "state.qkv": tuple(f"{_ATTENTION}{one}_proj" for one in "qkv"),
    "state.q_norm": _ATTENTION + "q_norm",
    "state.k_norm": _ATTENTION + "k_norm",
    "state.gate": _ATTENTION + "z_proj",
    "state.norm": _ATTENTION + "o_norm",
    "state.out": _ATTENTION + "o_proj",
}


def minicpm_sala(c: Config) -> Decoder:
    for key in ("use_output_gate", "use_output_norm"):
        c.refuse(key, True)
    c.refuse("lightning_scale", "1/sqrt(d)")
    c.refuse("attention_bias", False)
    heads, dim = c.get("lightning_nh") or c.num_attention_heads, c.get("lightning_head_dim")
    dim = dim or b.head_dim(c)
    c.refuse("lightning_nkv", heads)
    linear = RotatedLightning(
        heads,
        dim,
        decays=tuple(-slope for slope in alibi_slopes(heads)),
        norm=b.rms(c),
        norm_groups=1,
        rope=b.rope(c, dim) if c.get("lightning_use_rope", True) else None,
        qk_norm=b.rms(c) if c.get("qk_norm", True) else None,
    )
    more: dict[str, Any] = {} if c.get("attn_use_rope", True) else {"rope": None}
    if c.get("attn_use_output_gate", False):
        more["extras"] = AttentionExtras(gate="channel")
    attends, kinds = b.attention(c, **more), c.get("mixer_types") or [_FULL] * c.num_hidden_layers
    if len(kinds) != c.num_hidden_layers or not {*kinds} <= {_FULL, *_LIGHTNING}:
        names = ", ".join((_FULL, *_LIGHTNING))
        raise c.error("mixer_types", f"must name one of {names} for each of the layers")

    def mixer(i: int) -> b.Mixer:
        return attends if kinds[i] == _FULL else linear

    return minicpm_scales(c, b.build_decoder(c, mixer, names=_NAMES))
