"""Each collective of each transport against numpy; a lost rank frees those that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from tests.fakes.thread_groups import thread_groups, thread_ranks

from radixlm.base.errors import RankLost
from radixlm.distributed.groups import ALONE, SOLO, Group
from radixlm.distributed.topology import Topology, bounds

T = TypeVar("T")


def together(groups: list[Group], work: Callable[[Group], T]) -> list[T]:
    """``work`` of each rank in a thread of its own; results in rank order."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(30) for future in [pool.submit(work, g) for g in groups]]


def every_collective(group: Group, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a rank gets from each collective; what it brings follows from its rank alone."""
    rank, size = group.rank, group.size
    whole = _values(rows, columns, dtype)
    cuts = bounds(columns, size)
    mine = whole[:, cuts[rank] : cuts[rank + 1]]
    counts = tuple((r + rows) % 3 for r in range(size))
    sends = tuple((rank * size + to) % 4 for to in range(size))
    receives = tuple((source * size + rank) % 4 for source in range(size))
    found = {
        "all_gather_columns": group.all_gather_columns(mine, cuts),
        "all_gather_rows": group.all_gather_rows(
            torch.full((counts[rank], columns), rank, dtype=dtype), counts
        ),
        "gather_columns": group.gather_columns(mine, cuts),
        "all_reduce": group.all_reduce(whole * (rank + 1)),
        "all_to_all_rows": group.all_to_all_rows(
            torch.full((sum(sends), columns), rank, dtype=dtype), sends, receives
        ),
        "broadcast": group.broadcast(torch.full((rows, columns), rank, dtype=dtype), size // 2),
    }
    if size > 1:
        group.send(whole * rank, (rank + 1) % size)
        found["receive"] = group.receive((rows, columns), dtype, (rank - 1) % size)
    group.barrier()
    return found


def check_collectives(found: list[dict[str, Any]], rows: int, columns: int, dtype: Any) -> None:
    size, whole = len(found), _values(rows, columns, dtype)
    counts = [(r + rows) % 3 for r in range(size)]
    total = sum((whole * (r + 1)).double() for r in range(size))  # small integers: exact
    for rank, got in enumerate(found):
        assert torch.equal(got["all_gather_columns"], whole)
        assert got["all_gather_rows"][:, :1].flatten().tolist() == (
            [r for r in range(size) for _ in range(counts[r])] if columns else []
        )
        first = got["gather_columns"]
        assert torch.equal(first, whole) if rank == 0 else first is None
        assert torch.equal(got["all_reduce"], total.to(dtype))  # type: ignore[union-attr]
        sources = [s for s in range(size) for _ in range((s * size + rank) % 4)]
        assert got["all_to_all_rows"].shape == (len(sources), columns)
        assert got["all_to_all_rows"][:, :1].flatten().tolist() == (sources if columns else [])
        assert torch.equal(got["broadcast"], torch.full((rows, columns), size // 2, dtype=dtype))
        if size > 1:
            assert torch.equal(got["receive"], whole * ((rank - 1) % size))


def _values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(rows * columns).reshape(rows, columns) % 13).to(dtype)


SHAPES = [(0, 4), (1, 1), (3, 7), (5, 64), (2, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.uint8]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_against_plain_tensors(size: int, dtype: torch.dtype) -> None:
    groups = thread_groups(size)
    for rows, columns in SHAPES:
        found = together(groups, lambda g: every_collective(g, rows, columns, dtype))  # noqa: B023
        check_collectives(found, rows, columns, dtype)


def test_sums_are_added_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    found = together(thread_groups(4), lambda g: g.all_reduce(torch.tensor([values[g.rank]])))
    expected = torch.tensor(0.0)
    for value in values:
        expected = expected + value
    assert [x.item() for x in found] == [expected.item()] * 4 == [1.0] * 4


def test_a_poisoned_group_frees_its_waiters_at_once() -> None:
    groups = thread_groups(3)
    inside = threading.Barrier(3)

    def wait(group: Group) -> float:
        inside.wait(60)
        with pytest.raises(RankLost):
            group.barrier() if group.rank else group.receive((1,), torch.float32, 2)
        return time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(wait, g) for g in groups[:2]]
        inside.wait(60)
        poisoned = time.monotonic()
        groups[2].poison()  # type: ignore[attr-defined]
        assert max(w.result(10) for w in waits) - poisoned < 0.5
    with pytest.raises(RankLost):
        groups[2].barrier()


def test_a_silent_rank_is_told_after_the_timeout() -> None:
    groups = thread_groups(2, timeout_s=0.05)
    with pytest.raises(RankLost):
        groups[0].barrier()
    with pytest.raises(RankLost, match="rank 1"):
        groups[0].receive((1,), torch.float32, 1)


def test_solo_copies_nothing() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert SOLO.all_gather_columns(x, (0, 3)) is x and SOLO.all_reduce(x) is x
    assert ALONE.tp is SOLO and ALONE.place.is_first_stage and ALONE.place.is_last_stage


def test_ranks_of_threads_stand_in_their_groups() -> None:
    topology = Topology(tp=4, pp=2, attn_dp=2, ep=2)
    ranks = thread_ranks(topology)
    for rank in ranks:
        place = rank.place
        assert (rank.world.rank, rank.tp.rank, rank.stages.rank) == (
            place.rank,
            place.tp_rank,
            place.stage,
        )
        assert (rank.attn.rank, rank.experts.rank, rank.expert_tp.rank) == (
            place.attn_tp_rank,
            place.ep_rank,
            place.moe_tp_rank,
        )

    def mine(group: Group) -> list[int]:
        x = torch.tensor([[ranks[group.rank].place.rank]])
        return ranks[group.rank].experts.all_gather_rows(x, (1, 1)).flatten().tolist()

    found = together([r.world for r in ranks], mine)
    assert found == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    alone = thread_ranks(Topology(tp=2))
    assert alone[0].stages is SOLO and alone[0].experts.size == 1
