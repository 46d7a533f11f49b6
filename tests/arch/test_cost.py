"""Costs of hand-made descriptions against sums written out; HF counts: test_families."""

from __future__ import annotations

from radixlm.arch.cost import (
    KvBytes,
    active_parameters,
    flops_per_token,
    kv_bytes_per_token,
    num_parameters,
    weight_bytes,
)
from radixlm.arch.spec import Attention, Block, Decoder, LatentAttention, Mlp, Moe, Norm, Rope

RMS, ROPE = Norm(1e-6), Rope(4, 1e4)
DENSE = Mlp(16, "silu")
FULL = Attention(4, 2, 4, ROPE)
SLIDING = Attention(4, 2, 4, ROPE, window=8)


def _decoder(*blocks: Block, tied: bool = True) -> Decoder:
    return Decoder(10, 12, blocks, RMS, 64, tied)


def test_kv_bytes_are_apart_by_kind_of_layer() -> None:
    latent = LatentAttention(4, 8, 4, 8, 20, 0, ROPE, RMS, 0.3)
    blocks = [Block(mixer, DENSE, RMS) for mixer in (FULL, SLIDING, SLIDING, latent)]
    cost = kv_bytes_per_token(_decoder(*blocks), 2)
    assert cost == KvBytes(full=2 * 2 * 4 * 2 + (20 + 4) * 2, window=2 * (2 * 2 * 4 * 2))
    assert cost.total == cost.full + cost.window


def test_only_chosen_experts_are_active() -> None:
    moe = Moe(8, 2, 5, "silu", shared=Mlp(7, "silu"))
    decoder = _decoder(Block(FULL, moe, RMS))
    expert = 3 * 5 * 12
    assert num_parameters(decoder) - active_parameters(decoder) == 6 * expert
    dense = _decoder(Block(FULL, DENSE, RMS))
    assert num_parameters(dense) == active_parameters(dense)
    assert weight_bytes(dense, 0.5) == num_parameters(dense) // 2


def test_flops_of_one_layer() -> None:
    matrices = (4 + 2 * 2) * 4 * 12 + 16 * 12 + 3 * 16 * 12
    head = 2 * 10 * 12
    full = _decoder(Block(FULL, DENSE, RMS))
    assert flops_per_token(full, 100) == head + 2 * matrices + 4 * 100 * 16
    sliding = _decoder(Block(SLIDING, DENSE, RMS))
    assert flops_per_token(sliding, 100) == head + 2 * matrices + 4 * 8 * 16
    assert flops_per_token(sliding, 3) == head + 2 * matrices + 4 * 3 * 16


def test_an_untied_head_counts_once_more() -> None:
    block = Block(FULL, DENSE, RMS)
    untied = num_parameters(_decoder(block, tied=False))
    assert untied - num_parameters(_decoder(block)) == 10 * 12
