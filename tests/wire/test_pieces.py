"""Messages of any size pass a socket whose packets are limited."""

from __future__ import annotations

import socket
import threading

import pytest
import zmq

from radixlm.wire.pieces import PIECE_BYTES, Outbox, pieces, read_pieces


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5_000_000])
def test_a_message_is_put_together_again(size: int) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    messages = [bytes(range(256)) * (size // 256 + 1), b"next"]
    messages[0] = messages[0][:size]

    def send() -> None:
        for message in messages:
            for piece in pieces(message):
                theirs.send(piece)
        theirs.close()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    with mine:
        assert [read_pieces(mine.recv) for _ in range(3)] == [*messages, None]
    sender.join(60)


def test_an_outbox_waits_for_nobody() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(60)
    with mine, theirs:
        outbox, messages = Outbox(mine), [b"%d" % number for number in range(5000)]
        outbox.send(messages)
        assert outbox.events == zmq.POLLIN | zmq.POLLOUT, "more than the socket holds"
        found = []
        for _ in messages:
            found.append(theirs.recv(100))
            outbox.send()
        assert found == messages and outbox.events == zmq.POLLIN
    outbox.send([b"nobody reads this"])
    assert outbox.events == zmq.POLLIN
