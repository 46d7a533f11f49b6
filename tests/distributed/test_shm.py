"""Collectives through shared memory: threads with a mapping each, and processes."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.distributed.test_groups import (
    DTYPES,
    SHAPES,
    check_collectives,
    every_collective,
    together,
)

from radixlm.base.errors import RankLost
from radixlm.distributed.groups import Group
from radixlm.distributed.ring import HEAD, PlanRing
from radixlm.distributed.shm import FLAG_BYTES, HEADER_BYTES, KINDS, Layout, Segment, Sizes
from radixlm.distributed.topology import Topology, bounds
from radixlm.kernels.cpu import extension

pytestmark = pytest.mark.skipif(not extension.available, reason=extension.reason)
SMALL = Sizes(slot=256, stream=256, link=8192, ring=1024)


def segments(topology: Topology, sizes: Sizes = SMALL, timeout_s: float = 20.0) -> list[Segment]:
    """One mapping of a new segment a rank, as its process would have."""
    layout = Layout(topology, sizes=sizes)
    first = Segment.create(layout, timeout_s, spin_us=0.0)
    more = [Segment(first.fd, layout, timeout_s, spin_us=0.0) for _ in range(topology.world - 1)]
    return [first, *more]


def worlds(topology: Topology, sizes: Sizes = SMALL) -> list[Group]:
    return [s.ranks(rank).world for rank, s in enumerate(segments(topology, sizes))]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_against_plain_tensors(size: int, dtype: torch.dtype) -> None:
    groups = worlds(Topology(tp=size))
    for rows, columns in [*SHAPES, (40, 33), (1, 700)]:  # these pass in several rounds
        found = together(groups, lambda g: every_collective(g, rows, columns, dtype))  # noqa: B023
        check_collectives(found, rows, columns, dtype)


def test_sums_are_added_in_rank_order_whatever_the_size() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    for count in (1, 63, 1000):  # one round and several
        groups = worlds(Topology(tp=4))
        found = together(groups, lambda g: g.all_reduce(torch.full((count,), values[g.rank])))  # noqa: B023
        assert all(torch.equal(x, torch.ones(count)) for x in found)


def test_groups_of_one_segment_do_not_meet() -> None:
    topology = Topology(tp=4, pp=2, attn_dp=2, ep=2)
    mapped = segments(topology)

    def work(group: Group) -> list[list[int]]:
        ranks = mapped[group.rank].ranks(group.rank)
        found = []
        for kind in KINDS:
            mine = getattr(ranks, kind)
            x = torch.tensor([[group.rank]])
            found.append(mine.all_gather_rows(x, (1,) * mine.size).flatten().tolist())
        return found

    found = together([s.ranks(r).world for r, s in enumerate(mapped)], work)
    for rank, (world, tp, attn, experts, expert_tp, stages) in enumerate(found):
        assert world == list(range(8))
        expected = [topology.tp_groups, topology.attn_groups, topology.expert_groups]
        expected += [topology.expert_tp_groups, topology.stage_chains]
        for got, groups in zip((tp, attn, experts, expert_tp, stages), expected, strict=True):
            assert tuple(got) in groups and rank in got


def test_a_long_message_flows_through_a_short_stream() -> None:
    first, second = worlds(Topology(tp=1, pp=2))
    messages = [torch.arange(n, dtype=torch.int16) for n in (1, 5, 4000, 0, 300)]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [first.send(m, 1) for m in messages])
        for message in messages:
            assert torch.equal(second.receive(tuple(message.shape), torch.int16, 0), message)
        sent.result(10)


def test_counts_wrap_around() -> None:
    """Flags count modulo 2^31: weeks of serving."""
    layout = Layout(Topology(tp=1, pp=2), sizes=SMALL)
    segment = Segment.create(layout, 20.0, spin_us=0.0)
    with mmap.mmap(segment.fd, HEADER_BYTES + FLAG_BYTES * layout.num_flags) as memory:
        for flag in range(layout.num_flags):
            struct.pack_into("<I", memory, HEADER_BYTES + FLAG_BYTES * flag, 2**31 - 20)

    def work(group: Group) -> list[float]:
        return [
            group.broadcast(torch.tensor([[float(i)]]), 0).item() if i % 2
            else float(_passed(group, i)) for i in range(100)
        ]  # fmt: skip

    def _passed(group: Group, value: int) -> int:
        if group.rank == 0:
            group.send(torch.full((100,), value), 1)
            return value
        return int(group.receive((100,), torch.int64, 0).sum()) // 100

    found = together([segment.ranks(rank).stages for rank in range(2)], work)
    assert found == [list(range(100))] * 2


@pytest.mark.parametrize("spin_us", [0.0, 1e6])
def test_poison_frees_spinning_and_sleeping_waiters(spin_us: float) -> None:
    layout = Layout(Topology(tp=3))
    mine = Segment.create(layout, 30.0, spin_us)
    others = [Segment(mine.fd, layout, 30.0, spin_us) for _ in range(2)]
    inside = threading.Barrier(3)

    def wait(rank: int) -> tuple[float, str]:
        group = others[rank].ranks(rank).world
        inside.wait(60)
        with pytest.raises(RankLost) as lost:
            group.barrier() if rank else group.receive((1,), torch.float32, 2)
        return time.monotonic(), str(lost.value)

    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(wait, rank) for rank in range(2)]
        inside.wait(60)
        poisoned = time.monotonic()
        mine.poison("rank 2 ended with signal 9")
        mine.poison("later")
        ended = [w.result(10) for w in waits]
    assert max(at for at, _ in ended) - poisoned < 0.5  # 50 ms on a machine at rest
    assert {text for _, text in ended} == {mine.reason} == {"rank 2 ended with signal 9"}
    with pytest.raises(RankLost):
        others[0].ranks(0).tp.all_reduce(torch.ones(1))


def test_a_silent_rank_is_named() -> None:
    first, _ = segments(Topology(tp=1, pp=2), timeout_s=0.05)
    with pytest.raises(RankLost, match=r"rank 1 was silent for 0\.05 s"):
        first.ranks(0).stages.barrier()
    assert first.take_waited_s() > 0.0 or first.reason == ""


def test_rows_that_nobody_expects_are_refused() -> None:
    def work(group: Group) -> None:
        x = torch.zeros(3, 2)
        if group.rank == 0:
            group.all_to_all_rows(x, (1, 2), (1, 1))
        else:
            with pytest.raises(ValueError, match="rank 0 sends 16 bytes, expected 24"):
                group.all_to_all_rows(x, (1, 2), (3, 2))

    together(worlds(Topology(tp=2)), work)


def rings(readers: int, sizes: Sizes = SMALL) -> list[PlanRing]:
    mapped = segments(Topology(tp=readers + 1), sizes)
    return [s.ring(rank) for rank, s in enumerate(mapped)]


def test_plans_reach_all_readers_in_order() -> None:
    writer, *readers = rings(3)
    messages = [bytes([i % 251]) * (i * 37 % 3000) for i in range(60)]  # some longer than the ring
    with ThreadPoolExecutor(4) as pool:
        written = pool.submit(lambda: [writer.write(m) for m in messages])
        reads = [pool.submit(lambda r=r: [r.read() for _ in messages]) for r in readers]
        assert written.result(30) == list(range(60))
        assert all(read.result(30) == messages for read in reads)


def test_a_reader_that_misses_a_plan_stops() -> None:
    writer, reader = rings(1)
    writer.write(b"first")
    writer.write(b"second")
    reader._stream.read_bytes(HEAD.size, 1.0)
    reader._stream.read_bytes(len(b"first"), 1.0)
    with pytest.raises(RankLost, match="plan 1 came where plan 0 was expected"):
        reader.read()


def test_a_reader_that_waits_handles_signals() -> None:
    class Rang(Exception):
        pass

    def ring(signum: int, frame: Any) -> None:
        raise Rang

    writer, reader = rings(1)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Rang):
            reader.read()
    finally:
        signal.signal(signal.SIGALRM, before)
    writer.write(b"nothing is lost")
    assert reader.read() == b"nothing is lost"


def test_a_ring_without_readers_takes_plans() -> None:
    (writer,) = rings(0)
    assert [writer.write(b"x" * 5000) for _ in range(3)] == [0, 1, 2]


CHILD = """
import sys, torch
from radixlm.distributed.shm import Layout, Segment
from radixlm.distributed.topology import Topology
rank, fd, size = map(int, sys.argv[1:])
ranks = Segment(fd, Layout(Topology(tp=size)), spin_us=0.0).ranks(rank)
total = ranks.world.all_reduce(torch.full((100_000,), float(rank)))
assert torch.equal(total, torch.full((100_000,), float(sum(range(size)))))
print("ready", flush=True)
ranks.world.barrier()
"""


def test_processes_share_a_segment_and_a_killed_one_frees_the_others() -> None:
    size = 3
    segment = Segment.create(Layout(Topology(tp=size)), spin_us=0.0)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(segment.fd), str(size)],
            pass_fds=[segment.fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, size)
    ]
    try:
        world = segment.ranks(0).world
        total = world.all_reduce(torch.zeros(100_000))
        assert torch.equal(total, torch.full((100_000,), 3.0))
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 2  # type: ignore[union-attr]
        os.kill(children[0].pid, signal.SIGKILL)
        children[0].wait(10)
        segment.poison("rank 1 ended with signal 9")
        for child in children[1:]:
            _, errors = child.communicate(timeout=10)
            assert child.returncode and "RankLost: rank 1 ended with signal 9" in errors
    finally:
        for child in children:
            child.kill()
            child.communicate()


SUSPENDED = """
import sys
from radixlm.distributed.shm import Layout, Segment
from radixlm.distributed.topology import Topology
stages = Segment(int(sys.argv[1]), Layout(Topology(tp=1, pp=2)), 1.0, spin_us=0.0).ranks(1).stages
print("ready", flush=True)
stages.barrier()
"""


def test_time_in_which_a_process_is_suspended_is_no_silence_of_others() -> None:
    """A paused container stops all ranks: when it goes on, none of them is lost."""
    segment = Segment.create(Layout(Topology(tp=1, pp=2)), spin_us=0.0)
    command = [sys.executable, "-c", SUSPENDED, str(segment.fd)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, pass_fds=[segment.fd], stdout=pipe, stderr=pipe, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(0.1)  # it waits
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.1)  # longer than its limit
        child.send_signal(signal.SIGCONT)
        time.sleep(0.1)  # it looks at its clock
        segment.ranks(0).stages.barrier()
        _, errors = child.communicate(timeout=30)
        assert child.returncode == 0, errors
    finally:
        child.kill()
        child.wait()


def test_a_step_program_gathers_columns_and_logits() -> None:
    native, size, rows, width = extension.native(), 3, 5, 40
    mapped = segments(Topology(tp=size), Sizes(slot=512, common=0))
    cuts = bounds(width, size)
    x = torch.randn(rows, width)

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        program = native.Program()
        y = program.buffer(2 * width)
        lo, hi = cuts[group.rank], cuts[group.rank + 1]
        table = torch.zeros(rows, 2 * width)  # fills the buffer with the rank's own columns
        table[:, width + lo : width + hi] = x[:, lo:hi]
        args = native.EmbedArgs()
        args.table, args.vocab, args.dim = table.data_ptr(), rows, 2 * width
        program.embed(y, None, args, False)
        shm = mapped[group.rank].ranks(group.rank).tp.native  # type: ignore[attr-defined]
        program.all_gather(y, list(cuts), shm, offset=width)
        program.hidden(y, 2 * width)
        program.gather_logits(list(cuts), shm)
        step = native.Step()
        ids = torch.arange(rows, dtype=torch.int32)
        logits, hidden = torch.zeros(rows, width), torch.zeros(rows, 2 * width)
        logits[:, lo:hi] = x[:, lo:hi] * 2
        step.tokens = step.num_rows = rows
        step.ids = step.rows = ids.data_ptr()
        step.logits, step.ld_logits = logits.data_ptr(), width
        step.hidden, step.ld_hidden = hidden.data_ptr(), 2 * width
        step.threads = 2
        program.run(step)
        return hidden[:, width:], logits

    found = together([s.ranks(r).world for r, s in enumerate(mapped)], work)
    assert all(torch.equal(hidden, x) for hidden, _ in found)
    assert torch.equal(found[0][1], x * 2)
    assert not torch.equal(found[1][1], x * 2)
