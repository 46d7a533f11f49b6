"""Collectives of ranks in shared memory, and what a rank protocol step costs without a model.

    python bench/ranks.py --tp 2

Each rank is a process. Bytes are what one rank has at the end (a gather) or adds (a sum). `plan
step`: rank 0 encodes and writes the plan of 16 decoding requests, the others read and decode it,
then all meet in a barrier. Medians and minima in microseconds; waits sleep in the futex when there
are fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from radixlm.distributed.shm import SPIN_US, Layout, Segment
from radixlm.distributed.topology import Topology, bounds
from radixlm.parallel.plan_codec import PlanDecoder, PlanEncoder
from radixlm.step.plan import DecodeBatch, Items, StepPlan

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
RUNNING = 16


def calls_of(segment: Segment, rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Each measured call of a rank, by its name."""
    world, ring = segment.ranks(rank).world, segment.ring(rank)
    calls: dict[str, Callable[[], object]] = {"barrier": world.barrier}
    for num_bytes in SIZES:
        columns = bounds(num_bytes // 4, size)
        part = torch.ones(1, columns[rank + 1] - columns[rank])
        whole = torch.ones(num_bytes // 4)
        calls[f"all gather {num_bytes >> 10} KiB"] = lambda x=part, cuts=columns: (
            world.all_gather_columns(x, cuts)
        )
        calls[f"all reduce {num_bytes >> 10} KiB"] = lambda x=whole: world.all_reduce(x)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    rids = tuple(f"r{i}" for i in range(RUNNING))
    items = Items(DecodeBatch(rids, np.arange(RUNNING)), np.full(RUNNING, 1000))
    tokens = np.zeros(RUNNING, np.int64)

    def plan_step() -> None:
        if rank == 0:
            ring.write(encoder.encode(StepPlan(0, items), tokens))
        else:
            decoder.decode(ring.read())
        world.barrier()

    calls["plan step"] = plan_step
    return calls


def run_rank(segment: Segment, rank: int, size: int, rounds: int) -> None:
    """Make all calls; rank 0 prints their times."""
    world = segment.ranks(rank).world
    for name, call in calls_of(segment, rank, size).items():
        times = []
        for _ in range(rounds):
            world.barrier()
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
        if rank == 0:
            print(f"{name:24} {statistics.median(times):10.1f} {min(times):10.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--fd", type=int, default=-1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    layout = Layout(Topology(tp=args.tp))
    spin_us = SPIN_US if args.tp <= (os.cpu_count() or 1) else 0.0
    if args.rank:
        run_rank(Segment(args.fd, layout, spin_us=spin_us), args.rank, args.tp, args.rounds)
        return
    segment = Segment.create(layout, spin_us=spin_us)
    own = ("--tp", str(args.tp), "--rounds", str(args.rounds), "--fd", str(segment.fd))
    others = [
        subprocess.Popen([sys.executable, __file__, *own, "--rank", str(r)], pass_fds=[segment.fd])
        for r in range(1, args.tp)
    ]
    print(f"{'':24} {'median us':>10} {'min us':>10}")
    run_rank(segment, 0, args.tp, args.rounds)
    for other in others:
        other.wait()


if __name__ == "__main__":
    main()
