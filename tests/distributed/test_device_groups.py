"""Groups of GPUs give what groups of the host give; NCCL's functions get what nccl.h says."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.device_comm import HostComm
from tests.fakes.thread_groups import thread_groups, thread_ranks
from torch import Tensor

from radixlm.base.errors import ConfigError, RankLost
from radixlm.distributed import nccl
from radixlm.distributed.device_groups import NcclGroup, StagedGroup, on_device
from radixlm.distributed.groups import SOLO, Group
from radixlm.distributed.topology import Topology

HOST = torch.device("cpu")
ROWS, COLUMNS = (2, 0, 3), (0, 4, 5, 9)
SENT = ((1, 0, 2), (0, 0, 1), (2, 1, 0))


def together(groups: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """What ``work`` returns on each rank."""
    found: list[Any] = [None] * len(groups)

    def run(rank: int) -> None:
        found[rank] = work(groups[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).bfloat16()


def all_calls(group: Group) -> list[Tensor | None]:
    """Every collective, with parts of different sizes, of which one is empty."""
    rank = group.rank
    width = COLUMNS[rank + 1] - COLUMNS[rank]
    columns = numbers(rank, width, 5).T  # not contiguous
    received = tuple(SENT[source][rank] for source in range(3))
    group.barrier()
    if rank == 0:
        group.send(numbers(7, 3), 2)
    return [
        group.receive((3,), torch.bfloat16, 0) if rank == 2 else None,
        group.all_gather_columns(columns, COLUMNS),
        group.gather_columns(columns, COLUMNS),
        group.all_gather_rows(numbers(rank, ROWS[rank], 2, 3), ROWS),
        group.all_reduce(numbers(rank, 4, 3)),
        group.broadcast(numbers(rank, 4, 3).T, 1),
        group.all_to_all_rows(numbers(rank, sum(SENT[rank]), 3), SENT[rank], received),
    ]


@pytest.mark.parametrize("where", ["device", "host", "staged"])
def test_equals_the_group_of_the_host(where: str) -> None:
    """Tensors of the device, of the host, and without NCCL."""
    wanted = together(thread_groups(3), all_calls)
    hosts = thread_groups(3)
    device = torch.device("meta") if where == "host" else HOST
    groups: list[Any] = [NcclGroup(host, device, HostComm(host, HOST)) for host in hosts]
    if where == "host":  # what is received would be on the device
        for group, host in zip(groups, hosts, strict=True):
            group.receive = host.receive
    if where == "staged":
        groups = [StagedGroup(host, HOST) for host in hosts]
    for mine, theirs in zip(together(groups, all_calls), wanted, strict=True):
        for got, want in zip(mine, theirs, strict=True):
            assert (got is None) == (want is None)
            assert want is None or torch.equal(got, want)


def test_groups_of_the_same_ranks_share_a_communicator() -> None:
    """Groups of one rank need none; stages hand over through the host."""
    topology = Topology(tp=4, pp=2, ep=2)
    ranks = thread_ranks(topology)
    made: list[Group] = []

    def make(host: Group) -> HostComm:
        made.append(host)
        return HostComm(host, HOST)

    found = on_device(ranks[1], topology, HOST, make)
    assert isinstance(found.tp, NcclGroup) and found.attn is found.tp
    assert found.stages is ranks[1].stages and found.world is ranks[1].world
    assert made == [ranks[1].tp, ranks[1].experts, ranks[1].expert_tp]
    assert isinstance(on_device(ranks[1], topology, HOST, None).tp, StagedGroup)
    assert on_device(ranks[1], topology, HOST, None).place == ranks[1].place


def _fake_nccl(calls: list[str]) -> Any:
    """The functions of nccl.h for one rank, over memory of the host."""

    def gather(send: int, receive: int, count: int, kind: int, comm: Any, stream: Any) -> int:
        assert (kind, stream) == (1, 7)
        ctypes.memmove(receive, send, count)
        return 0

    def send(at: int, count: int, kind: int, peer: int, comm: Any, stream: Any) -> int:
        calls.append(f"send {count} to {peer}")
        return 0

    def receive(at: int, count: int, kind: int, peer: int, comm: Any, stream: Any) -> int:
        calls.append(f"receive {count} from {peer}")
        return 0

    def broadcast(
        send: int, receive: int, count: int, kind: int, root: int, comm: Any, stream: Any
    ) -> int:
        assert send == receive
        calls.append(f"broadcast {count} of {root}")
        return 5 if root else 0

    def begin(comm: Any, size: int, unique: Any, rank: int) -> int:
        calls.append(f"rank {rank} of {size}: {bytes(unique)[:2].hex()}")
        return 0

    def give_id(unique: Any) -> int:
        ctypes.memset(unique, 0xAB, 128)
        return 0

    return SimpleNamespace(
        ncclGetUniqueId=give_id, ncclCommInitRank=begin, ncclAllGather=gather, ncclSend=send,
        ncclRecv=receive, ncclBroadcast=broadcast, ncclGroupStart=lambda: 0,
        ncclGroupEnd=lambda: 0, ncclGetErrorString=lambda code: b"invalid usage",
    )  # fmt: skip


def test_calls_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator of one rank; an error of NCCL is a lost rank."""
    calls: list[str] = []
    library = _fake_nccl(calls)
    monkeypatch.setattr(nccl, "_library", lambda: library)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: stream)
    (alone,) = thread_groups(1)
    comm = nccl.NcclComm(alone, HOST)
    x = numbers(0, 2, 3)
    assert torch.equal(comm.all_gather(x), x[None])
    comm.broadcast(x, 0)
    comm.exchange([x, x[:0]], [x[:0], x])
    with pytest.raises(RankLost, match="ncclBroadcast: invalid usage"):
        comm.broadcast(x, 1)
    told = ["rank 0 of 1: abab", "broadcast 12 of 0", "send 12 to 0", "receive 12 from 1"]
    assert calls == [*told, "broadcast 12 of 1"]


def test_a_machine_without_nccl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARY", "libnone.so.2")
    nccl._library.cache_clear()
    with pytest.raises(ConfigError, match="install nvidia-nccl"):
        nccl.NcclComm(SOLO, HOST)
    nccl._library.cache_clear()
