"""Nodes join node 0, start ranks, meet in its store, and are missed when they go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from radixlm.base.errors import ConfigError, RankLost
from radixlm.distributed.remote import HubStore, RemoteValues
from radixlm.engine import node_agent, nodes
from radixlm.engine.node_agent import NodeAgent
from radixlm.engine.node_facts import checkpoint_digest, difference
from radixlm.engine.node_files import FileKey, fetch, fetch_adapter
from radixlm.engine.nodes import Hub
from radixlm.lora.registry import ADAPTER_CONFIG, ADAPTER_TENSORS, Spool
from radixlm.weight_updates.tensor_spool import TensorSpool
from radixlm.wire.cluster import NodeFacts
from radixlm.wire.cluster_socket import local_address, read_secret, split_address
from radixlm.wire.curve import fingerprint

SECRET = "correct horse battery staple"
FACTS = NodeFacts("a", "0.1", "c0ffee", "/models/m", "127.0.0.1", {"tp_size": 2, "nnodes": 2})
# a rank that says what its startup config is, then repeats what it is told
RANK = """
import json, socket, sys
startup = json.load(sys.stdin)
link = socket.socket(fileno=startup["socket"])
name, (segment,), _, _ = socket.recv_fds(link, 100, 1)
link.send(json.dumps(startup).encode())
while data := link.recv(1 << 20):
    if data == b"stop":
        sys.exit(0)
    if data == b"read pieces":
        packets = [link.recv(1 << 20)]
        while packets[-1][0]:
            packets.append(link.recv(1 << 20))
        data = b"%d" % sum(len(packet) - 1 for packet in packets)
    link.send(b"rank %d: %s" % (startup["rank"], data))
"""
COMMAND = (sys.executable, "-S", "-c", RANK)


class Running:
    """An agent in a thread; ``join`` gives its exit status or its error."""

    def __init__(self, agent: NodeAgent) -> None:
        self.agent, self.outcome = agent, None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.agent.run()
        except ConfigError as error:
            self.outcome = error

    def join(self) -> int | ConfigError | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.outcome


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(hub: Hub, facts: NodeFacts = FACTS, rank: int = 1, secret: str = SECRET) -> Running:
        options = {"model_path": facts.path}
        agent = NodeAgent(hub.address, secret, facts, rank, options, 60.0, COMMAND)
        running.append(Running(agent))
        return running[-1]

    yield start
    for one in running:
        one.agent.stop()
        one.join()


@pytest.fixture
def make_hub() -> Iterator[Callable[..., Hub]]:
    made: list[Hub] = []

    def make(nnodes: int = 2, timeout_s: float = 60.0) -> Hub:
        made.append(Hub("127.0.0.1:0", SECRET, FACTS, nnodes, timeout_s))
        return made[-1]

    yield make
    for hub in made:
        hub.close()


def successor(hub: Hub) -> Hub:
    """Another hub at the address of one that is closed. zmq closes a listener in its own time."""
    deadline_s = time.monotonic() + 20
    while True:
        try:
            return Hub(hub.address, SECRET, FACTS, 2, 60.0)
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.001)


class Lost:
    """What a hub reports as lost, once."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, int]] = []
        self.came = threading.Event()

    def __call__(self, reason: str, code: int) -> None:
        self.reasons.append((reason, code))
        self.came.set()

    def wait(self) -> tuple[str, int]:
        assert self.came.wait(60)
        (reason,) = self.reasons
        return reason


def started(hub: Hub, running: Running, rank: int = 1) -> tuple[Lost, int]:
    """A node whose one fake rank runs: what is lost, and the rank's pid."""
    lost = Lost()
    hub.wait()
    startup = {"rank": rank, "options": {"model_path": "/of/node0", "tp_size": 2}}
    hub.start({1: [startup]}, lost)
    got = json.loads(said(hub, rank))
    assert got["options"] == {"model_path": "/models/m", "tp_size": 2}, "its own folder"
    assert (got["rank"], got["parent"]) == (rank, os.getpid())
    return lost, running.agent.ranks[rank].pid


def said(hub: Hub, rank: int = 1) -> bytes:
    hub.sockets[rank].settimeout(60)
    return hub.sockets[rank].recv(1 << 20)


def test_a_node_joins_starts_its_rank_and_ends_with_node_0(
    make_hub: Callable[..., Hub], run: Callable[..., Running]
) -> None:
    hub = make_hub()
    running = run(hub)
    assert hub.wait() == {1: FACTS}
    lost, pid = started(hub, running)
    descriptor = os.pidfd_open(pid)
    hub.close(is_final=True)
    assert running.join() == 0
    assert not lost.reasons
    with pytest.raises(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, 0)


def test_a_rank_that_is_killed_is_reported_with_its_signal(
    make_hub: Callable[..., Hub], run: Callable[..., Running], tmp_path: Path
) -> None:
    hub = make_hub()
    running = run(hub)
    lost, pid = started(hub, running)
    os.kill(pid, signal.SIGKILL)
    assert lost.wait() == ("rank 1 ended with SIGKILL", -signal.SIGKILL)
    hub.members.clear()
    hub.close()  # as rank 0's process does that ends, too
    second = successor(hub)
    try:
        second.wait()
        (waiting,) = running.agent._ready_made  # since the rank ended
        assert started(second, running)[1] == waiting.pid
    finally:
        second.close()


def test_a_rank_whose_waiting_process_was_killed_is_reported(
    make_hub: Callable[..., Hub], run: Callable[..., Running]
) -> None:
    hub = make_hub()
    running = run(hub)
    hub.wait()
    waiting = node_agent.RankProcess(COMMAND)
    waiting.kill()
    waiting._ended.result(60)
    running.agent._ready_made.append(waiting)
    lost = Lost()
    hub.start({1: [{"rank": 1, "options": {}}]}, lost)
    assert lost.wait() == ("rank 1 ended with SIGKILL", -signal.SIGKILL)


def test_a_node_without_room_for_a_process_reports_it_and_lives(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub()
    run(hub)
    hub.wait()

    def refuse(command: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    lost = Lost()
    with monkeypatch.context() as patch:
        patch.setattr(node_agent, "RankProcess", refuse)
        hub.start({1: [{"rank": 1, "options": {}}]}, lost)
        assert lost.wait() == ("rank 1 ended with exit code 1", 1)
        hub.close()
    second = successor(hub)
    try:
        assert second.wait() == {1: FACTS}
    finally:
        second.close()


def test_a_node_that_is_gone_before_the_start_is_lost(make_hub: Callable[..., Hub]) -> None:
    hub, lost = make_hub(), Lost()
    hub.start({1: []}, lost)
    assert lost.wait() == ("node 1 is gone", 1)


def test_a_new_node_0_gets_the_node_back_and_the_old_ranks_end(
    make_hub: Callable[..., Hub], run: Callable[..., Running], tmp_path: Path
) -> None:
    first = make_hub()
    running = run(first)
    _, pid = started(first, running)
    descriptor = os.pidfd_open(pid)
    first.members.clear()  # as kill -9 does: nothing is said to anybody
    first.close()
    second = successor(first)
    try:
        assert second.wait() == {1: FACTS}
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, 0)
        _, again = started(second, running)
        assert again != pid
    finally:
        second.close()


def test_a_new_node_0_is_found_without_waiting_for_a_beat(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_hub()
    running = run(first)
    started(first, running)
    monkeypatch.setattr(node_agent, "BEAT_S", 1000.0)
    monkeypatch.setattr(node_agent, "LOST_S", 1000.0)
    first.members.clear()
    first.close()
    deadline_s = time.monotonic() + 20
    while not running.agent._ready_made and time.monotonic() < deadline_s:
        time.sleep(0.001)
    (waiting,) = running.agent._ready_made  # for the rank to come, though the old one lives
    second = successor(first)
    try:
        assert started(second, running)[1] == waiting.pid
    finally:
        second.close()


def test_a_node_that_falls_silent_is_lost(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub()
    running = run(hub)
    hub.wait()
    lost = Lost()
    hub.start({1: []}, lost)
    monkeypatch.setattr(nodes, "LOST_S", 0.5)
    monkeypatch.setattr(running.agent, "_send", lambda message: None)
    assert lost.wait() == ("node 1 on a sent nothing for 0.5 s", 1)


def test_node_0_that_stood_still_hears_that_the_ranks_were_ended(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub()
    lost, _ = started(hub, run(hub))
    monkeypatch.setattr(node_agent, "LOST_S", 0.0)
    assert lost.wait() == ("rank 1 ended with exit code 1", 1)


def test_an_agent_that_stood_still_keeps_its_ranks(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the machine was suspended: node 0 may have had no time for a beat either."""
    hub = make_hub()
    running = run(hub)
    started(hub, running)
    waited_s, receive, goes_on = 0.0, running.agent._receive, threading.Event()

    def receive_late(wait_s: float) -> list[Any]:
        nonlocal waited_s
        if waited_s:
            goes_on.set()
            return receive(wait_s)
        waited_s = 60.0
        return []

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + waited_s)
    monkeypatch.setattr(node_agent, "time", clock)
    monkeypatch.setattr(running.agent, "_receive", receive_late)
    assert goes_on.wait(60) and list(running.agent.ranks) == [1]
    assert running.agent._generation


@pytest.mark.parametrize(
    ("facts", "rank", "says"),
    [
        (FACTS, 5, "--node-rank 5: this replica has nodes 0 to 1"),
        (NodeFacts("b", "0.2", "c0ffee", "/m"), 1, "b runs RadixLM 0.2, node 0 on a runs 0.1"),
        (
            NodeFacts("b", "0.1", "beef", "/m"),
            1,
            "at /m on b has digest beef, that at /models/m on node 0 (a) c0ffee",
        ),
        (
            NodeFacts("b", "0.1", "c0ffee", "/m", "", {"tp_size": 4}),
            1,
            "--tp-size is 4 on b and 2 on node 0 (a)",
        ),
    ],
)
def test_a_node_that_differs_is_refused_with_both_values(
    make_hub: Callable[..., Hub],
    run: Callable[..., Running],
    facts: NodeFacts,
    rank: int,
    says: str,
) -> None:
    hub = make_hub()
    outcome = run(hub, facts, rank).join()
    assert isinstance(outcome, ConfigError) and says in str(outcome)
    hub.timeout_s = 0.0
    with pytest.raises(ConfigError, match="node 1 of 2 has not joined within 0 s") as caught:
        hub.wait()
    assert says in str(caught.value) and "--dist-timeout" in str(caught.value)


def test_two_nodes_with_one_rank_and_the_choice_of_a_free_one(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "RETRY_S", 0.0)
    hub = make_hub(nnodes=3)
    first = run(hub)
    with hub._changed:
        assert hub._changed.wait_for(lambda: 1 in hub.members, 60)
    second = run(hub, NodeFacts("b", "0.1", "c0ffee", "/m")).join()
    assert "--node-rank 1 is taken by a; --node-rank 2 is free" in str(second)
    third = run(hub, rank=-1)
    assert hub.wait().keys() == {1, 2}
    fourth = run(hub, rank=-1).join()
    assert "all 3 nodes of this replica have joined" in str(fourth)
    assert (first.agent.node_rank, third.agent.node_rank) == (1, 2)


def test_a_node_that_asked_for_any_number_takes_another_when_its_own_was_given_away(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "RETRY_S", 0.0)  # a refusal would end it
    hub = make_hub(nnodes=3)
    run(hub, rank=-1)
    with hub._changed:
        assert hub._changed.wait_for(lambda: 1 in hub.members, 60)
        hub.generation = "of a new node 0"
        hub.members = {1: nodes.Member(b"a node that was faster", FACTS)}
    assert hub.wait().keys() == {1, 2}


def test_a_node_that_asked_for_any_number_waits_for_the_place_of_one_that_is_gone(
    make_hub: Callable[..., Hub], run: Callable[..., Running]
) -> None:
    hub = make_hub()
    with hub._changed:
        hub.members = {1: nodes.Member(b"killed, which is not known yet", FACTS)}
    running = run(hub, rank=-1)
    with hub._changed:
        assert hub._changed.wait_for(lambda: bool(hub._last_refusal), 60)
        assert "all 2 nodes of this replica have joined" in hub._last_refusal
        hub.members = {}
    assert hub.wait() == {1: FACTS}
    assert running.thread.is_alive()


def test_a_node_whose_place_is_taken_asks_once_a_beat(
    make_hub: Callable[..., Hub],
    run: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub, asked = make_hub(nnodes=3), list[int]()
    join = hub._join
    monkeypatch.setattr(hub, "_join", lambda *args: (asked.append(1), join(*args)))
    run(hub)
    with hub._changed:
        assert hub._changed.wait_for(lambda: 1 in hub.members, 60)
    monkeypatch.setattr(node_agent, "BEAT_S", 0.05)
    monkeypatch.setattr(node_agent, "RETRY_S", 0.2)
    assert "--node-rank 1 is taken by a" in str(run(hub).join())
    assert 3 <= len(asked) <= 10
    assert sum("refused a node" in record.getMessage() for record in caplog.records) == 1


def test_another_secret_is_told_on_both_ends(
    make_hub: Callable[..., Hub], run: Callable[..., Running]
) -> None:
    hub = make_hub()
    outcome = run(hub, secret="another secret of some length").join()
    told = "--cluster-secret-file holds another secret (the one here has fingerprint "
    assert f"{told}{fingerprint('another secret of some length')})" in str(outcome)
    hub.timeout_s = 2 * nodes.BEAT_S  # it counts once a beat
    with pytest.raises(ConfigError, match=re.escape(f"{told}{fingerprint(SECRET)})")):
        hub.wait()


def test_a_stranger_cannot_fill_the_memory_of_node_0(make_hub: Callable[..., Hub]) -> None:
    """A frame of the handshake that announces a gibibyte ends the connection at once."""
    host, port = make_hub().address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 5.0) as sock:
        sock.settimeout(3.0)
        mechanism = b"\3\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
        sock.sendall(b"\xff" + bytes(7) + b"\1\x7f" + mechanism)
        sock.sendall(b"\6" + (1 << 30).to_bytes(8, "big") + b"x")
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass


def test_a_port_in_use_and_addresses_that_are_none() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use; another"):
            Hub(f"127.0.0.1:{port}", SECRET, FACTS, 2)
    with pytest.raises(ConfigError, match="an address of node 0"):
        Hub("192.0.2.1:5000", SECRET, FACTS, 2)
    for bad in ("127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":5000"):
        with pytest.raises(ConfigError, match=r"10\.0\.0\.1:5000 has the form"):
            split_address(bad)
    with pytest.raises(ConfigError, match=r"no such host:1: .*; a name that is known"):
        split_address("no such host:1")
    assert local_address("127.0.0.1:5000") == "127.0.0.1"
    assert split_address("[::1]:5000") == ("::1", 5000)


def test_a_node_without_node_0_gives_up_and_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        agent = NodeAgent(address, SECRET, FACTS, 1, {}, timeout_s=0.0)
        with pytest.raises(ConfigError, match=f"{address}: no answer within 0 s; start node 0"):
            agent.run()


def test_another_program_at_the_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "BEAT_S", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        agent = NodeAgent(address, SECRET, FACTS, 1, {}, timeout_s=0.1)
        with pytest.raises(ConfigError, match=f"{address}: what listens there has not answered"):
            agent.run()


def test_messages_pass_between_rank_0_and_a_rank_and_an_orderly_end_is_no_loss(
    make_hub: Callable[..., Hub], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub()
    lost, pid = started(hub, run(hub))
    for data in [b"%d" % i * 100 for i in range(1000)]:
        hub.sockets[1].send(data)
        assert said(hub) == b"rank 1: " + data
    turns, receive = [0], hub._socket.receive

    def counted() -> Any:
        turns[0] += 1
        return receive()

    monkeypatch.setattr(hub._socket, "receive", counted)
    assert not select.select([hub.sockets[1]], [], [], 0.5)[0]
    assert turns[0] < 20, "the hub turns in circles"
    hub.sockets[1].send(b"read pieces")
    hub.tell(bytes(5_000_001))  # more than the socket of a process that does not read can hold
    assert said(hub) == b"rank 1: 5000001"
    for _ in range(2000):  # more than the times that the hub can be woken at once
        hub.tell(b"")
    assert [said(hub) for _ in range(2000)] == [b"rank 1: \0"] * 2000
    for _ in range(500):  # more answers than a socket holds, unread: the hub must not wait for us
        hub.tell(b"")
        assert hub.get("never set", 0.002) is None
    assert [said(hub) for _ in range(500)] == [b"rank 1: \0"] * 500
    descriptor = os.pidfd_open(pid)
    hub.sockets[1].send(b"stop")
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)
    hub.close()
    assert not lost.reasons


def test_ranks_meet_for_gloo_in_the_store_of_node_0(make_hub: Callable[..., Hub]) -> None:
    hub = make_hub()
    link = RemoteValues(hub.address, SECRET)
    sums: dict[int, torch.Tensor] = {}

    def reduce(rank: int, store: HubStore) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        group = dist.ProcessGroupGloo(store, rank, 2, options)
        sums[rank] = torch.full((3,), rank + 1.0)
        group.allreduce([sums[rank]]).wait()

    args = (1, HubStore(link, 60.0))
    other = threading.Thread(target=reduce, args=args, daemon=True)
    other.start()
    reduce(0, HubStore(hub, 60.0))
    other.join(60)
    assert sums[0].tolist() == sums[1].tolist() == [3.0] * 3
    HubStore(link, 60.0, "earlier").set("x", b"of a replica that is gone")
    assert HubStore(hub, 60.0, "earlier").get("x")
    for generation in ("", "later"):
        with pytest.raises(RankLost, match=r"no rank has set x within 0\.01 s"):
            HubStore(link, 0.01, generation).get("x")
    link.close()


def test_the_digest_tells_files_apart(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(5 << 20))
    (tmp_path / "config.json").write_text("{}")
    before = checkpoint_digest(tmp_path)
    (tmp_path / "README.md").write_text("not read")
    assert checkpoint_digest(tmp_path) == before
    with weights.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    after = checkpoint_digest(tmp_path)
    assert after != before
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({before, after, checkpoint_digest(tmp_path), checkpoint_digest(weights)}) == 4
    assert not difference(FACTS, FACTS)


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="is not set: nodes need a file"):
        read_secret(None)
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(path))
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16 characters; `openssl rand"):
        read_secret(str(path))
    path.write_text(f"{SECRET}\n")
    assert read_secret(str(path)) == SECRET


def test_an_adapter_that_node_0_was_sent_is_copied(
    make_hub: Callable[..., Hub], tmp_path: Path
) -> None:
    hub, large = make_hub(), os.urandom(5 << 20)  # more than one part
    values, theirs = RemoteValues(hub.address, SECRET), Spool({"r": 4}, large)
    folder, later = str(theirs.path), tmp_path / "later"
    later.mkdir()
    try:
        hub.offer([folder], folder)
        hub.offer([str(later)], "later")
        mine = fetch_adapter(values, folder)
        assert mine.path != theirs.path
        for name in (ADAPTER_CONFIG, ADAPTER_TENSORS):
            assert (mine.path / name).read_bytes() == (theirs.path / name).read_bytes()
        with pytest.raises(RankLost, match="node 0 has no adapter in"):
            fetch_adapter(values, str(later))
        theirs.delete()
        hub.offer([], "weights")
        assert list(hub._offered.folders) == ["later", "weights"], "the other one is gone"
    finally:
        values.close()


def test_only_offered_folders_are_sent(make_hub: Callable[..., Hub], tmp_path: Path) -> None:
    hub, secret = make_hub(), tmp_path / "secret"
    secret.mkdir()
    for folder in (tmp_path, secret):
        data = bytes(5 << 20) + b"end"  # more than one part
        save_file(
            {"a": torch.frombuffer(bytearray(data), dtype=torch.uint8)}, folder / "a.safetensors"
        )
    values = RemoteValues(hub.address, SECRET)
    try:
        fetched: list[TensorSpool] = []
        asks = threading.Thread(target=lambda: fetched.append(fetch(values, str(tmp_path))))
        asks.start()  # before or after the offer
        hub.offer([str(tmp_path)], "weights")
        asks.join(60)
        (file,) = fetched[0].path.glob("*.safetensors")
        assert file.read_bytes() == (tmp_path / "a.safetensors").read_bytes()
        for key in (FileKey(str(secret)), FileKey(str(tmp_path), "secret/a.safetensors")):
            assert hub._offered.read(key.text) is None
        with pytest.raises(RankLost, match="node 0 has not sent"):
            fetch(values, str(secret), 0.05)
    finally:
        values.close()
