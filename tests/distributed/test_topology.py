"""Coordinates and groups against the formulas of SGLang's flags, spelt out."""

from __future__ import annotations

import itertools

import pytest

from radixlm.base.errors import ConfigError
from radixlm.distributed.topology import Topology, bounds

SIZES = [
    Topology(tp=tp, pp=pp, attn_dp=dp, ep=ep)
    for tp, pp, dp, ep in itertools.product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 4), (1, 2, 4))
    if tp % dp == 0 and tp % ep == 0
]


@pytest.mark.parametrize("topology", SIZES, ids=str)
def test_each_rank_stands_once_in_each_kind_of_group(topology: Topology) -> None:
    everyone = list(range(topology.world))
    for groups in (
        topology.tp_groups,
        topology.stage_chains,
        topology.attn_groups,
        topology.expert_groups,
        topology.expert_tp_groups,
    ):
        assert sorted(itertools.chain.from_iterable(groups)) == everyone
    for rank in everyone:
        place = topology.place(rank)
        assert place.rank == rank == place.stage * topology.tp + place.tp_rank
        assert place.attn_dp_rank == place.tp_rank // (topology.tp // topology.attn_dp)
        assert place.ep_rank == place.tp_rank // (topology.tp // topology.ep)
        (tp_group,) = (g for g in topology.tp_groups if rank in g)
        assert tp_group.index(rank) == place.tp_rank and len(tp_group) == topology.tp
        (chain,) = (g for g in topology.stage_chains if rank in g)
        assert chain.index(rank) == place.stage and len(chain) == topology.pp
        (attn,) = (g for g in topology.attn_groups if rank in g)
        assert attn.index(rank) == place.attn_tp_rank and len(attn) == place.attn_tp
        (experts,) = (g for g in topology.expert_groups if rank in g)
        assert experts.index(rank) == place.ep_rank and len(experts) == topology.ep
        (inner,) = (g for g in topology.expert_tp_groups if rank in g)
        assert inner.index(rank) == place.moe_tp_rank and len(inner) == place.moe_tp


@pytest.mark.parametrize(
    ("topology", "nodes"),
    [
        (Topology(tp=4, nnodes=2), [0, 0, 1, 1]),
        (Topology(tp=2, pp=2, nnodes=2), [0, 0, 1, 1]),
        (Topology(tp=2, pp=4, nnodes=2), [0, 0, 0, 0, 1, 1, 1, 1]),
        (Topology(tp=4, pp=2, nnodes=4), [0, 0, 1, 1, 2, 2, 3, 3]),
        (Topology(tp=1, pp=2), [0, 0]),
        (Topology(tp=2, pp=3, nnodes=2), [0, 0, 0, 1, 1, 1]),
        (Topology(tp=3, pp=2, nnodes=3), [0, 0, 1, 1, 2, 2]),
    ],
)
def test_ranks_stand_on_nodes_as_in_the_reference(topology: Topology, nodes: list[int]) -> None:
    assert [topology.node_of(r) for r in range(topology.world)] == nodes
    for node in range(topology.nnodes):
        assert topology.ranks_of(node) == tuple(r for r, n in enumerate(nodes) if n == node)


@pytest.mark.parametrize(
    ("sizes", "flag", "works"),
    [
        ({"tp": 4, "attn_dp": 3}, "--dp-size", "2 does"),
        ({"tp": 4, "ep": 3}, "--ep-size", "2 does"),
        ({"tp": 4, "pp": 1, "nnodes": 3}, "--nnodes", "2 does"),
        ({"tp": 6, "dense_tp": 4}, "--moe-dense-tp-size", "3 does"),
    ],
)
def test_sizes_that_do_not_divide_name_the_flag_and_a_size_that_does(
    sizes: dict[str, int], flag: str, works: str
) -> None:
    with pytest.raises(ConfigError, match=f"{flag}.*{works}"):
        Topology(**sizes)


def test_bounds() -> None:
    assert bounds(7, 2) == (0, 4, 7)
    assert bounds(8, 3) == (0, 3, 6, 8)
    assert bounds(1000, 3, 64) == (0, 384, 704, 1000)
    assert bounds(1, 3) == (0, 1, 1, 1)
    assert bounds(0, 2) == (0, 0, 0)
    for total, parts, multiple in itertools.product(range(40), range(1, 6), (1, 3, 8)):
        cuts = bounds(total, parts, multiple)
        assert cuts[0] == 0 and cuts[-1] == total and list(cuts) == sorted(cuts)
        assert all(cut % multiple == 0 or cut == total for cut in cuts)
