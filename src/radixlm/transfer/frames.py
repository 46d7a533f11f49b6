"""One connection of the transfer protocol: length-prefixed msgpack records and raw pages over TCP,
with a time limit on every call; and the proof that both ends know the secret."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from radixlm.base.errors import TransferError
from radixlm.wire.transfer import FromClient, FromServer

MAX_FRAME_BYTES = 32 << 20
MAX_GREETING_BYTES = 256 << 10  # before the other end has shown that it knows the secret
MAX_PARTS = 512  # of one sendmsg; the kernel takes 1,024
BUFFER_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode

M = TypeVar("M")


class Frames(Generic[M]):
    """One end of a connection; ``M``: the union of what the other end sends. A call that takes
    longer than ``timeout_s`` without progress, or any fault, is a TransferError."""

    def __init__(self, sock: socket.socket, incoming: Any, timeout_s: float) -> None:
        self.socket = sock
        self._decoder = msgspec.msgpack.Decoder(incoming)
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._timeout_s = 0.0
        self.end_s = 0.0  # monotonic time after which nothing is received; 0: none
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """The kernel's own limits: with these recv may wait for all bytes in one call."""
        timeout_s = max(timeout_s, 0.001)
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        packed = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def send(self, record: Any, parts: Sequence[Any] = ()) -> None:
        """A record, and the raw bytes that follow it."""
        data = _encode(record)
        views = [
            memoryview(_LENGTH.pack(len(data)) + data),
            *(memoryview(p).cast("B") for p in parts),
        ]
        at = 0
        try:
            while at < len(views):
                sent = self.socket.sendmsg(views[at : at + MAX_PARTS])
                while at < len(views) and sent >= len(views[at]):
                    sent -= len(views[at])
                    at += 1
                if sent:
                    views[at] = views[at][sent:]
        except OSError as error:
            raise _fault(error) from error

    def receive(self, most: int = MAX_FRAME_BYTES) -> M:
        """The next record, of at most ``most`` bytes."""
        length = bytearray(_LENGTH.size)
        self.receive_into(length)
        (size,) = _LENGTH.unpack(length)
        if size > most:
            raise TransferError(f"a message of {size} bytes")
        data = bytearray(size)
        self.receive_into(data)
        try:
            record: M = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise TransferError(f"a malformed message: {error}") from error
        return record

    def receive_into(self, buffer: Any) -> None:
        """Fill ``buffer`` with raw bytes."""
        view = memoryview(buffer).cast("B")
        try:
            while len(view):
                count = self.socket.recv_into(view, 0, socket.MSG_WAITALL)
                if not count:
                    raise TransferError("the peer has closed the connection")
                view = view[count:]
                if len(view) and 0 < self.end_s < time.monotonic():  # a byte now and then
                    raise TransferError("the peer is late")
        except OSError as error:
            raise _fault(error) from error

    def is_open(self) -> bool:
        """Whether the other end is there and has sent nothing, as far as is known."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Ends calls of other threads, too."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _fault(error: OSError) -> TransferError:
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return TransferError("the peer is late")
    return TransferError(error.strerror or str(error))


def server_frames(sock: socket.socket, timeout_s: float) -> Frames[FromClient]:
    return Frames(sock, FromClient, timeout_s)


def client_frames(sock: socket.socket, timeout_s: float) -> Frames[FromServer]:
    return Frames(sock, FromServer, timeout_s)


def said_to(host: str, port: int, manifest: bytes) -> bytes:
    """What a client's proof is about: whoever it connects to cannot use it at another address."""
    return f"{host} {port} ".encode() + manifest


def proof(secret: bytes, role: str, server_nonce: bytes, client_nonce: bytes, said: bytes) -> bytes:
    """What only an end that knows the secret can send. ``role``: of that end; ``said``: what else
    its message holds."""
    text = b"radixlm transfer " + role.encode() + b"\0" + server_nonce + client_nonce + said
    return hmac.digest(secret, text, hashlib.sha256)


@cache
def machine() -> str:
    """Equal in processes that can open each other's descriptors by /proc; "" if there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    except OSError:
        return ""
