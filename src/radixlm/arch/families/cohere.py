"""Command R (Cohere 1 and 2): parallel branches, adjacent channels turn together."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, family, head_dim, plain, rope, window
from radixlm.arch.spec import Attention, Decoder, Norm


@family("CohereForCausalLM")
def cohere(c: Config) -> Decoder:
    norm = Norm(c.layer_norm_eps, "layer")
    bias = c.attention_bias
    mixer = attention(
        c,
        rope=rope(c, head_dim(c), interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="each" if c.use_qk_norm else "",
        qk_norm_spec=norm if c.use_qk_norm else None,
    )
    return plain(c, mixer, norm=norm, layout="parallel", logit_scale=c.logit_scale)


@family("Cohere2ForCausalLM")
def cohere2(c: Config) -> Decoder:
    bias, every = c.attention_bias, c.sliding_window_pattern

    def mixer(i: int) -> Attention:
        if c.layer_types is not None:
            span = window(c, i)
        else:
            span = c.sliding_window if (i + 1) % every else 0
        position = rope(c, head_dim(c), interleaved=True) if span else None
        return attention(c, rope=position, qkv_bias=bias, o_bias=bias, window=span)

    norm = Norm(c.layer_norm_eps, "layer")
    return plain(c, mixer, norm=norm, layout="parallel", logit_scale=c.logit_scale)
