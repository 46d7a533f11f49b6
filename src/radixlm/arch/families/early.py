"""CTRL: GPT-2's time, with sines and cosines for places."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, family, plain
from radixlm.arch.names import Names
from radixlm.arch.spec import Decoder, Mlp, Norm

_LAYER = "transformer.h.{i}."
_ATTENTION = _LAYER + "multi_head_attention."


@family("CTRLLMHeadModel")
def ctrl(c: Config) -> Decoder:
    names: Names = {
        "embed": "transformer.w",
        "norm": "transformer.layernorm",
        "norm1": _LAYER + "layernorm1",
        "norm2": _LAYER + "layernorm2",
        "mixer.qkv": tuple(f"{_ATTENTION}W{one}" for one in "qkv"),
        "mixer.o": _ATTENTION + "dense",
        "ffn.up1": _LAYER + "ffn.0",
        "ffn.down": _LAYER + "ffn.2",
    }
    return plain(
        c,
        attention(c, rope=None, qkv_bias=True, o_bias=True),
        Mlp(c.dff, "relu", gated=False, bias=True),
        Norm(1e-6, "layer", bias=True),
        final_norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        embed_scale=c.hidden_size**0.5,
        positions=(c.max_position_embeddings, 0),
        sinusoids=True,
        sinusoid_steps=c.hidden_size // 2,
        head_bias=True,
        names=names,
    )
