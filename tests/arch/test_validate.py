"""Values of a wrong type are refused anywhere in a description."""

from __future__ import annotations

from typing import Any

import pytest

from radixlm.arch.hf import describe
from radixlm.arch.spec import Decoder
from radixlm.arch.validate import check
from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace
from tests.arch.oracle import TINY

DECODER = describe({"architectures": ["LlamaForCausalLM"], **TINY})


def _with(part: str, **change: Any) -> Decoder:
    block = DECODER.blocks[1]
    changed = replace(block, **{part: replace(getattr(block, part), **change)})
    return replace(DECODER, blocks=(DECODER.blocks[0], changed))


def test_a_valid_description_passes() -> None:
    assert check(DECODER, "x") is DECODER
    assert check(replace(DECODER, positions=(64, 2)), "x")


WRONG = [
    (_with("mixer", heads="4"), "Attention.heads"),
    (_with("mixer", kv_heads=-1), "Attention.kv_heads"),
    (_with("mixer", window=2**40), "Attention.window"),
    (_with("mixer", qkv_bias={}), "Attention.qkv_bias"),
    (_with("mixer", scale=float("nan")), "Attention.scale"),
    (_with("mixer", rope=replace(DECODER.blocks[0].mixer.rope, theta=None)), "Rope.theta"),
    (_with("ffn", inner=1.5), "Mlp.inner"),
    (_with("norm", eps="tiny"), "Norm.eps"),
    (replace(DECODER, positions=(64, "2")), "Decoder.positions"),
    (replace(DECODER, tied=1), "Decoder.tied"),
]


@pytest.mark.parametrize(("decoder", "where"), WRONG)
def test_a_wrong_value_is_named(decoder: Decoder, where: str) -> None:
    with pytest.raises(CheckpointError, match=where) as caught:
        check(decoder, "here/config.json")
    assert "here/config.json" in str(caught.value)
