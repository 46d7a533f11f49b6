"""Ports."""

from __future__ import annotations

import socket


def is_port_available(port: int) -> bool:
    """Whether a server may listen on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True


def get_open_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
