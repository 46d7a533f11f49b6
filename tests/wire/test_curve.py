"""Sockets that other machines can reach accept nothing without the secret."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from radixlm.base.errors import ConfigError
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import intake_codec, scheduler_codec
from radixlm.wire.curve import private_keys, remember
from radixlm.wire.replies import Failed
from radixlm.wire.requests import AbortRequest

SECRET = "correct horse battery staple"
pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="zmq without CURVE")


@pytest.fixture
def server() -> Iterator[tuple[ZmqChannel, str]]:
    made = ZmqChannel("tcp://127.0.0.1:*", scheduler_codec(), bind=True, secret=SECRET)
    address = made.socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    yield made, address.rstrip(b"\0").decode()
    made.close()


def test_a_reachable_socket_needs_a_secret() -> None:
    address = "tcp://127.0.0.1:*"
    for secret in (None, "", "short"):
        with pytest.raises(ConfigError, match="needs a secret of at least 16"):
            ZmqChannel(address, scheduler_codec(), bind=True, secret=secret)


def test_both_ends_with_the_secret_talk(server: tuple[ZmqChannel, str]) -> None:
    mine, address = server
    peer = ZmqChannel(address, intake_codec(), bind=False, secret=SECRET)
    peer.send(AbortRequest(("a",)))
    assert mine.receive(30.0) == [AbortRequest(("a",))]
    mine.send(Failed("x", "y"))
    assert peer.receive(30.0) == [Failed("x", "y")]
    peer.close()


def test_keys_that_were_derived_by_another_process_are_used(
    server: tuple[ZmqChannel, str],
) -> None:
    mine, address = server
    remember("a secret without keys of its own", private_keys(SECRET))
    peer = ZmqChannel(address, intake_codec(), False, "a secret without keys of its own")
    peer.send(AbortRequest(("a",)))
    assert mine.receive(30.0) == [AbortRequest(("a",))]
    peer.close()


@pytest.mark.parametrize("kind", ["another secret", "no secret"])
def test_a_peer_without_the_secret_is_ignored(server: tuple[ZmqChannel, str], kind: str) -> None:
    mine, address = server
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    stranger.setsockopt(zmq.LINGER, 0)
    if kind == "another secret":
        public, own = zmq.curve_keypair()
        stranger.setsockopt(zmq.CURVE_SERVERKEY, public)
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, own)
    stranger.connect(address)
    for _ in range(20):
        try:
            stranger.send(scheduler_codec().encode(AbortRequest(all=True)), zmq.NOBLOCK)
        except zmq.Again:
            pass
        assert mine.receive(0.02) == []
    assert mine.num_dropped == 0
    stranger.close(0)
    # and a peer with the secret is still served
    peer = ZmqChannel(address, intake_codec(), bind=False, secret=SECRET)
    peer.send(AbortRequest(("a",)))
    assert mine.receive(30.0) == [AbortRequest(("a",))]
    peer.close()
