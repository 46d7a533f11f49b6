"""Loads that workers tell, in the forms of RadixLM and SGLang."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from radixlm.router.exchange import Response, Unreachable
from radixlm.router.loads import Loads, read_load
from radixlm.router.worker import Load
from tests.router.conftest import StartWorkers
from tests.router.front import Front

RANKS = [
    {"dp_rank": 0, "token_usage": 0.5, "gen_throughput": 10.0, "num_waiting_uncached_tokens": 7},
    {"dp_rank": 1, "token_usage": 0.7, "gen_throughput": 20.0, "num_waiting_uncached_tokens": 3},
]


@pytest.mark.parametrize(
    ("told", "rank", "expected"),
    [
        ({"loads": RANKS}, None, Load(10, 0.6, 30.0)),
        ({"loads": RANKS}, 1, Load(3, 0.7, 20.0)),
        (RANKS, 0, Load(7, 0.5, 10.0)),
        ([{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1}], None, Load()),
        ([{"token_usage": 3.0, "gen_throughput": "?"}], None, Load(0, 1.0, 0.0)),
        ([{"num_waiting_tokens": 1e308, "token_usage": 1e308}] * 2, None, Load()),
        ([{"num_waiting_tokens": 10**400, "gen_throughput": -1e308}], None, Load()),
        ({"loads": RANKS}, 2, None),
        ({"detail": "Not Found"}, None, None),
        ([1], None, None),
        ("x", None, None),
    ],
)
def test_forms(told: Any, rank: int | None, expected: Load | None) -> None:
    assert read_load(told, rank) == expected


async def test_workers_are_asked_where_a_policy_looks(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(await start_workers(3), policy="least_work")
    old, new, lost = front.workers
    asked: list[tuple[str, str]] = []

    async def fetch(url: str, method: str, path: str, **_: Any) -> Response:
        asked.append((url, path))
        if url == lost.url:
            raise Unreachable("gone")
        if url == old.url and path == "/v1/loads":
            return Response(404, [], b'{"detail": "Not Found"}')
        return Response(200, [], orjson.dumps(RANKS))

    monkeypatch.setattr(front.gateway.upstream, "fetch", fetch)
    loads = Loads(front.gateway)
    lost.load = Load()
    for _ in range(2):
        await loads.poll()
    assert (old.load, new.load, lost.load) == (Load(10, 0.6, 30.0), old.load, None)
    assert asked.count((old.url, "/v1/loads")) == asked.count((old.url, "/get_load")) == 1
    asked.clear()
    other = Front([], policy="round_robin")
    other.join(new)
    await Loads(other.gateway).poll()
    assert not asked
    other.gateway.registry.close()
    front.gateway.registry.close()
