"""A registry that joins at once, and an API server of Kubernetes."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import orjson

from radixlm.router.answer import Answer, json_answer
from radixlm.router.app import Gateway
from radixlm.router.call import Call
from radixlm.router.launch import bind
from radixlm.router.metrics import RouterMetrics
from radixlm.router.options import Options
from radixlm.router.registry import Registry
from radixlm.router.worker import Worker

Pod = dict[str, Any]


class FakeRegistry:
    """The workers by url; ``news`` is set at each change."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.news = asyncio.Event()
        self.options = Options()

    def find(self, url: str) -> list[Worker]:
        return [self.workers[url]] if url in self.workers else []

    def add(self, worker: Worker) -> Worker:
        self.workers[worker.url] = worker
        self.news.set()
        return worker

    def remove(self, worker: Worker, why: str) -> None:
        del self.workers[worker.url]
        self.news.set()

    def changed(self, worker: Worker) -> None:
        self.news.set()

    revise: Any = Registry.revise

    async def until(self, *urls: str) -> None:
        """Wait until these are the workers."""
        async with asyncio.timeout(10):
            while set(self.workers) != set(urls):
                self.news.clear()
                await self.news.wait()


class FakeDrainer:
    """Drains end when ``ends`` is set."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.drained: list[Worker] = []
        self.cancelled: list[Worker] = []

    async def drain(self, worker: Worker, deadline_s: float, timeout_s: float, why: str) -> None:
        self.drained.append(worker)
        await self.ends.wait()

    def cancel(self, worker: Worker) -> None:
        self.cancelled.append(worker)


def gateway_of(registry: FakeRegistry, metrics: RouterMetrics | None = None) -> Any:
    """What a source needs of a gateway. ``tasks``: what was spawned."""
    made = SimpleNamespace(registry=registry, metrics=metrics or RouterMetrics())
    made.options, made.drainer, made.tasks = Options(), FakeDrainer(), []
    made.spawn = lambda work: made.tasks.append(asyncio.ensure_future(work))
    return made


class ApiServer:
    """Pods by name, their versions, and the watches that are open."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.version = 100
        self.asked: list[dict[str, str]] = []  # queries
        self.tokens: list[bytes | None] = []
        self.paths: list[str] = []
        self.watches: list[tuple[str, asyncio.Queue[bytes | None]]] = []
        self.status = 200
        self.is_expired = False
        self.gateway = Gateway(Options(prometheus_port=-1), parts=())
        for path in ("/api/v1/pods", "/api/v1/namespaces/{namespace}/pods"):
            self.gateway.routes.add("GET", path, self._pods, "open")

    async def start(self) -> str:
        sock = bind("127.0.0.1", 0)
        await self.gateway.start(sock)
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    async def stop(self) -> None:
        await asyncio.wait_for(self.gateway.stop(), 10)

    @staticmethod
    def _matches(pod: Pod, selector: str) -> bool:
        wanted = dict(pair.split("=") for pair in selector.split(",") if pair)
        return wanted.items() <= pod["metadata"]["labels"].items()

    async def _pods(self, call: Call) -> Answer:
        query = {name: values[0] for name, values in parse_qs(call.query).items()}
        self.asked.append(query)
        self.paths.append(call.path)
        self.tokens.append(call.header(b"authorization"))
        if self.status != 200:
            return json_answer({"message": "forbidden"}, self.status)
        if "watch" in query:
            queue: asyncio.Queue[bytes | None] = asyncio.Queue()
            if self.is_expired:
                self.is_expired = False
                gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
                queue.put_nowait(orjson.dumps(gone) + b"\n")
            self.watches.append((query["labelSelector"], queue))
            return Answer(200, self._events(queue))
        found = [p for p in self.pods.values() if self._matches(p, query["labelSelector"])]
        start = int(query.get("continue", "0"))
        meta: dict[str, Any] = {"resourceVersion": str(self.version)}
        if len(found) > start + 2:  # pages of two
            meta["continue"] = str(start + 2)
        return json_answer({"metadata": meta, "items": found[start : start + 2]})

    @staticmethod
    async def _events(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        while (data := await queue.get()) is not None:
            for place in range(0, len(data), 50):  # lines come in pieces
                yield data[place : place + 50]

    def set(self, kind: str, pod: Pod) -> None:
        """Change a pod and tell the watches."""
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            self.pods.pop(name, None)
        else:
            self.pods[name] = pod
        line = orjson.dumps({"type": kind, "object": pod}) + b"\n"
        for selector, queue in self.watches:
            if self._matches(pod, selector):
                queue.put_nowait(line)

    def end_watches(self) -> None:
        """End them, as the server does after a while."""
        for _, queue in self.watches:
            queue.put_nowait(None)
        self.watches.clear()


def pod(
    name: str,
    address: str | None = None,
    *,
    is_ready: bool = True,
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    is_ending: bool = False,
) -> Pod:
    meta: dict[str, Any] = {"name": name, "namespace": "prod", "uid": f"uid-{name}"}
    meta |= {"labels": labels or {"app": "worker"}, "annotations": annotations}
    if is_ending:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {"metadata": meta, "status": {"podIP": address, "phase": phase, "conditions": [ready]}}
