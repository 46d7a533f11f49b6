"""Mixtral."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, family, moe, plain
from radixlm.arch.names import LAYER, AnyOf, Names
from radixlm.arch.spec import Decoder

_MOE = LAYER + "block_sparse_moe."
W1_W3_W2: Names = {
    "moe.router": AnyOf(_MOE + "gate", LAYER + "mlp.gate"),
    "moe.up": AnyOf(
        (_MOE + "experts.{e}.w1", _MOE + "experts.{e}.w3"), LAYER + "mlp.experts.gate_up_proj"
    ),
    "moe.down": AnyOf(_MOE + "experts.{e}.w2", LAYER + "mlp.experts.down_proj"),
}


@family("MixtralForCausalLM")
def mixtral(c: Config) -> Decoder:
    return plain(
        c,
        attention(c, window=c.sliding_window or 0),
        moe(c, inner=c.intermediate_size, renorm=True),
        names=W1_W3_W2,
    )
