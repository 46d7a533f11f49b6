"""What rank 0 and the other ranks of a host say to each other, in threads of one process."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import msgspec
import pytest

from radixlm.base.errors import CheckpointError, InvalidRequest, RankLost
from radixlm.config.server_config import ServerConfig
from radixlm.engine.rank_processes import REFUSED, RankProcesses
from radixlm.engine.ranks import AGREED, Followers, LeaderLink
from radixlm.engine.supervisor import TRUSTED_ENDS
from radixlm.parallel.relay import Answer
from radixlm.wire.pieces import pieces

CONFIG = ServerConfig.from_kwargs(tp_size=3, rank_timeout_s=20.0)


class Sockets:
    """In place of processes: the ends of their sockets."""

    def __init__(self) -> None:
        pairs = {rank: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in (1, 2)}
        self.sockets = {rank: pair[0] for rank, pair in pairs.items()}
        self.theirs = {rank: pair[1].detach() for rank, pair in pairs.items()}
        self.ranks = [1, 2]
        self.on_loss: Callable[[str], None] = lambda reason: None
        self.is_stopping = self.has_stopped = False

    def stop(self) -> None:
        self.has_stopped = True


Replica = tuple[Sockets, Followers, list[LeaderLink]]


@pytest.fixture
def replica() -> Iterator[Replica]:
    sockets = Sockets()
    first = Followers(cast(RankProcesses, sockets), CONFIG)
    links = [
        LeaderLink({"rank": rank, "ranks": [0, 1, 2], "socket": sockets.theirs[rank]}, CONFIG)
        for rank in (1, 2)
    ]
    yield sockets, first, links
    for link in (*sockets.sockets.values(), *(other._socket for other in links)):
        link.close()


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n, call=call: found.update({n: call()}), daemon=True)
        for n, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[n] for n in range(len(calls))]


def test_ranks_agree_on_the_smallest_of_each_number(replica: Replica) -> None:
    _, first, (second, third) = replica
    for numbers in ([(5, 9), (7, 3), (6, 6)], [(1,), (1,), (1,)], [(), (), ()]):
        calls = zip((first, second, third), numbers, strict=True)
        got = at_once([lambda p=p, n=n: p.agree(n) for p, n in calls])  # type: ignore[misc]
        assert got == [[min(column) for column in zip(*numbers, strict=True)]] * 3


def test_commands_may_come_before_the_ranks_of_another_host_have_agreed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = os.memfd_create("radixlm")
    socket.send_fds(ours, [b"generation"], [memory])
    link = LeaderLink({"rank": 2, "ranks": [2], "socket": theirs.detach()}, CONFIG)
    command = b"g" + bytes(100_000)
    with ours, link._socket:
        for piece in pieces(command):
            ours.send(piece)
        ours.send(AGREED + msgspec.msgpack.encode([3, 4]))
        for piece in pieces(b"next"):
            ours.send(piece)
        assert link.agree((5, 4)) == [3, 4]
        assert [link.read(), link.read()] == [command, b"next"]
    os.close(memory)


def test_messages_of_any_size_come_in_order(replica: Replica) -> None:
    sockets, first, links = replica
    large = os.urandom(9 << 20)  # more than the ring holds, and far more than a socket

    def send() -> None:
        first.tell(ord("p"), large)
        first.tell(ord("c"), b"next")
        first.stop()

    def read(link: LeaderLink) -> list[bytes]:
        return [bytes(link.read()) for _ in range(3)]

    got = at_once([send, lambda: read(links[0]), lambda: read(links[1])])
    assert got[1] == got[2] == [b"p" + large, b"cnext", b"s"]
    assert sockets.has_stopped


def test_ranks_that_are_told_to_stop_may_end_at_once(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets, first, _ = replica
    expected: list[bool] = []
    monkeypatch.setattr(first, "tell", lambda kind: expected.append(sockets.is_stopping))
    first.stop()
    assert expected == [True]


def test_ranks_are_forked_with_their_own_startup() -> None:
    def run(startup: dict[str, Any]) -> int:
        link = socket.socket(fileno=startup["socket"])
        link.send(json.dumps([startup["rank"], startup["ranks"], startup["name"]]).encode())
        return REFUSED if link.recv(100) == b"refuse" else 0

    processes = RankProcesses({"local_ranks": [1, 2], "name": "tiny"}, run)
    for rank, link in processes.sockets.items():
        assert json.loads(link.recv(100)) == [rank, [0, 1, 2], "tiny"]
    processes.sockets[1].send(b"refuse")  # no loss: rank 0 hears why
    processes.is_stopping = True
    processes.sockets[2].send(b"end")
    processes.stop()
    for pid in processes._pids.values():
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("code", "status"), [(1, 1), (-signal.SIGSEGV, 139), (-signal.SIGBUS, 135)]
)
def test_the_memory_of_a_rank_that_broke_down_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, code: int, status: int
) -> None:
    """The server sees only how rank 0 ends."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    processes = RankProcesses({"local_ranks": []}, lambda startup: 0)
    with pytest.raises(SystemExit) as ended:
        processes.end("rank 1 ended", code)
    assert ended.value.code == status and (status in TRUSTED_ENDS) == (code > 0)


def test_a_call_waits_for_all_ranks_and_gives_their_answers_in_order(replica: Replica) -> None:
    _, first, (second, third) = replica
    call, answers = first.expect()
    other, later = first.expect()
    third.answer(Answer(2, call, "c"))
    third.answer(Answer(2, other, None, "no such file", "InvalidRequest"))
    assert not answers.done()
    second.answer(Answer(1, call, "b"))
    second.answer(Answer(1, other, "fine"))
    assert answers.result(20) == ["b", "c"]
    with pytest.raises(InvalidRequest, match="rank 2: no such file"):
        later.result(20)


def test_answers_of_any_size_come(replica: Replica) -> None:
    _, first, links = replica
    call, answers = first.expect()
    ends = list(range(200_000))  # of the pages that a long prompt finds: more than a packet holds
    for rank, link in enumerate(links, 1):
        link.answer(Answer(rank, call, ends))
    assert answers.result(20) == [ends, ends]


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(replica: Replica) -> None:
    _, first, (second, third) = replica
    second.answer(Answer(1, -2, [4]))
    third.fail(CheckpointError("layers.3.q_proj: expected 4 heads, checkpoint has 8"))
    with pytest.raises(CheckpointError, match=r"rank 2: layers\.3\.q_proj"):
        first.agree((4,))


def test_a_loss_ends_every_wait(replica: Replica) -> None:
    sockets, first, (second, third) = replica
    threading.Timer(0.05, lambda: sockets.on_loss("rank 2 ended with SIGKILL")).start()
    with pytest.raises(RankLost, match="rank 2 ended with SIGKILL"):
        second.read()
    with pytest.raises(RankLost):
        first.ranks.tp.barrier()
    first_end = sockets.sockets[2]
    first_end.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RankLost, match="rank 0 is gone"):
        third.agree((1,))
