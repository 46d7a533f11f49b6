"""How many file descriptors connections may use. The rest are for the server itself: the start of
another engine and its connection, log and upload files, requests to other servers.

An engine's connection must find a free descriptor: without one libzmq aborts the process
(``src/ipc_listener.cpp``).
"""

import contextlib
import functools
import resource

from radixlm.base.errors import ConfigError

WANTED = 65536
BACKLOG = 2048  # connections that may wait to be accepted
MIN_RESERVED, MAX_RESERVED = 16, 4096
LEAST = 64  # an idle server has some 30 itself


@functools.cache
def descriptor_limits() -> tuple[int, int]:
    """Raise this process's limit as far as the system lets it. The number of the highest descriptor
    that a connection may have (the system gives the lowest free number), and how many are above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = WANTED
    raised = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if raised > soft:
        with contextlib.suppress(OSError, ValueError):  # the system may have a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    num_reserved = max(MIN_RESERVED, min(MAX_RESERVED, soft // 4))
    return soft - num_reserved - 1, num_reserved


def check_descriptors() -> None:
    """ConfigError if so few are allowed that no connection would get one."""
    num_allowed = sum(descriptor_limits()) + 1
    if num_allowed < LEAST:
        raise ConfigError(
            f"ulimit -n {num_allowed} leaves no file descriptor for connections; ulimit -n 1024 "
            f"works, {LEAST} is the least"
        )
