"""Encrypted sockets for processes that share a secret (zmq's CURVE).

Both ends derive the server's key pair from the secret. A client proves that it knows the server's
public key, which is never sent, by finishing the handshake; its own key pair comes from the secret
too. Without the secret nothing is delivered and nothing can be read.
"""

import hashlib
from functools import cache
from typing import Any

import zmq
from zmq.utils import z85

from radixlm.base.errors import ConfigError

MIN_CHARS = 16
ROLES = ("server", "client")
_given: dict[tuple[str, str], str] = {}  # private keys by secret and role


def secure(socket: zmq.Socket[Any], secret: str, is_server: bool) -> None:
    """Set the keys of a socket before it is bound or connected; ConfigError for a zmq without
    CURVE."""
    if not zmq.has("curve"):
        raise ConfigError("this build of zmq has no CURVE: use sockets of one machine (ipc)")
    server_public, server_secret = _keys(secret, "server")
    if is_server:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        return
    public, client_secret = _keys(secret, "client")
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, client_secret)


def fingerprint(secret: str) -> str:
    """6 hex digits, by which a user may compare the secrets of two hosts."""
    return hashlib.sha256(_private(secret, "server").encode()).hexdigest()[:6]


def private_keys(secret: str) -> list[str]:
    """What ``remember`` takes, for a process that this one starts."""
    return [_private(secret, role) for role in ROLES]


def remember(secret: str, keys: list[str]) -> None:
    """Spare this process the derivation, which takes some 40 ms a key by design."""
    _given.update({(secret, role): key for role, key in zip(ROLES, keys, strict=True)})


def _keys(secret: str, role: str) -> tuple[bytes, bytes]:
    """(public, secret) in zmq's text form."""
    private = (_given.get((secret, role)) or _private(secret, role)).encode()
    return zmq.curve_public(private), private


@cache
def _private(secret: str, role: str) -> str:
    seed = hashlib.scrypt(secret.encode(), salt=f"radixlm {role}".encode(), n=1 << 14, r=8, p=1)
    return z85.encode(seed[:32]).decode()
