"""Granite: multipliers on embeddings, attention, residuals and logits."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, family, mlp, plain
from radixlm.arch.spec import Decoder


@family("GraniteForCausalLM")
def granite(c: Config) -> Decoder:
    bias = c.attention_bias
    return plain(
        c,
        attention(c, scale=c.attention_multiplier, qkv_bias=bias, o_bias=bias),
        mlp(c, bias=c.mlp_bias),
        residual=c.residual_multiplier,
        embed_scale=c.embedding_multiplier,
        logit_scale=1 / c.logits_scaling,
    )
