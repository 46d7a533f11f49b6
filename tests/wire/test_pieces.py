"""Messages of any size pass a socket whose packets are limited."""

from __future__ import annotations

import socket
import threading

import pytest

from radixlm.wire.pieces import PIECE_BYTES, pieces, read_pieces


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

    sender = threading.Thread(target=send)
    sender.start()
    with mine:
        assert [read_pieces(mine), read_pieces(mine), read_pieces(mine)] == [*messages, None]
    sender.join(60)
