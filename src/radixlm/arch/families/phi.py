"""Phi 1 to 4 (text; arXiv:2306.11644, 2404.14219), StableLM (arXiv:2402.17834), StarCoder 2
(arXiv:2402.19173) and Nemotron (arXiv:2402.16819): layer norms or partial rotation."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import FUSED_UP, LAYER, Named
from radixlm.arch.recipes import PerHead
from radixlm.arch.spec import Decoder, Mlp, Norm

_ATTENTION = LAYER + "self_attn."


def phi(c: Config) -> Decoder:
    norm = Norm(c.layer_norm_eps, "layer", bias=True)
    return b.build_decoder(
        c,
        b.attention(
            c,
            rope=b.rope(c, b.head_dim(c), partial=True),
            qkv_bias=True,
            o_bias=True,
            qk_norm="head" if c.qk_layernorm else "",
            qk_norm_spec=norm if c.qk_layernorm else None,
        ),
        Mlp(c.intermediate_size, b.activation(c), gated=False, bias=True),
        norm=norm,
        layout="parallel",
        head_bias=True,
        names={
            "norm": "model.final_layernorm",
            "mixer.o": _ATTENTION + "dense",
            "mixer.q_norm": _ATTENTION + "q_layernorm",
            "mixer.k_norm": _ATTENTION + "k_layernorm",
            "ffn.up1": LAYER + "mlp.fc1",
            "ffn.down": LAYER + "mlp.fc2",
        },
    )


def phi3(c: Config) -> Decoder:
    position = b.rope(c, b.head_dim(c), partial=True)
    names = {"mixer.qkv": _ATTENTION + "qkv_proj", "ffn.up": FUSED_UP}
    return b.build_decoder(
        c, b.attention(c, rope=position, window=c.sliding_window or 0), names=names
    )


def stablelm(c: Config) -> Decoder:
    dim = c.divide("hidden_size", "num_attention_heads")
    mixer = b.attention(
        c,
        head_dim=dim,
        rope=b.rope(c, dim, partial=True),
        qkv_bias=c.use_qkv_bias,
        qk_norm="each" if c.qk_layernorm else "",
        qk_norm_spec=Norm(c.layer_norm_eps, "layer") if c.qk_layernorm else None,
    )

    def per_head(part: str, heads: int) -> Named:
        norms = tuple(f"{_ATTENTION}{part}_layernorm.norms.{head}" for head in range(heads))
        return Named(norms, PerHead(heads))

    return b.build_decoder(
        c,
        mixer,
        norm=Norm(c.layer_norm_eps, "layer", bias=True),
        layout="parallel" if c.use_parallel_residual else "pre",
        names={
            "mixer.q_norm": per_head("q", mixer.heads),
            "mixer.k_norm": per_head("k", mixer.kv_heads),
        },
    )


def starcoder2(c: Config) -> Decoder:
    bias = c.use_bias
    return b.build_decoder(
        c,
        b.attention(c, qkv_bias=bias, o_bias=bias, window=c.sliding_window or 0),
        b.mlp(c, gated=False, bias=bias),
        norm=Norm(c.norm_epsilon, "layer", bias=True),
        names={"ffn.up1": LAYER + "mlp.c_fc", "ffn.down": LAYER + "mlp.c_proj"},
    )


def nemotron(c: Config) -> Decoder:
    bias, position = c.attention_bias, b.rope(c, b.head_dim(c), partial=True)
    return b.build_decoder(
        c,
        b.attention(c, rope=position, qkv_bias=bias, o_bias=bias),
        b.mlp(c, gated=False, bias=c.mlp_bias),
        norm=Norm(c.norm_eps, "layer", offset=1.0, bias=True),
    )
