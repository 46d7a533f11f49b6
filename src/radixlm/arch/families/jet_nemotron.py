"""Jet-Nemotron (arXiv:2508.15884): delta nets that convolve their values alone, with taps made of
the token, between a few attention layers."""

from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, Names

_KINDS = {"jet": "linear_attention", "attn": "full_attention", "swa": "sliding_attention"}
_ATTENTION = LAYER + "self_attn."
_TAPS = _ATTENTION + "dynamic_conv1d.kernel_generator."
_NAMES: Names = {
    "state.qkv": tuple(f"{_ATTENTION}{one}_proj" for one in "qkv"),
    "state.tap_in": _TAPS + "w1",
    "state.tap_out": _TAPS + "w2",
    "state.decay": _ATTENTION + "a_proj",
    "state.beta": _ATTENTION + "b_proj",
    "state.gate": _ATTENTION + "g_proj",
    "state.a_log": _ATTENTION + "A_log",
    "state.dt_bias": _ATTENTION + "dt_bias",
    "state.norm": _ATTENTION + "o_norm",
    "state.out": _ATTENTION + "o_proj",
}


def jet_nemotron_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The usual names of layer types, and of the window."""
    kinds, own = raw.get("layer_types"), raw.get("efficient_attention_config") or {}
    usual = [_KINDS.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else kinds
    window = (own.get("swa") or {}).get("window_size")
    return {**raw, "layer_types": usual, "sliding_window": window}


def jet_nemotron(c: Config) -> spec.Decoder:
    own, kinds = (c.efficient_attention_config.get("jet") or {}), c.layer_types
    heads, dim, width = own.get("num_heads", 6), own.get("head_dim", 256), own.get("conv_size", 4)
    values = int(dim * float(own.get("expand_v", 2.0)))
    state = spec.DeltaNet(
        heads,
        heads,
        dim,
        values,
        width,
        spec.Norm(float(own.get("norm_eps", 1e-5))),  # a string in published configs
        act="silu",
        tap_rank=heads * values // int(own.get("dconv_generator_reduction", 8)),
    )

    def mixer(i: int) -> b.Mixer:
        if kinds[i] == "linear_attention":
            return state
        return b.attention(c, qkv_bias=True, window=b.window(c, i))

    return b.build_decoder(c, mixer, names=_NAMES)
