"""Memory that agents keep for their ranks, and checksums of pages over several hosts."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.engine.test_nodes import FACTS, SECRET, Lost, Running, make_hub, run, said

from radixlm.base.errors import RankLost
from radixlm.distributed.remote import RemoteValues
from radixlm.engine.kept_pool import KeptPool
from radixlm.engine.nodes import Hub
from radixlm.warm_restart.digests import DigestsOfHosts, answer_digests

__all__ = ["make_hub", "run"]  # fixtures


def of_bytes(
    pages_of: Sequence[Sequence[bytes]],
    group: int,
    space: int,
    pages: Sequence[int],
    seeds: Sequence[int],
) -> list[int]:
    """Checksums of a host that has ``pages_of[group]`` in each space."""
    pairs = zip(pages, seeds, strict=True)
    return [zlib.crc32(pages_of[group][page] + bytes([space]), seed) for page, seed in pairs]


@pytest.fixture
def hub(make_hub: Callable[..., Hub]) -> Iterator[Hub]:
    yield make_hub(3)


def test_checksums_depend_on_the_pages_of_all_hosts(hub: Hub) -> None:
    hosts = [[[f"{host} {group} {page}".encode() for page in range(9000)] for group in range(2)]
             for host in range(3)]  # fmt: skip
    links = [RemoteValues(hub.address, SECRET) for _ in range(2)]
    for node, link in enumerate(links, 1):
        args = partial(of_bytes, hosts[node]), link, node, hub.generation
        threading.Thread(target=answer_digests, args=args, daemon=True).start()
    over = DigestsOfHosts(partial(of_bytes, hosts[0]), hub, (1, 2), hub.generation, 20.0)
    pages, seeds = [3, 1, 7], [5, 6, 0xFFFFFFFF]
    first = over(1, 0, pages, seeds)
    assert len({*first}) == 3 and over(1, 0, pages, seeds) == first
    assert over(1, 1, pages, seeds) != first != over(0, 0, pages, seeds)
    assert over(0, 0, [], []) == []
    many = over(1, 0, range(9000), [5] * 9000)  # more than one question
    assert many[3] == first[0]
    for host in hosts:
        host[1][1] = b"damaged"
        changed = over(1, 0, pages, seeds)
        assert [a == b for a, b in zip(changed, first, strict=True)] == [True, False, True]
        first = changed
    assert not hub._values, "what was said is kept"


def test_a_host_that_does_not_answer_is_lost(hub: Hub) -> None:
    over = DigestsOfHosts(partial(of_bytes, [[b""]]), hub, (1, 2), hub.generation, 0.01)
    with pytest.raises(RankLost, match=r"no checksums of pages came within 0\.01 s"):
        over(0, 0, [0], [1])


def test_each_host_names_the_memory_of_its_own_ranks() -> None:
    pool = KeptPool((2, 3), 4)
    assert pool.paths[:2] == ["", ""] and len({*pool.paths}) == 3
    Path(pool.paths[2]).write_bytes(b"pages")
    assert Path(pool.paths[2]).read_bytes() == b"pages" and not Path(pool.paths[3]).read_bytes()
    pool.empty()
    assert not Path(pool.paths[2]).read_bytes()
    pool.close()
    assert pool.paths == [] == KeptPool((), 4).paths


def test_an_agent_keeps_memory_while_engines_come_and_go(
    make_hub: Callable[..., Hub], run: Callable[..., Running]
) -> None:
    def memory(hub: Hub, theirs: list[str]) -> list[str]:
        hub.wait()
        hub.start({1: [{"rank": 1, "options": {}, "memory": theirs}]}, Lost())
        told: list[str] = json.loads(said(hub))["memory"]
        return told

    hub = make_hub()
    run(hub)
    none, path = memory(hub, ["/of/node0", ""])
    assert not none
    Path(path).write_bytes(b"pages")
    address = hub.address
    hub.close()
    later = Hub(address, SECRET, FACTS, 2, 60.0)
    try:
        assert memory(later, ["/of/node0", ""]) == ["", path]
        assert Path(path).read_bytes() == b"pages"
    finally:
        later.close()
