"""The sockets of node 0 and of those who join it: zmq over TCP, encrypted with a shared secret."""

from __future__ import annotations

import os
import socket as sockets
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from radixlm.base.addresses import url_host
from radixlm.base.errors import ConfigError
from radixlm.wire.channel import monitor_of
from radixlm.wire.curve import MIN_CHARS, fingerprint, secure

FLAG = "--dist-init-addr"
RECONNECT_MS = 30  # zmq adds up to as much
CLOSE_MS = 1000  # longest wait for the end of a port
_MAX_BYTES = 16 << 20  # what nodes say to node 0 is short
_OF_NODE0 = {
    zmq.ROUTER_HANDOVER: 1,
    # a stranger's frame is held until its handshake fails
    zmq.MAXMSGSIZE: _MAX_BYTES,
    zmq.HANDSHAKE_IVL: 5000,
}
_SECRET_WORKS = (
    f"nodes need a file with the same secret of at least {MIN_CHARS} characters; "
    "`openssl rand -hex 32 > FILE` makes one"
)
_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
}


def read_secret(path: str | None) -> str:
    """The secret in the file of --cluster-secret-file."""
    flag = f"--cluster-secret-file {path}" if path else "--cluster-secret-file is not set"
    try:
        secret = Path(path).read_text(encoding="utf-8").strip() if path else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: not a text") from error
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}; {_SECRET_WORKS}") from error
    if len(secret) < MIN_CHARS:
        raise ConfigError(f"{flag}: {_SECRET_WORKS}")
    return secret


def other_secret(secret: str) -> str:
    """What is wrong with a peer that has not this ``secret``."""
    own = fingerprint(secret)
    return f"its --cluster-secret-file holds another secret (the one here has fingerprint {own})"


def split_address(address: str) -> tuple[str, int]:
    """(IP address, port) of "host:port"; an IPv6 address stands in brackets."""
    host, _, digits = address.rpartition(":")
    port = int(digits) if digits.isdecimal() else -1
    if not host or not 0 <= port < 1 << 16:
        raise ConfigError(f"{FLAG} {address}: not host:port; 10.0.0.1:5000 has the form")
    try:
        found = sockets.getaddrinfo(host.strip("[]"), port, type=sockets.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a host"
        works = "a name that is known on all nodes works, or an IP address"
        raise ConfigError(f"{FLAG} {address}: {reason}; {works}") from error
    return str(found[0][4][0]), port


def local_address(address: str) -> str:
    """The IP address of this machine from which it reaches ``address``."""
    host, port = split_address(address)
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError as error:
            raise ConfigError(f"{FLAG} {address}: {error.strerror}") from error
        return str(probe.getsockname()[0])


class ClusterSocket:
    """A ROUTER at ``address``, or a DEALER that connects to it. Not to be used by two threads at
    once. ``num_refused``: handshakes that failed since the last one that did not; ``is_connected``:
    whether something listens at the address, after ``count_handshakes``."""

    def __init__(self, address: str, secret: str, bind: bool, identity: bytes = b"") -> None:
        host, port = split_address(address)
        self.num_refused, self.is_connected = 0, False
        self.address, self._is_bound = "", False
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(
            zmq.ROUTER if bind else zmq.DEALER
        )
        options = {zmq.LINGER: 0, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.IPV6: int(":" in host)}
        more = _OF_NODE0 if bind else {zmq.IMMEDIATE: 1, zmq.RECONNECT_IVL: RECONNECT_MS}
        for name, value in {**options, **more}.items():
            self.socket.setsockopt(name, value)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        secure(self.socket, secret, is_server=bind)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        events |= sum(_FAILED) | (zmq.EVENT_CLOSED if bind else 0)
        self.monitor = monitor_of(self.socket, events)
        where = f"tcp://{url_host(host)}:{port}"
        try:
            (self.socket.bind if bind else self.socket.connect)(where)
        except zmq.ZMQError as error:
            self.close()
            works = "another port works; of the nodes, only --node-rank 0 listens"
            works = works if error.errno == zmq.EADDRINUSE else ""
            works = works or "give an address of node 0 that the other nodes reach"
            raise ConfigError(
                f"{FLAG} {address}: {os.strerror(error.errno or 0)}; {works}"
            ) from error
        bound: object = self.socket.getsockopt(zmq.LAST_ENDPOINT)  # port 0 has become a free one
        assert isinstance(bound, bytes)
        self.address = bound.rstrip(b"\0").decode().removeprefix("tcp://")
        self._is_bound = bind

    def send(self, data: bytes, to: bytes | None = None) -> bool:
        """False if there is no such peer, or none yet."""
        try:
            self.socket.send_multipart([to, data] if to is not None else [data], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> list[tuple[bytes, bytes]]:
        """(sender, message) of all that has come."""
        found: list[tuple[bytes, bytes]] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found.append((frames[0], frames[-1]))

    def count_handshakes(self) -> tuple[bool, bool]:
        """Bring ``num_refused`` up to date; whether a peer was lost, and whether one was reached,
        since the last call."""
        is_lost = is_reached = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self.num_refused += event in _FAILED
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                self.is_connected = event == zmq.EVENT_CONNECTED
            is_lost |= event == zmq.EVENT_DISCONNECTED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_refused, is_reached = 0, True
        return is_lost, is_reached

    def close(self) -> None:
        """A port can be bound again afterwards: ZeroMQ frees it in a thread of its own."""
        if self._is_bound:
            self.socket.unbind(f"tcp://{self.address}")
            while self.monitor.poll(CLOSE_MS):
                if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_CLOSED:
                    break
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
