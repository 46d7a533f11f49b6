"""The peer tier between two engines' tiers in one process, with a bootstrap service that a test
plays: whole, with ranks, with peers that are dead or of another kind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from radixlm.base.errors import TransferError
from radixlm.tiers.base import PageRecord
from radixlm.tiers.keys import NO_KEY
from radixlm.tiers.manifest import Manifest, PageGroup, Rectangle
from radixlm.tiers.peer import Incoming, Outgoing, PeerOptions
from radixlm.transfer import server as serving
from radixlm.transfer.bootstrap import Directory, Registration
from radixlm.transfer.client import Address, TransferClient
from radixlm.wire.transfer import FAKE_HOST, Hint, Want

pytestmark = pytest.mark.timeout(60)
OPTIONS = PeerOptions(b"s" * 32, wait_s=20.0, retry_s=30.0)
GROUP = PageGroup(0, (0, 1), 4, 8, 8)
TILES = "[2, *, {H}, 1, 8, 16] torch.bfloat16, [2, *, {H}, 16, 8] torch.bfloat16; "
ROOM = 11
HINT = Hint("prefill", 8998, ROOM)
KEYS = [bytes([i]) * 32 for i in range(1, 7)]


def _manifest(rank: int = 0, ranks: int = 1, **more: str) -> Manifest:
    heads = 4 // ranks
    rectangle = Rectangle(rank, ranks, 0, 2, rank * heads, (rank + 1) * heads)
    facts = {"model": "m", "weights_digest": "w", "kv_dtype": "torch.bfloat16", **more}
    size = 2 * heads * 2 * 16 * 8 * 2
    return Manifest(
        weights_version="v", page_size=16, groups=(GROUP,), layout=TILES.format(H=heads),
        rectangle=rectangle, page_bytes=(size, 0), **facts,
    )  # fmt: skip


class Listed(Directory):
    """A directory that knows its ranks, or fails."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        super().__init__()
        self.addresses, self.num_forgotten = list(addresses), 0

    def ranks(self, host: str, port: int, room: int, dp_rank: int = -1) -> list[Address]:
        if host != "prefill":
            raise TransferError(f"{host}: nobody there")
        return self.addresses

    def forget(self, host: str, port: int) -> None:
        self.num_forgotten += 1


def _outgoing(manifest: Manifest, knows_rooms: bool = True) -> Outgoing:
    def no_place(address: Address) -> Registration:
        return Registration(address)

    # nobody listens at port 9: what registers goes on trying until close
    return Outgoing(
        manifest, OPTIONS, "127.0.0.1", ("127.0.0.1", 9), no_place, 1 << 22, knows_rooms=knows_rooms
    )


@contextlib.contextmanager
def _tiers(
    num_sources: int = 1, target: Manifest | None = None
) -> Iterator[tuple[list[Outgoing], Incoming]]:
    sources = [_outgoing(_manifest(i, num_sources), i == 0) for i in range(num_sources)]
    listed = Listed([Address(one.server.host, one.server.port) for one in sources])
    incoming = Incoming(target or _manifest(), OPTIONS, listed)
    try:
        yield sources, incoming
    finally:
        incoming.close()
        for source in sources:
            source.close()


def _whole(number: int) -> np.ndarray:
    """K and V of a page of the whole model, [2 sides, 2 layers, 4 heads, 128 numbers]."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (2, 2, 4, 256), np.uint8)


def _part(number: int, manifest: Manifest) -> np.ndarray:
    rectangle = manifest.rectangle
    heads = slice(rectangle.first_head, rectangle.end_head)
    return np.ascontiguousarray(_whole(number)[:, :, heads]).reshape(-1)


def _put(source: Outgoing, manifest: Manifest, first: int, end: int) -> None:
    tokens = np.zeros(16, np.int32)
    source.put(
        [
            PageRecord(KEYS[i], NO_KEY, tokens, _part(i, manifest), hint=HINT)
            for i in range(first, end)
        ]
    )


def _get(incoming: Incoming, manifest: Manifest, hint: Hint = HINT) -> tuple[int, list[np.ndarray]]:
    out = [np.zeros(manifest.page_bytes[0], np.uint8) for _ in KEYS]
    return incoming.get(KEYS, out, hint), out


@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_each_rank_gets_its_part_as_chunks_are_computed(sources: int, targets: int) -> None:
    for rank in range(targets):
        target = _manifest(rank, targets)
        with _tiers(sources, target) as (outgoing, incoming):
            for one in outgoing:
                one.open_room(ROOM)
            assert incoming.contains(KEYS, HINT) == len(KEYS)

            def compute(outgoing: list[Outgoing] = outgoing) -> None:
                for first in range(0, len(KEYS), 2):
                    for index, one in enumerate(outgoing):
                        _put(one, _manifest(index, sources), first, first + 2)

            timer = threading.Timer(0.05, compute)
            timer.daemon = True
            timer.start()
            count, out = _get(incoming, target)
            timer.join(10)
            assert count == len(KEYS)
            for number, row in enumerate(out):
                np.testing.assert_array_equal(row, _part(number, target))
            assert incoming.stats()["pulls_whole"] == 1
            # the same connections serve the next pull
            assert _get(incoming, target)[0] == len(KEYS)


def test_connections_to_a_peer_that_is_gone_end_with_the_next_new_one() -> None:
    """They hold its shared memory."""
    with _tiers() as (outgoing, incoming), _tiers() as (others, other):
        first, second = outgoing[0].server.port, others[0].server.port
        for source in (*outgoing, *others):
            _put(source, _manifest(), 0, len(KEYS))
        assert _get(incoming, _manifest())[0] == len(KEYS)
        assert [address.port for address in incoming._idle] == [first]
        outgoing[0].close()
        incoming._directory = other._directory
        assert _get(incoming, _manifest())[0] == len(KEYS)
        assert [address.port for address in incoming._idle] == [second]


def test_a_request_without_a_hint_is_computed_here() -> None:
    with _tiers() as (_, incoming):
        assert incoming.contains(KEYS) == 0
        assert incoming.contains(KEYS, Hint(FAKE_HOST, 8998, 0)) == 0
        assert _get(incoming, _manifest(), Hint(FAKE_HOST, 8998, 0))[0] == 0


def test_a_dead_peer_is_left_alone_for_a_while() -> None:
    with _tiers() as (outgoing, incoming):
        outgoing[0].close()
        assert _get(incoming, _manifest())[0] == 0
        assert incoming.contains(KEYS, HINT) == 0
        assert incoming.stats()["transfer_failed"] == 1
        assert incoming.stats()["pulls_local"] == 1


def test_the_alternative_gives_what_the_first_lacks() -> None:
    with _tiers() as (outgoing, incoming):
        outgoing[0].open_room(ROOM)
        _put(outgoing[0], _manifest(), 0, len(KEYS))
        hint = Hint("nobody", 1, ROOM, alternatives=(("prefill", 8998),))
        assert _get(incoming, _manifest(), hint)[0] == len(KEYS)
        assert incoming.stats()["bootstrap_failed"] == 1


def test_another_model_is_refused_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    target = _manifest(weights_digest="other")
    with _tiers(target=target) as (_, incoming):
        for _ in range(2):
            assert _get(incoming, target)[0] == 0
        assert incoming.contains(KEYS, HINT) == 0
        told = [r.getMessage() for r in caplog.records if "no pages from" in r.getMessage()]
        assert len(told) == 1
        assert "weights_digest: w and other" in told[0]


@pytest.mark.parametrize("target", [_manifest(), _manifest(1, 2)], ids=["pages", "parts"])
def test_what_came_before_an_end_of_the_peer_stays(
    monkeypatch: pytest.MonkeyPatch, target: Manifest
) -> None:
    pull = TransferClient.pull
    with _tiers(target=target) as (outgoing, incoming):

        def pull_until_end(
            self: TransferClient,
            want: Want,
            out: Sequence[np.ndarray],
            is_over: Callable[[], bool],
            arrived: Callable[[int], None],
        ) -> tuple[int, str]:
            def note(count: int) -> None:
                arrived(count)
                if count == 3:
                    outgoing[0].server.close()

            return pull(self, want, out, is_over, note)

        monkeypatch.setattr(TransferClient, "pull", pull_until_end)
        outgoing[0].open_room(ROOM)
        _put(outgoing[0], _manifest(), 0, 3)
        count, out = _get(incoming, target)
        assert count == 3
        for number in range(3):
            np.testing.assert_array_equal(out[number], _part(number, target))


def test_an_aborted_prefill_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE_S", 0.05)
    monkeypatch.setattr(serving, "ALIVE_S", 0.02)
    with _tiers(2) as (outgoing, incoming):
        for one in outgoing:
            one.open_room(ROOM)
        _put(outgoing[0], _manifest(0, 2), 0, 2)
        _put(outgoing[1], _manifest(1, 2), 0, 2)
        outgoing[0].close_room(ROOM)
        count, out = _get(incoming, _manifest())
        assert count == 2
        np.testing.assert_array_equal(out[1], _part(1, _manifest()))
        assert incoming.contains(KEYS, HINT) == len(KEYS)  # the peer is as good as before


def test_a_reused_room_brings_no_pages_of_another_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE_S", 0.05)
    monkeypatch.setattr(serving, "ALIVE_S", 0.02)
    with _tiers() as (outgoing, incoming):
        outgoing[0].open_room(ROOM)
        _put(outgoing[0], _manifest(), 0, len(KEYS))
        outgoing[0].close_room(ROOM)
        out = [np.zeros(_manifest().page_bytes[0], np.uint8)]
        assert incoming.get([b"x" * 32], out, HINT) == 0
        assert not out[0].any()


def test_the_outbox_keeps_only_pages_of_pairs() -> None:
    with _tiers() as (outgoing, _):
        tokens, payload = np.zeros(16, np.int32), _part(0, _manifest())
        outgoing[0].put([PageRecord(KEYS[0], NO_KEY, tokens, payload)])
        assert outgoing[0].contains(KEYS) == 0
        _put(outgoing[0], _manifest(), 0, 2)
        assert outgoing[0].contains(KEYS) == 2
        assert outgoing[0].contains(KEYS, HINT) == 0
        outgoing[0].clear()
        assert outgoing[0].contains(KEYS) == 0
