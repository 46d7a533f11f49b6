"""``python -m sglang_router.launch_server``: servers of this machine, and a gateway before them."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import sys
import time
from collections.abc import Sequence

import requests

from radixlm.entrypoints.cli import main as radixlm
from radixlm.router.servers import (
    cleanup_processes,
    find_available_ports,
    launch_server_process,
    run_server,
)

__all__ = [
    "cleanup_processes",
    "find_available_ports",
    "launch_server_process",
    "main",
    "mp",
    "os",
    "random",
    "run_server",
    "wait_for_server_health",
]


def wait_for_server_health(host: str, port: int, timeout: int = 300) -> bool:
    """Whether a server answers /health within ``timeout`` seconds."""
    ends_s = time.perf_counter() + timeout
    while time.perf_counter() < ends_s:
        try:
            if requests.get(f"http://{host}:{port}/health", timeout=5).status_code == 200:
                return True
        except requests.exceptions.RequestException:
            pass
        time.sleep(1)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit status. One server for each of --dp-size."""
    words = sys.argv[1:] if argv is None else argv
    return radixlm(["router", "--launch-servers=0", *words])


if __name__ == "__main__":
    sys.exit(main())
