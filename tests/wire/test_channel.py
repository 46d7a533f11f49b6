"""Both kinds of channel: order, waiting, absent peers, malformed messages."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from radixlm.wire.channel import MemoryChannel, ZmqChannel, monitor_of
from radixlm.wire.codec import intake_codec, scheduler_codec
from radixlm.wire.replies import Failed
from radixlm.wire.requests import AbortRequest, Control, Shutdown


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ZmqChannel, ZmqChannel]]:
    address = f"ipc://{tmp_path}/s"
    bound = ZmqChannel(address, intake_codec(), bind=True)
    connected = ZmqChannel(address, scheduler_codec(), bind=False)
    yield bound, connected
    connected.close()
    bound.close()


def test_zmq_keeps_the_order(pair: tuple[ZmqChannel, ZmqChannel]) -> None:
    bound, connected = pair
    connected.send(Failed("here", "I am"))
    assert bound.receive(60.0) == [Failed("here", "I am")]
    wanted = [Control(str(i), "ping") for i in range(50)]
    for message in wanted:
        bound.send(message)
    got: list[object] = []
    while len(got) < 50:
        more = connected.receive(60.0)
        assert more, "nothing came"
        got += more
    assert got == wanted
    assert connected.receive(0) == []


def test_an_absent_peer_is_no_error(tmp_path: Path) -> None:
    channel = ZmqChannel(f"ipc://{tmp_path}/s", intake_codec(), bind=True)
    channel.send(Shutdown())
    assert channel.receive(0) == []
    assert channel.receive(0.01) == []
    channel.close()


def test_malformed_messages_are_dropped_and_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel = ZmqChannel(f"ipc://{tmp_path}/s", scheduler_codec(), bind=True)
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"ipc://{tmp_path}/s")
    bad = [b"", b"\xc1", pickle.dumps({"a": 1}), b"\x91" * 100_000, intake_codec().encode(5)]
    good = AbortRequest(("r",))
    for data in (*bad, scheduler_codec().encode(good)):
        stranger.send(data)
    got: list[object] = []
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            got += channel.receive(1.0)
            if got:
                break
    assert got == [good]
    assert sum("dropped a message" in r.getMessage() for r in caplog.records) == len(bad)
    stranger.close()
    channel.close()


def test_memory_channel_hands_over_and_wakes() -> None:
    mine, theirs = MemoryChannel.pair()
    assert theirs.receive(0) == []
    mine.send("a")
    mine.send("b")
    assert theirs.receive(None) == ["a", "b"]
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(mine.receive(30.0)))
    reader.start()
    theirs.send("c")
    reader.join(30)
    assert got == ["c"] and mine.receive(0) == []


def test_events_that_nobody_reads_block_no_other_socket(tmp_path: Path) -> None:
    """One thread serves all sockets of a process."""
    with zmq.Context() as context:
        watched, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        watched.setsockopt(zmq.RECONNECT_IVL, 1)
        monitor = monitor_of(watched, zmq.EVENT_ALL)
        counted = monitor_of(other, zmq.EVENT_CONNECT_RETRIED)
        other.setsockopt(zmq.RECONNECT_IVL, 1)
        for socket in (watched, other):
            socket.connect(f"ipc://{tmp_path}/nobody")
        for _ in range(1500):  # about as often as the first, of whose retries each has three events
            assert counted.poll(10_000)
            recv_monitor_message(counted)
        for socket in (watched, other):
            socket.disable_monitor()
        for socket in (monitor, counted, watched, other):
            socket.close(0)
