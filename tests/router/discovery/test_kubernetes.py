"""Discovery of pods, against an API server that lists, watches, ends and forgets."""

import asyncio
import base64
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixlm.base.errors import ConfigError
from radixlm.router.app import Gateway
from radixlm.router.discovery import kubernetes
from radixlm.router.discovery.attach import attach
from radixlm.router.discovery.cluster import Cluster, find_cluster
from radixlm.router.discovery.kubernetes import Pods, groups_of
from radixlm.router.discovery.source import Source
from radixlm.router.launch import bind
from radixlm.router.metrics import RouterMetrics
from radixlm.router.options import Options
from tests.router.certificates import write_certificates
from tests.router.client import until
from tests.router.discovery.fakes import ApiServer, FakeRegistry, gateway_of, pod

A, B, C = "http://10.0.0.1:80", "http://10.0.0.2:80", "http://10.0.0.3:80"


class Watch:
    """Discovery that runs against an API server."""

    def __init__(self) -> None:
        self.api, self.registry = ApiServer(), FakeRegistry()
        self.metrics = RouterMetrics()
        self.tasks: list[asyncio.Task[None]] = []
        self.cluster: Cluster | None = None

    async def start(self, **options: Any) -> None:
        chosen = Options(service_discovery=True, **({"selector": ("app=worker",)} | options))
        self.cluster = Cluster(await self.api.start(), token="secret")
        source = Source("kubernetes", gateway_of(self.registry, self.metrics))
        pods = Pods(chosen, self.cluster, source)
        self.tasks = [asyncio.ensure_future(pods.run(group)) for group in groups_of(chosen)]

    async def watching(self, num: int = 1) -> None:
        await until(lambda: len(self.api.watches) == num)


@pytest.fixture
async def watch(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    monkeypatch.setattr(kubernetes, "FIRST_WAIT_S", 0.01)
    made = Watch()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)
    if made.cluster is not None:
        made.cluster.close()
    await made.api.stop()


async def test_pods_come_change_and_go(watch: Watch) -> None:
    api, registry = watch.api, watch.registry
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")):
        api.pods[name] = pod(name, address)  # more than one page
    api.pods["other"] = pod("other", "10.0.0.9", labels={"app": "database"})
    await watch.start()
    await registry.until(A, B, C)
    await watch.watching()
    api.set("ADDED", pod("d", None, phase="Pending", is_ready=False))
    api.set("MODIFIED", pod("d", "10.0.0.4", is_ready=False))
    api.set("MODIFIED", pod("d", "10.0.0.4"))
    await registry.until(A, B, C, "http://10.0.0.4:80")
    api.set("MODIFIED", pod("a", "10.0.0.1", is_ready=False))  # health checks see to that
    api.set("MODIFIED", pod("b", "10.0.0.2", is_ending=True))
    api.set("MODIFIED", pod("c", "10.0.0.3", phase="Failed"))
    api.set("DELETED", pod("d", "10.0.0.4"))
    await registry.until(A)
    assert {query.get("labelSelector") for query in api.asked} == {"app=worker"}
    assert set(api.tokens) == {b"Bearer secret"} and set(api.paths) == {"/api/v1/pods"}
    text = watch.metrics.exposition().decode()
    labels = 'source="kubernetes"'
    assert f'smg_discovery_registrations_total{{result="success",{labels}}} 4.0' in text
    assert f'smg_discovery_deregistrations_total{{reason="pod_deleted",{labels}}} 3.0' in text
    assert f"smg_discovery_workers_discovered{{{labels}}} 1.0" in text


async def test_a_watch_goes_on_where_it_ended(watch: Watch) -> None:
    await watch.start(service_discovery_namespace="prod")
    await watch.watching()
    watch.api.set("ADDED", pod("a", "10.0.0.1"))
    await watch.registry.until(A)
    watch.api.set("BOOKMARK", pod("none"))
    bookmark = str(watch.api.version)
    watch.api.end_watches()
    await watch.watching()
    assert watch.api.asked[-1]["resourceVersion"] == bookmark
    watch.api.set("DELETED", pod("a", "10.0.0.1"))
    await watch.registry.until()
    assert set(watch.api.paths) == {"/api/v1/namespaces/prod/pods"}


async def test_an_expired_watch_lists_again(watch: Watch) -> None:
    watch.api.pods = {"a": pod("a", "10.0.0.1")}
    await watch.start()
    await watch.watching()
    watch.api.pods = {"b": pod("b", "10.0.0.2")}  # of which no watch tells
    watch.api.is_expired = True
    watch.api.end_watches()
    await watch.registry.until(B)


async def test_errors_of_the_server_are_retried_and_keep_the_workers(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.api.pods = {"a": pod("a", "10.0.0.1")}
    await watch.start()
    await watch.watching()
    watch.api.status = 403
    watch.api.end_watches()
    await until(lambda: "answers 403" in caplog.text)
    assert set(watch.registry.workers) == {A}
    watch.api.status = 200
    watch.api.pods["b"] = pod("b", "10.0.0.2")
    await watch.registry.until(A, B)


async def test_prefill_and_decode_have_selectors_of_their_own(watch: Watch) -> None:
    port = {"sglang.ai/bootstrap-port": "8998"}
    watch.api.pods = {
        "p": pod("p", "10.0.0.1", labels={"role": "prefill"}, annotations=port),
        "d": pod("d", "10.0.0.2", labels={"role": "decode"}, annotations=port),
        "x": pod("x", "10.0.0.3"),
    }
    await watch.start(
        pd_disaggregation=True, selector=(), prefill_selector=("role=prefill",),
        decode_selector=("role=decode",),
    )  # fmt: skip
    await watch.registry.until(A, B)
    workers = watch.registry.workers
    assert (workers[A].worker_type, workers[A].bootstrap_port) == ("prefill", 8998)
    assert (workers[B].worker_type, workers[B].bootstrap_port) == ("decode", None)
    await watch.watching(2)
    watch.api.set("DELETED", watch.api.pods["p"])
    await watch.registry.until(B)


async def test_ports_models_and_ipv6(watch: Watch) -> None:
    ports = {"smg.ai/worker-ports": "30000, 30001,nonsense", "model": "m"}
    watch.api.pods = {"a": pod("a", "fd00::1", annotations=ports)}
    await watch.start(model_id_from="annotation:model")
    await watch.registry.until("http://[fd00::1]:30000", "http://[fd00::1]:30001")
    workers = watch.registry.workers.values()
    assert {worker.model_id for worker in workers} == {"m"}
    assert all(worker.labels == {"pod": "a", "namespace": "prod"} for worker in workers)


async def test_workers_of_flags_stay(watch: Watch) -> None:
    from radixlm.router.worker import Worker

    watch.registry.add(Worker(A))
    watch.api.pods = {"a": pod("a", "10.0.0.1"), "b": pod("b", "10.0.0.2")}
    await watch.start()
    await watch.registry.until(A, B)
    await watch.watching()
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        watch.api.set("DELETED", pod(name, address))
    await watch.registry.until(A)


def test_the_cluster_of_a_pod(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    inside = {"KUBERNETES_SERVICE_HOST": "k"}
    with pytest.raises(ConfigError, match=r"--service-discovery: .*ca\.crt"):
        find_cluster(inside, tmp_path)
    write_certificates(tmp_path).rename(tmp_path / "ca.crt")
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    cluster = find_cluster(inside, tmp_path)
    assert cluster.url == "https://[fd00::1]:6443"
    assert cluster._headers()[0] == (b"authorization", b"Bearer one")
    (tmp_path / "token").write_text("two")  # tokens are renewed
    assert cluster._headers()[0] == (b"authorization", b"Bearer two")


def test_the_cluster_of_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    user: dict[str, Any] = {"token": "t"}
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://k:6443/"}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    cluster = find_cluster({"KUBECONFIG": str(path)}, tmp_path)
    assert cluster.url == "https://k:6443"
    assert cluster._headers()[0] == (b"authorization", b"Bearer t")
    user.clear()
    write_certificates(tmp_path, "me")
    for name, file in (("certificate", "me.pem"), ("key", "me.key")):
        text = (tmp_path / file).read_bytes()
        user[f"client-{name}-data"] = base64.b64encode(text).decode()
    path.write_text(yaml.safe_dump(config))
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert find_cluster({"KUBECONFIG": str(path)}, tmp_path)._upstream._context is not None
    user["client-key-data"] = base64.b64encode(b"none").decode()
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="PEM"):
        find_cluster({"KUBECONFIG": str(path)}, tmp_path)
    assert not list(temporary.iterdir()), "a gateway that is killed would leave its key"
    user["exec"] = {"command": "aws"}
    path.write_text(yaml.safe_dump(config))
    for text in (None, "- 1", "a: [", "current-context: x"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match="--service-discovery"):
            find_cluster({"KUBECONFIG": str(path)}, tmp_path)
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        find_cluster({"KUBECONFIG": str(tmp_path / "none")}, tmp_path)


async def test_the_part_watches_from_start_to_stop(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.api.pods = {"a": pod("a", "10.0.0.1")}
    watch.cluster = Cluster(await watch.api.start())
    monkeypatch.setattr(kubernetes, "find_cluster", lambda: watch.cluster)
    options = Options(service_discovery=True, selector=("app=worker",), prometheus_port=-1)
    gateway = Gateway(options, parts=())
    gateway.registry, gateway.metrics = watch.registry, watch.metrics
    attach(gateway)
    await gateway.start(bind("127.0.0.1", 0))
    await watch.registry.until(A)
    await asyncio.wait_for(gateway.stop(), 10)
    await until(lambda: not watch.api.gateway.server.num_active)


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"type": "ADDED", "object": {}}', b"null"])
async def test_odd_lines_of_a_watch_do_not_end_discovery(watch: Watch, line: bytes) -> None:
    await watch.start()
    await watch.watching()
    watch.api.watches[0][1].put_nowait(line + b"\n")
    watch.api.pods = {"b": pod("b", "10.0.0.2")}  # of which no watch tells
    await watch.registry.until(B)
