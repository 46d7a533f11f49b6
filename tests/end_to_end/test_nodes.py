"""A replica over two hosts, one a network namespace: the bits of one rank, deaths, a cut link."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from radixlm import Engine
from radixlm.weights_client import update_weights_from_tensor
from tests.end_to_end.server import RunningServer
from tests.fakes.network import network
from tests.fakes.perturbed import perturbed
from tests.fakes.tiny_checkpoint import cached_tiny

MODEL = str(cached_tiny("Qwen3ForCausalLM"))
SECRET = "correct horse battery staple\n"
NAME = f"rlm{os.getpid() % 100000}"
HOSTS = ("10.117.31.1", "10.117.31.2")
HAS_HOSTS = os.geteuid() == 0 and shutil.which("ip") is not None
pytestmark = pytest.mark.skipif(not HAS_HOSTS, reason="needs root, and ip for a namespace")


def body(seed: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.0}
    if seed % 2:
        sampling |= {"temperature": 0.9, "sampling_seed": seed, "frequency_penalty": 0.3}
    fields = {"return_logprob": True, "logprob_start_len": 0}
    ids = [(7 * seed + i * i) % 250 + 3 for i in range(20 + seed)]
    return {"input_ids": ids, "sampling_params": sampling, **fields}


BODIES = [body(seed) for seed in range(4)]


def shown(answer: dict[str, Any]) -> Any:
    meta = answer["meta_info"]
    kinds = ("input_token_logprobs", "output_token_logprobs")
    return answer["output_ids"], [meta[kind] for kind in kinds]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    """What one rank answers, with its log-probabilities."""
    with Engine(model_path=MODEL, cpu_threads=1, max_total_tokens=4096) as engine:
        return [shown(engine.generate(**one)) for one in BODIES]


def ip(*args: str) -> None:
    with network(changes=True):
        subprocess.run(["ip", *args], check=True)


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    """The name of the link to another host."""
    mine, theirs = f"{NAME}a", f"{NAME}b"
    try:
        ip("netns", "add", NAME)
        ip("link", "add", mine, "type", "veth", "peer", "name", theirs, "netns", NAME)
    except subprocess.CalledProcessError:
        pytest.skip("namespaces are not allowed here")
    try:
        ip("addr", "add", f"{HOSTS[0]}/24", "dev", mine)
        ip("link", "set", mine, "addrgenmode", "none")  # else an address of IPv6 comes later
        ip("link", "set", mine, "up")
        ip("-n", NAME, "link", "set", "lo", "up")
        for command in (f"addr add {HOSTS[1]}/24 dev {theirs}", f"link set {theirs} up"):
            ip("-n", NAME, *command.split())
        yield mine
    finally:
        ip("netns", "del", NAME)  # takes the link with it


class Node:
    """The agent of the other host."""

    def __init__(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "radixlm", "serve", "--port", "0", "--model-path", MODEL]
        command += ["--cpu-threads", "1"]
        inside = ["ip", "netns", "exec", NAME, *command, *flags, "--node-rank", "1"]
        self.process = subprocess.Popen(inside, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self, signum: int = signal.SIGKILL) -> int:
        self.process.send_signal(signum)
        return self.ended()

    def ended(self) -> int:
        """The exit status; the whole log is there."""
        code = self.process.wait(60)
        self._reader.join(60)
        assert not self._reader.is_alive(), "a rank has outlived its agent"
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


class Cluster:
    """Node 0 as a server, and node 1, which may be replaced."""

    def __init__(self, folder: Path) -> None:
        secret = folder / "secret"
        secret.write_text(SECRET)
        with socket.socket() as free:
            free.bind((HOSTS[0], 0))
            self.port = free.getsockname()[1]
        self.flags = (
            f"--tp-size 2 --nnodes 2 --dist-init-addr {HOSTS[0]}:{self.port} --rank-timeout-s 5 "
            f"--cluster-secret-file {secret} --max-total-tokens 4096 --max-engine-restarts 100 "
            "--dist-timeout 60 --warm-restart"
        ).split()
        self.node = Node(self.flags)
        try:
            self.server = RunningServer(*self.flags, model=MODEL)
        except AssertionError as error:
            self.node.end()
            raise AssertionError(f"{error}\nnode 1:\n{''.join(self.node.log)}") from error


@pytest.fixture(scope="module")
def cluster(link: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    with made.server as server:
        yield made
        left = [*server.engines(), *made.node.ranks()]
        assert server.terminate() == 0
        assert made.node.ended() == 0, "".join(made.node.log)
        assert not psutil.wait_procs(left, 10)[1], "a rank has outlived its replica"


async def ask(server: RunningServer, bodies: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:
        answers = await asyncio.gather(*(client.post("/generate", json=one) for one in bodies))
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    return [shown(answer.json()) for answer in answers]


def found(server: RunningServer) -> list[int]:
    """How many cached tokens each replica has found again (--warm-restart)."""
    return [int(n) for n in re.findall(r"(\d+) cached tokens were found", "".join(server.log))]


async def running(server: RunningServer) -> asyncio.Task[list[Any]]:
    """Slow streams of all bodies, under way."""
    server.wait_ready()
    server.post("/slow_down", forward_sleep_time=0.1)
    answers = asyncio.create_task(ask(server, BODIES))
    await server.until_running(len(BODIES))
    return answers


async def test_two_hosts_give_the_bits_of_one(cluster: Cluster, wanted: list[Any]) -> None:
    assert len(cluster.server.engines()) == len(cluster.node.ranks()) == 1
    assert [(await ask(cluster.server, [one]))[0] for one in BODIES] == wanted
    assert await ask(cluster.server, BODIES) == wanted  # prefix hits and a batch


@pytest.mark.parametrize("victim", ["rank 0", "agent"])
async def test_streams_outlive_any_death(cluster: Cluster, wanted: list[Any], victim: str) -> None:
    """The death of rank 1 comes behind an update of the weights, below."""
    answers = await running(cluster.server)
    old = [*cluster.server.engines(), *cluster.node.ranks()]
    cached = found(cluster.server)
    if victim == "agent":
        cluster.node.end()
        cluster.node = Node(cluster.flags)
    else:
        old[0].kill()
    assert await answers == wanted
    assert not psutil.wait_procs(old, 10)[1], "a rank has outlived its replica"
    now_cached = found(cluster.server)[len(cached) :]
    assert not now_cached if victim == "agent" else min(now_cached) > 0, "an agent's memory is lost"


async def test_streams_outlive_a_link_that_is_cut(
    cluster: Cluster, wanted: list[Any], link: str
) -> None:
    answers = await running(cluster.server)
    (rank,) = cluster.node.ranks()
    await asyncio.to_thread(ip, "link", "set", link, "down")
    # neither end serves alone
    assert not psutil.wait_procs([rank], 60)[1] and not answers.done()
    await asyncio.to_thread(ip, "link", "set", link, "up")
    assert await answers == wanted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, to shape a link")
async def test_a_slow_link_that_drops_packets_changes_no_token(
    cluster: Cluster, wanted: list[Any], link: str
) -> None:
    """2 Mbit/s each way; what does not fit into 6 KB of queue is lost, and sent again by TCP."""
    queue = "root tbf rate 2mbit burst 3kb limit 6kb".split()
    ends = ["tc", "qdisc"], ["ip", "netns", "exec", NAME, "tc", "qdisc"]
    names = link, f"{NAME}b"
    cluster.server.wait_ready()
    for end, name in zip(ends, names, strict=True):
        subprocess.run([*end, "add", "dev", name, *queue], check=True)
    try:
        assert await ask(cluster.server, BODIES) == wanted
        answers = await running(cluster.server)
        (rank,) = cluster.node.ranks()
        rank.kill()
        assert await answers == wanted
        shown = subprocess.run(["tc", "-s", "qdisc", "show", "dev", link], capture_output=True)
        assert "dropped 0," not in shown.stdout.decode()
    finally:
        for end, name in zip(ends, names, strict=True):
            subprocess.run([*end, "del", "dev", name, "root"], check=True)


async def test_tensors_reach_all_hosts_and_outlive_a_death(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = perturbed(Path(MODEL), tmp_path / "other")
    with Engine(model_path=str(other), cpu_threads=1, max_total_tokens=4096) as engine:
        wanted = [shown(engine.generate(**one)) for one in BODIES]
    server = cluster.server
    server.wait_ready()
    tensors = [item for file in other.glob("*.safetensors") for item in load_file(file).items()]
    for part in (tensors[::2], tensors[1::2]):  # the second update keeps the first one's tensors
        assert update_weights_from_tensor(server.url, part)["success"]
    assert await ask(server, BODIES) == wanted
    answers = await running(server)
    old = [*server.engines(), *cluster.node.ranks()]
    old[1].kill()
    assert await answers == wanted
    assert not psutil.wait_procs(old, 10)[1], "a rank has outlived its replica"
