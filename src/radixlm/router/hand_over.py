"""Hand-over of a shared port (``--reuse-port``) to the gateway that was started after this one.

The kernel spreads connections over all sockets that listen on the port, and resets those that wait
at one when it closes. So a gateway that ends first has the kernel give new connections to the
other, takes what waits at its own socket, and closes it then.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import struct
import sys
from pathlib import Path

log = logging.getLogger(__name__)

SETTLE_S = 0.2  # handshakes that had begun end meanwhile
_ATTACH = 51  # SO_ATTACH_REUSEPORT_CBPF
_RETURN = 0x06  # BPF_RET | BPF_K
_LISTENS = "0A"  # a state in /proc/net/tcp


async def hand_over(sock: socket.socket) -> bool:
    """Give new connections to the other socket of the port; whether there is one. ``sock`` must be
    accepted from until this returns."""
    if not sys.platform.startswith("linux") or num_listening(sock.getsockname()[1]) != 2:
        return False
    # the sockets of a port are in the order in which they began to listen: the second is the other
    program = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 1), 8)
    try:
        address = ctypes.addressof(program)
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HL", 1, address))
    except OSError as error:
        log.warning("the port cannot be handed over, some connections may be reset: %s", error)
        return False
    await asyncio.sleep(SETTLE_S)
    return True


def num_listening(port: int) -> int:
    """Sockets of this host that listen on a TCP port."""
    ending = f":{port:04X}"
    lines: list[str] = []
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net", name)
        lines += table.read_text().splitlines()[1:] if table.exists() else []
    fields = (line.split() for line in lines)
    return sum(one[1].endswith(ending) and one[3] == _LISTENS for one in fields)
