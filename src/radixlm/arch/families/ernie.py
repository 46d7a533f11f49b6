"""ERNIE 4.5, dense and with experts: adjacent channels turn together."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    Ffn,
    activation,
    attention,
    family,
    head_dim,
    mlp,
    moe,
    plain,
    rope,
)
from radixlm.arch.names import LAYER, Named
from radixlm.arch.recipes import flat
from radixlm.arch.spec import Attention, Decoder, Mlp


def _attention(c: Config) -> Attention:
    position = rope(c, head_dim(c), interleaved=True)
    return attention(c, rope=position, qkv_bias=c.use_bias, o_bias=c.use_bias)


@family("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
def ernie(c: Config) -> Decoder:
    return plain(c, _attention(c), mlp(c, bias=c.use_bias))


@family("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM")
def ernie_moe(c: Config) -> Decoder:
    shared = c.moe_intermediate_size * c.moe_num_shared_experts
    sparse = moe(
        c,
        correction=True,
        renorm=True,
        shared=Mlp(shared, activation(c), bias=c.use_bias) if shared else None,
    )
    end = c.moe_layer_end_index if c.moe_layer_end_index != -1 else c.num_hidden_layers - 1

    def ffn(i: int) -> Ffn:
        inside = c.moe_layer_start_index <= i <= end
        is_sparse = inside and (i + 1) % c.moe_layer_interval == 0
        return sparse if is_sparse else mlp(c, bias=c.use_bias)

    correction = Named((LAYER + "mlp.moe_statics.e_score_correction_bias",), flat)
    names = {"moe.correction": correction}
    return plain(c, _attention(c), ffn, head_bias=c.use_bias, names=names)
