"""Experts on several ranks have the bits of one rank that holds all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from radixlm.distributed.groups import Group, thread_groups
from radixlm.kernels.cpu.fused import pack_experts as pack_native
from radixlm.kernels.ops.moe import PackedExperts, UngatedExperts
from radixlm.kernels.ops.moe import pack_experts as pack_reference
from radixlm.layers.experts import ExpertSplit, SplitExperts, even_split

EXPERTS, DIM, INNER = 6, 48, 40
Pack = Callable[[Tensor, Tensor], PackedExperts]
PACKS: dict[str, Pack] = {
    "fp32": lambda up, down: pack_native(up, down, None, None, "silu"),
    "w8a8": lambda up, down: pack_native(up, down, None, None, "silu", ("w8a8", "w8a8")),
    "reference": lambda up, down: pack_reference(up, down, None, None, "silu"),
    "ungated": lambda up, down: UngatedExperts(up[:, :INNER], down, None, None, "relu2"),
}


def weights() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    up = torch.randn(EXPERTS, 2 * INNER, DIM, generator=g) * 0.2
    return up, torch.randn(EXPERTS, DIM, INNER, generator=g) * 0.2


def choice(tokens: int, top_k: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:top_k] for _ in range(tokens)])
    return torch.randn(tokens, DIM, generator=g), torch.rand(tokens, top_k, generator=g), ids


def run_ranks(run: Callable[[Group], Tensor], size: int) -> list[Tensor]:
    """The result of each rank, in threads."""
    groups, results = thread_groups(size), {}

    def call(group: Group) -> None:
        results[group.rank] = run(group)

    threads = [threading.Thread(target=call, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


def split_pack(pack: Pack, split: ExpertSplit) -> SplitExperts:
    up, down = weights()
    held = list(split.held)
    return SplitExperts(pack(up[held], down[held]), split)


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_bits_equal_one_rank(name: str, size: int, tokens: int) -> None:
    """Also of uneven parts; 70 tokens are exchanged all to all from three ranks on."""
    x, w, ids = choice(tokens)
    want = PACKS[name](*weights()).run(x, w, ids)
    for got in run_ranks(
        lambda group: split_pack(PACKS[name], even_split(EXPERTS, group)).run(x, w, ids), size
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [1, 7, 80])
@pytest.mark.parametrize("size", [2, 4])
def test_copies_change_no_bit(tokens: int, size: int) -> None:
    """Experts 5 and 0 have two copies each; tokens take turns."""
    logical = (5, 0, 1, 2, 3, 0, 4, 5)
    table = torch.tensor([[1, 2, 3, 4, 6, 0], [5, 2, 3, 4, 6, 7], [5, 2, 3, 4, 6, 0]])
    starts = tuple(range(0, 9, 8 // size))
    x, w, ids = choice(tokens)
    want = PACKS["fp32"](*weights()).run(x, w, ids)
    for got in run_ranks(
        lambda group: split_pack(PACKS["fp32"], ExpertSplit(group, starts, logical, table)).run(
            x, w, ids
        ),
        size,
    ):
        assert torch.equal(got, want)


def test_each_rank_holds_a_run_of_slots() -> None:
    splits = [even_split(7, group) for group in thread_groups(3)]
    assert [split.held for split in splits] == [(0, 1, 2), (3, 4), (5, 6)]
