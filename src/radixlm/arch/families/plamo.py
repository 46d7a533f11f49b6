"""PLaMo 2 (arXiv:2509.04897) and 3: norms before and after the branches, which store the difference
from three constants. PLaMo 2 has Mamba layers between its attention layers."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.hybrid import mamba_names
from radixlm.arch.names import Named, Names
from radixlm.arch.recipes import GroupedParts, RepeatInterleave
from radixlm.arch.spec import Decoder, Mamba1, Norm
from radixlm.base.record import replace

_LAYER = "model.layers.layers.{i}."
_MIXER = _LAYER + "mixer."
_NAMES: Names = {
    "norm1": _LAYER + "pre_mixer_norm",
    "norm2": _LAYER + "post_mixer_norm",
    "norm3": _LAYER + "pre_mlp_norm",
    "norm4": _LAYER + "post_mlp_norm",
    "mixer.qkv": _MIXER + "qkv_proj",
    "mixer.o": _MIXER + "o_proj",
    "ffn.up": _LAYER + "mlp.gate_up_proj",
    "ffn.down": _LAYER + "mlp.down_proj",
}


def _plamo(c: Config, mixer: Any, names: Names) -> Decoder:
    posts = (b.rms(c, 0.2), b.rms(c, 5.0**-1.5))
    described = b.build_decoder(c, mixer, norm=b.rms(c, 1.0), layout="sandwich", names=names)
    blocks = tuple(replace(block, post_norms=posts) for block in described.blocks)
    return replace(described, blocks=blocks)


def _near(c: Config, theta: float) -> Config:
    """The config with the rotation of layers that have a window."""
    return c.replace(rope_parameters={"rope_type": "default", "rope_theta": theta})


def plamo2(c: Config) -> Decoder:
    """Mamba layers whose heads each have one time step and one decay; attention layers have a
    window unless ``full_attention_idx`` lists them."""
    step, count = c.get("mamba_step", 2), c.num_hidden_layers
    if not isinstance(step, int) or step < 2:
        raise c.error("mamba_step", f"= {step!r} must be an integer above 1")
    has_mamba, full = c.get("mamba_enabled", True), c.get("full_attention_idx", [])
    width, heads, size = c.hidden_size_per_head, c.mamba_num_heads, c.get("mamba_d_state", 64)
    rank = max(64, c.hidden_size // 16)
    state = Mamba1(
        heads * width, size, rank, c.get("mamba_d_conv", 4), conv_bias=False, norm=b.rms(c)
    )

    def is_mamba(i: int) -> bool:
        middle = step // 2
        return i != count - 1 if count <= middle else i % step != middle

    def mixer(i: int) -> b.Mixer:
        if has_mamba and is_mamba(i):
            return state
        return b.attention(
            c if i in full else _near(c, c.get("rope_local_theta", 10000)),
            head_dim=width,
            window=0 if i in full else c.get("attention_window_size", 2048),
            qk_norm="each",
            qk_norm_spec=Norm(1e-6),
        )

    of_heads, b_c_dt = RepeatInterleave(width), (size, size, rank)
    names: Names = {
        **_NAMES,
        **mamba_names(_MIXER),
        "mixer.q_norm": _MIXER + "q_weight",
        "mixer.k_norm": _MIXER + "k_weight",
        "state.inp": Named((_MIXER + "in_proj",), GroupedParts(heads, (width, width), (1, 0))),
        "state.x_proj": Named((_MIXER + "bcdt_proj",), GroupedParts(1, b_c_dt, (2, 0, 1))),
        "state.dt_proj": Named((_MIXER + "dt_proj",), of_heads),
        "state.dt_proj.bias": Named((_MIXER + "dt_bias",), of_heads),
        "state.a_log": Named((_MIXER + "A_log",), RepeatInterleave(width, size)),
        "state.d": Named((_MIXER + "D",), of_heads),
        "state.dt_norm": _MIXER + "dt_norm_weight",
        "state.b_norm": _MIXER + "B_norm_weight",
        "state.c_norm": _MIXER + "C_norm_weight",
    }
    return _plamo(c, mixer, names)


def plamo3(c: Config) -> Decoder:
    every, local = c.get("sliding_window_pattern", 8), c.get("rope_local_theta", 10000)
    spans, kinds = c.get("interleaved_sliding_window", c.sliding_window), c.layer_types

    def is_full(i: int) -> bool:
        if kinds:
            return not b.is_sliding(c, i)
        return spans[i] is None if isinstance(spans, list) else (i + 1) % every == 0

    def mixer(i: int) -> b.Mixer:
        span = spans[i] if isinstance(spans, list) else spans
        return b.attention(
            c if is_full(i) else _near(c, local),
            window=0 if is_full(i) else span,
            qk_norm="head",
            qk_norm_spec=b.rms(c, offset=1.0),
        )

    names: Names = {
        **_NAMES,
        "mixer.q_norm": _MIXER + "q_norm",
        "mixer.k_norm": _MIXER + "k_norm",
    }
    return _plamo(c, mixer, names)
