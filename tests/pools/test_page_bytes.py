"""Pages as bytes: what is read and written elsewhere is the same page, in every kind of pool."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.attention.cpu import CpuPool
from radixlm.base.errors import InvariantError
from radixlm.pools.group import KvGroup
from radixlm.pools.page_bytes import PageBytes
from radixlm.pools.pool import PagedPool
from radixlm.pools.state import StatePool

CPU = torch.device("cpu")
PLAIN = KvGroup(0, "full", (0, 2, 5), kv_heads=2, head_dim=8, v_dim=4)
LATENT = KvGroup(1, "full", (1, 3), kv_heads=1, head_dim=12, v_dim=8, latent=True)
WINDOW = KvGroup(2, "window", (4,), kv_heads=2, head_dim=8, v_dim=8, window=20)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def make_pool(kind: str, group: KvGroup, dtype: torch.dtype, seed: int) -> Any:
    pool: Any = CpuPool(group, 7, 16, dtype) if kind == "cpu" else PagedPool(
        group, 7, 16, dtype, CPU
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(group.layers)):
        k = torch.randn(7 * 16, group.kv_heads, group.head_dim, generator=generator)
        v = torch.randn(7 * 16, group.kv_heads, group.v_dim, generator=generator)
        pool.write(layer, range(7), k, None if group.latent else v)
    return pool


def make(kind: str, dtype: torch.dtype, seed: int) -> tuple[PageBytes, list[Any]]:
    pools = [make_pool(kind, group, dtype, seed) for group in (PLAIN, LATENT, WINDOW)]
    states = StatePool([(((3, 2), False), ((4,), True)), (((5,), True),)], 7, 16, dtype, CPU)
    if dtype != torch.float32:
        states = StatePool([], 7, 16, torch.float32, CPU)
    generator = torch.Generator().manual_seed(seed)
    for layer in states.layers:
        for tensor in layer:
            tensor[:] = torch.randn(tensor.shape, generator=generator)
    return PageBytes(list(zip((0, 0, 1), pools, strict=True)), states), [*pools, states]


def rows(page_bytes: PageBytes, space: int, pages: np.ndarray[Any, Any]) -> list[Any]:
    out = [np.empty(page_bytes.nbytes(space), np.uint8) for _ in pages]
    page_bytes.read(space, pages, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["cpu", "paged"])
def test_pages_come_back_in_bits(kind: str, dtype: torch.dtype) -> None:
    (source, old), (target, new) = make(kind, dtype, 1), make(kind, dtype, 2)
    untouched = rows(target, 0, np.array([0, 2, 4, 5, 6], np.int32))
    for space in (0, 1):
        sent = rows(source, space, np.array([5, 2], np.int32))
        target.write(space, np.array([1, 3], np.int32), sent)
        again = rows(target, space, np.array([1, 3], np.int32))
        assert all(map(np.array_equal, sent, again))
    for a, b in zip(old[:3], new[:3], strict=True):
        for layer in range(len(a.group.layers)):
            for x, y in zip(a.read(layer, [5, 2]), b.read(layer, [1, 3]), strict=True):
                assert (x is None and y is None) or torch.equal(x.float(), y.float())
    assert all(map(np.array_equal, untouched, rows(target, 0, np.array([0, 2, 4, 5, 6], np.int32))))
    assert source.layout == target.layout != make(kind, torch.float16, 1)[0].layout
    assert source.nbytes(0) == sum(pool.nbytes_per_page for pool in old[:2])


@pytest.mark.parametrize("is_team", [False, True])
def test_the_extension_copies_what_numpy_copies(
    is_team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("radixlm._cpu")
    source, target = make("cpu", torch.bfloat16, 1)[0], make("cpu", torch.bfloat16, 2)[0]
    some = np.array([6, 1, 4], np.int32)
    for space in (0, 1):
        found = [np.empty(source.nbytes(space), np.uint8) for _ in some]
        source.read(space, some, found, is_team=is_team)
        target.write(space, some[::-1], found, is_team=is_team)
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "radixlm._cpu")
            assert all(map(np.array_equal, found, rows(source, space, some)))
            assert all(map(np.array_equal, found, rows(target, space, some[::-1])))


def test_pieces_are_the_bytes_of_the_page() -> None:
    source, _ = make("cpu", torch.float32, 1)
    for space in (0, 1):
        found = b"".join(ctypes.string_at(*piece) for piece in source.pieces(space, 4))
        assert found == rows(source, space, np.array([4], np.int32))[0].tobytes()


def test_what_does_not_fit_is_refused() -> None:
    source, _ = make("cpu", torch.int8, 1)
    with pytest.raises(InvariantError, match="other sizes"):
        source.write(0, np.array([1], np.int32), [np.zeros(3, np.uint8)])


def test_a_draft_model_remembers_which_pages_it_has_filled() -> None:
    source, target = (
        PageBytes([], None, [make_pool("cpu", PLAIN, torch.float32, seed)]) for seed in (1, 2)
    )
    mine, theirs = {2}, {1, 3}
    source.filled, target.filled = (lambda: mine), (lambda: theirs)
    target.write(0, np.array([1, 4], np.int32), rows(source, 0, np.array([3, 2], np.int32)))
    assert theirs == {3, 4}
