"""Mixtral (arXiv:2401.04088) and MiniMax M2, whose experts have the same names."""

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    attention,
    build_decoder,
    head_dim,
    moe,
    rms,
    rope,
)
from radixlm.arch.families.mistral_native import native
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


def mixtral(c: Config) -> Decoder:
    described = build_decoder(
        c,
        attention(c, window=c.sliding_window or 0),
        moe(c, inner=c.intermediate_size, renorm=True),
        names=W1_W3_W2,
    )
    return native(c, described)


def minimax_m2_config(raw: dict[str, Any]) -> dict[str, Any]:
    """``rotary_dim`` channels of a head are rotated."""
    rope_dim, head_dim = raw.get("rotary_dim"), raw.get("head_dim") or 128
    if rope_dim is None or raw.get("partial_rotary_factor") is not None:
        return raw
    return {**raw, "partial_rotary_factor": rope_dim / head_dim}


def minimax_m2(c: Config) -> Decoder:
    position = rope(c, head_dim(c), partial=True)
    correction = "e_score_correction_bias"
    return build_decoder(
        c,
        attention(c, rope=position, qk_norm="row", qk_norm_spec=rms(c)),
        moe(c, inner=c.intermediate_size, score="sigmoid", correction=True, renorm=True),
        names={
            **W1_W3_W2,
            "moe.correction": AnyOf(_MOE + correction, f"{LAYER}mlp.{correction}"),
        },
    )
