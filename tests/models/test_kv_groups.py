"""KV groups: which layers share a pool."""

from __future__ import annotations

from radixlm.arch.spec import (
    Attention,
    Block,
    CompressedSparseAttention,
    Decoder,
    KVCompression,
    LatentAttention,
    Mlp,
    Norm,
    Rope,
)
from radixlm.base.record import replace
from radixlm.models.kv_groups import entry_places, kv_groups, pool_places

FULL = Attention(heads=8, kv_heads=2, head_dim=16, rope=None)
WINDOW = replace(FULL, window=32)
LATENT = LatentAttention(4, 16, 8, 16, 64, 0, Rope(8, 1e4), Norm(1e-6), 0.2)


def decoder(*mixers: Attention | LatentAttention) -> Decoder:
    norm = Norm(1e-6)
    blocks = tuple(Block(m, Mlp(64, "silu"), norm) for m in mixers)
    return Decoder(100, 64, blocks, norm, 256)


def test_layers_of_one_shape_share_a_group() -> None:
    (group,) = kv_groups(decoder(FULL, FULL, replace(FULL, heads=4, softcap=5.0)))
    assert (group.name, group.layers, group.kv_heads, group.head_dim) == ("full", (0, 1, 2), 2, 16)


def test_full_groups_come_first() -> None:
    described = decoder(WINDOW, WINDOW, FULL, WINDOW)
    groups = kv_groups(described)
    assert [(g.index, g.name, g.layers, g.window) for g in groups] == [
        (0, "full", (2,), 0),
        (1, "window", (0, 1, 3), 32),
    ]
    assert pool_places(described, groups) == {2: (0, 0), 0: (1, 0), 1: (1, 1), 3: (1, 2)}


def test_windows_merge_into_the_full_group_of_their_shape() -> None:
    groups = kv_groups(decoder(WINDOW, FULL, WINDOW), merge_windows=True)
    assert [(g.name, g.layers, g.window) for g in groups] == [("full", (0, 1, 2), 0)]


def test_other_shapes_get_groups_of_their_own() -> None:
    wide = replace(FULL, kv_heads=4, head_dim=32)
    groups = kv_groups(decoder(FULL, wide, WINDOW, replace(WINDOW, window=64)))
    assert [(g.name, g.layers) for g in groups] == [
        ("full", (0,)),
        ("full", (1,)),
        ("window", (2,)),
        ("window", (3,)),
    ]


def test_latent_groups_hold_one_vector_a_token() -> None:
    (group,) = kv_groups(decoder(LATENT, LATENT))
    assert (group.latent, group.kv_heads, group.head_dim, group.v_dim) == (True, 1, 72, 64)


def test_sums_of_tokens_have_rows_of_their_own_that_tokens_share() -> None:
    rope, norm = Rope(4, 1e4), Norm(1e-6)
    sums = CompressedSparseAttention(4, 8, rope, 7, 6, norm, 2, 3, KVCompression(12, True, 2, 4, 3))
    alone = CompressedSparseAttention(4, 8, rope, 7, 6, norm, 2, 3)
    blocks = tuple(Block(one, Mlp(16, "silu"), norm) for one in (sums, alone, sums))
    groups = kv_groups(Decoder(10, 12, blocks, norm, 64))
    shapes = {
        g.name + str(g.compress_ratio): (g.layers, g.head_dim, g.window)
        for g in groups
        if g.compress_ratio
    }
    assert shapes == {"full12": ((0, 2), 8 + 4, 0)}
    assert {(g.layers, g.head_dim, g.window) for g in groups if not g.compress_ratio} == {
        ((0, 2), 8 + 4 * 8 + 4 * 4, 24),  # two runs of 12 must be there to be summed up
        ((1,), 8, 7),
    }
    full = next(g for g in groups if g.compress_ratio)
    assert [full.rows_per_page(size) for size in (16, 12, 5)] == [4, 1, 5]
    assert entry_places(groups) == {0: (full.index, 0), 2: (full.index, 1)}
