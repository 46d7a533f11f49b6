"""Gloo groups of threads of one process, which connect over loopback."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.distributed.test_groups import SHAPES, check_collectives, every_collective, together
from torch.distributed import HashStore, PrefixStore

from radixlm.base.errors import RankLost
from radixlm.distributed.gloo import GlooGroup


def gloo_groups(size: int, timeout_s: float = 20.0) -> list[GlooGroup]:
    store = PrefixStore("tp", HashStore())
    with ThreadPoolExecutor(size) as pool:
        made = [
            pool.submit(GlooGroup, store, rank, size, timeout_s, "127.0.0.1")
            for rank in range(size)
        ]
        return [m.result(30) for m in made]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_against_plain_tensors(size: int) -> None:
    groups = gloo_groups(size)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for rows, columns in SHAPES:
            found = together(groups, lambda g: every_collective(g, rows, columns, dtype))  # noqa: B023
            check_collectives(found, rows, columns, dtype)


def test_sums_are_added_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    found = together(gloo_groups(4), lambda g: g.all_reduce(torch.full((9,), values[g.rank])))
    assert all(torch.equal(x, torch.ones(9)) for x in found)


def test_a_silent_rank_is_told_after_the_timeout() -> None:
    groups = gloo_groups(2, timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(RankLost, match="a rank of 2 is lost"):
        groups[0].all_reduce(torch.ones(3))
    assert time.monotonic() - start < 5
    with pytest.raises(RankLost):
        GlooGroup(HashStore(), 0, 2, timeout_s=0.2)
