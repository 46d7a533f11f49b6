"""Speed of a pull of 64 MB between two processes, against memcpy: python bench/transfer.py"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from radixlm.transfer.client import Address, TransferClient
from radixlm.transfer.outbox import Bytes, Outbox
from radixlm.transfer.server import NO_ROOM, ServedPages, TransferServer
from radixlm.wire.transfer import Want

SECRET = b"s" * 32
TOTAL_BYTES = 64 << 20


def serve(page_bytes: int) -> None:
    """In a process of its own: an outbox with random pages, until standard input ends."""
    count = TOTAL_BYTES // page_bytes
    outbox = Outbox([page_bytes], TOTAL_BYTES)
    data = np.random.default_rng(0).integers(0, 256, (count, page_bytes), np.uint8)
    for number in range(count):
        outbox.put(number.to_bytes(32, "big"), data[number])
    pages = ServedPages(b"", lambda theirs: [], lambda payload, theirs, space: payload)
    server = TransferServer(outbox, pages, SECRET, "127.0.0.1")
    print(server.port, flush=True)
    sys.stdin.read()


def best_s(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        start_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-bytes", type=int, default=1 << 20)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--serve", action="store_true", help="the other process")
    args = parser.parse_args()
    if args.serve:
        serve(args.page_bytes)
        return
    count = TOTAL_BYTES // args.page_bytes
    source = np.random.default_rng(1).integers(0, 256, (count, args.page_bytes), np.uint8)
    out: list[Bytes] = [np.zeros(args.page_bytes, np.uint8) for _ in range(count)]

    def copy() -> None:
        for row, target in zip(source, out, strict=True):
            np.copyto(target, row)

    memcpy_s = best_s(copy, args.times)
    print(f"memcpy  {TOTAL_BYTES / memcpy_s / 1e9:5.2f} GB/s")
    command = [sys.executable, __file__, "--serve", "--page-bytes", str(args.page_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        address = Address("127.0.0.1", int(other.stdout.readline()))
        keys = [number.to_bytes(32, "big") for number in range(count)]
        want = Want(NO_ROOM, 0, keys, [args.page_bytes] * count, 10.0)
        for backend in ("shm", "tcp"):
            client = TransferClient(address, SECRET, b"", (backend,))
            seconds = best_s(lambda client=client: client.pull(want, out), args.times)  # type: ignore[misc]
            share = memcpy_s / seconds
            print(f"{backend:7} {TOTAL_BYTES / seconds / 1e9:5.2f} GB/s, {share:.0%} of memcpy")
            client.close()
        other.stdin.close()
        other.wait(10)


if __name__ == "__main__":
    main()
