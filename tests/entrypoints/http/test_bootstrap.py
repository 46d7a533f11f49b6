"""The bootstrap service answers as SGLang's, and a directory finds ranks by it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from radixlm.base.errors import TransferError
from radixlm.entrypoints.http.bootstrap import BootstrapService, bootstrap_app
from radixlm.transfer.bootstrap import Directory, Registration, ask, register_in_thread
from radixlm.transfer.client import Address

pytestmark = pytest.mark.timeout(60)
SIZES = {"engine_rank": -1, "target_dp_group": -1, "target_pp_rank": -1}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(bootstrap_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://bootstrap") as made:
        yield made


def _rank(number: int, **more: Any) -> dict[str, Any]:
    """As a rank of SGLang 0.5.2 registers."""
    return {
        "role": "Prefill", "attn_tp_size": 2, "attn_tp_rank": number, "attn_dp_size": 1,
        "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0,
        "rank_ip": "10.0.0.1", "rank_port": 5000 + number, **more,
    }  # fmt: skip


@pytest.mark.asyncio
async def test_ranks_register_and_are_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).text == "OK"
    assert (await client.put("/route", json=_rank(0))).text == "OK"
    assert (await client.get("/route", params=SIZES)).status_code == 503  # one rank is missing
    await client.put("/route", json=_rank(1))
    sizes = (await client.get("/route", params=SIZES)).json()
    assert sizes["prefill_attn_tp_size"] == sizes["attn_tp_size"] == 2
    assert (sizes["prefill_dp_size"], sizes["prefill_pp_size"]) == (1, 1)
    for query in (
        {"engine_rank": 1, "target_dp_group": 0, "target_pp_rank": 0},
        {"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 1, "target_pp_rank": 0},
    ):
        found = (await client.get("/route", params=query)).json()
        assert found == {"rank_ip": "10.0.0.1", "rank_port": 5001}
    missing = {"engine_rank": 7, "target_dp_group": 0, "target_pp_rank": 0}
    assert (await client.get("/route", params=missing)).status_code == 404
    await client.put("/route", json=_rank(1, rank_port=6001))  # it was started again
    again = {"engine_rank": 1, "target_dp_group": 0, "target_pp_rank": 0}
    assert (await client.get("/route", params=again)).json()["rank_port"] == 6001


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "body", [{}, {"rank_ip": "x", "rank_port": 0}, {"rank_ip": 1, "rank_port": 1}]
)
async def test_malformed_registrations_are_refused(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    assert (await client.put("/route", json=body)).status_code == 400
    assert (await client.get("/route", params={"engine_rank": "x"})).status_code == 400


@pytest.mark.asyncio
async def test_replicas_of_rooms(client: httpx.AsyncClient) -> None:
    room = {"bootstrap_room": 1 << 62, "dp_rank": 3}
    assert (await client.post("/register_dp_rank", json=room)).text == "OK"
    asked = {"bootstrap_rooms": [1 << 62, 5]}
    found = (await client.post("/query_dp_ranks", json=asked)).json()
    assert found == {str(1 << 62): 3}


@pytest.mark.asyncio
async def test_a_directory_finds_the_ranks_of_a_room() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    service = BootstrapService(sock)
    directory = Directory()

    def find(room: int, dp_rank: int = -1) -> list[Address]:
        return directory.ranks("127.0.0.1", port, room, dp_rank)

    try:
        with pytest.raises(TransferError, match="503"):
            await asyncio.to_thread(find, 0)
        for dp_rank in (0, 1):
            for tp_rank in (0, 1):
                address = Address("127.0.0.1", 7000 + 10 * dp_rank + tp_rank)
                place = Registration(
                    address, tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank, dp_size=2
                )
                register_in_thread("127.0.0.1", port, place)
        for _ in range(500):
            try:
                found = await asyncio.to_thread(find, 6)
                break
            except TransferError:
                await asyncio.sleep(0.01)
        assert [address.port for address in found] == [7000, 7001]
        found = await asyncio.to_thread(find, 7)
        assert [address.port for address in found] == [7010, 7011]
        assert (await asyncio.to_thread(find, 7, 0))[0].port == 7000
        assert await asyncio.to_thread(ask, "127.0.0.1", port, "GET", "/health") == "OK"
    finally:
        await service.stop()
    directory.forget("127.0.0.1", port)
    with pytest.raises(TransferError):
        await asyncio.to_thread(find, 6)


@pytest.mark.asyncio
async def test_strangers_cannot_fill_the_memory(client: httpx.AsyncClient) -> None:
    wrong = await client.put("/route", json=_rank(2))  # of two
    assert wrong.status_code == 400
    large = await client.put("/route", content=b" " * (4 << 20) + b"{}")
    assert large.status_code == 413
    assert (await client.get("/route", params=SIZES)).status_code == 503
