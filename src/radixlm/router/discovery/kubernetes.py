"""Pods as workers: a list and a watch of the Kubernetes API, by plain HTTP.

Each selector has its own watch. A pod is a worker from when it is Running and Ready until it is
being deleted; readiness that is lost later is left to the gateway's health checks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from radixlm.base.errors import TransferError
from radixlm.base.record import Record
from radixlm.router.discovery.cluster import Cluster, find_cluster
from radixlm.router.discovery.source import Fields, Source

if TYPE_CHECKING:
    from radixlm.router.app import Gateway
    from radixlm.router.options import Options

log = logging.getLogger(__name__)

WATCH_S = 300  # after which the API server ends a watch
ASK_TIMEOUT_S = 30.0
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
MAX_LINE_BYTES = 16 << 20
PAGE = 500


class Group(Record):
    """Pods with all of ``selector``'s labels are workers of ``worker_type``."""

    selector: tuple[tuple[str, str], ...]
    worker_type: str = "regular"


class _Expired(Exception):
    """The watch is too old: list again."""


def groups_of(options: Options) -> list[Group]:
    """The groups of the options."""
    if not options.pd_disaggregation:
        return [Group(tuple(options.pairs("selector").items()))]
    kinds = (("prefill_selector", "prefill"), ("decode_selector", "decode"))
    pairs = ((options.pairs(name), kind) for name, kind in kinds)
    return [Group(tuple(labels.items()), kind) for labels, kind in pairs if labels]


def watch_pods(gateway: Gateway, source: Source) -> None:
    """Watch when the gateway starts. ConfigError: there is no cluster."""
    cluster = find_cluster()
    pods = Pods(gateway.options, cluster, source)

    def start() -> None:
        for group in groups_of(gateway.options):
            gateway.spawn(pods.run(group))

    gateway.on_start.append(start)
    gateway.on_stop.append(cluster.close)


class Pods:
    """All groups' pods. ``run`` watches for ever; ``source`` is told of each change."""

    def __init__(self, options: Options, cluster: Cluster, source: Source) -> None:
        self._options, self._cluster, self._source = options, cluster, source
        self._found: dict[tuple[Group, str], dict[str, Fields]] = {}  # by group and pod's uid

    async def run(self, group: Group) -> None:
        """List and watch one group."""
        wait_s, version = FIRST_WAIT_S, ""
        while True:
            began_s = time.monotonic()
            try:
                version = version or await self._list(group)
                wait_s = FIRST_WAIT_S
                version = await self._watch(group, version)
            except _Expired:
                version = ""
            except Exception as error:  # whatever it answers, discovery goes on
                log.warning("kubernetes discovery: %r; again in %g s", error, wait_s)
                await asyncio.sleep(wait_s)
                wait_s, version = min(2 * wait_s, MAX_WAIT_S), ""
            # a server that ends each watch at once is not asked without pause
            await asyncio.sleep(max(0.0, began_s + FIRST_WAIT_S - time.monotonic()))

    def _target(self, group: Group, **query: str) -> str:
        namespace = self._options.service_discovery_namespace
        place = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
        query = {"labelSelector": ",".join(f"{k}={v}" for k, v in group.selector)} | query
        text = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        return f"/api/v1{place}/pods?{text}"

    async def _list(self, group: Group) -> str:
        """Take over all pods of a group; the version to watch from."""
        pods: dict[tuple[Group, str], dict[str, Fields]] = {}
        more: dict[str, str] = {}
        while True:
            target = self._target(group, limit=str(PAGE), **more)
            answer = await self._cluster.get(target, ASK_TIMEOUT_S)
            if answer.status != 200:
                text = answer.body[:300].decode(errors="replace")
                raise TransferError(f"the API server answers {answer.status}: {text}")
            page = orjson.loads(answer.body)
            for pod in page.get("items") or ():
                pods[group, pod["metadata"]["uid"]] = self._workers(group, pod)
            if not (token := page["metadata"].get("continue")):
                break
            more = {"continue": token}
        others = {key: value for key, value in self._found.items() if key[0] != group}
        self._found = others | pods
        self._sync()
        return str(page["metadata"]["resourceVersion"])

    async def _watch(self, group: Group, version: str) -> str:
        """Follow a group's changes until the server ends the watch; the last version."""
        target = self._target(
            group, watch="true", resourceVersion=version, allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH_S),
        )  # fmt: skip
        async for line in self._cluster.lines(target, WATCH_S + ASK_TIMEOUT_S, MAX_LINE_BYTES):
            event = orjson.loads(line)
            if event["type"] == "ERROR":
                raise _Expired
            pod = event["object"]
            version = str(pod["metadata"]["resourceVersion"])
            if event["type"] == "BOOKMARK":
                continue
            key = group, pod["metadata"]["uid"]
            if event["type"] == "DELETED":
                self._found.pop(key, None)
            else:
                self._found[key] = self._workers(group, pod, self._found.get(key, {}))
            self._sync()
        return version

    def _sync(self) -> None:
        found: dict[str, Fields] = {}
        for workers in self._found.values():
            found |= workers
        self._source.sync(found, "pod_deleted")

    def _workers(
        self, group: Group, pod: Mapping[str, Any], before: dict[str, Fields] | None = None
    ) -> dict[str, Fields]:
        """url -> fields of a pod's workers; ``before``: as they were found last."""
        meta, status = pod["metadata"], pod.get("status") or {}
        address = status.get("podIP")
        phase = status.get("phase")
        if meta.get("deletionTimestamp") or not address or phase in ("Succeeded", "Failed"):
            return {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        if not before and (phase != "Running" or conditions.get("Ready") != "True"):
            return {}
        host = f"[{address}]" if ":" in address else address
        fields: Fields = {"worker_type": group.worker_type}
        fields["labels"] = {"pod": str(meta.get("name")), "namespace": str(meta.get("namespace"))}
        if model := self._model(meta):
            fields["model_id"] = model
        annotations = meta.get("annotations") or {}
        port = annotations.get(self._options.bootstrap_port_annotation)
        if group.worker_type == "prefill" and port and _is_port(port):
            fields["bootstrap_port"] = int(port)
        return {f"http://{host}:{port}": fields for port in self._ports(annotations)}

    def _ports(self, annotations: Mapping[str, str]) -> list[str]:
        """The ports of a pod's servers: of the annotation, else --service-discovery-port."""
        text = annotations.get(self._options.worker_ports_annotation) or ""
        ports = [port.strip() for port in text.split(",")]
        named = [port for port in ports if _is_port(port)]
        return named or [str(self._options.service_discovery_port)]

    def _model(self, meta: Mapping[str, Any]) -> str | None:
        """The model of --model-id-from."""
        where, _, key = (self._options.model_id_from or "").partition(":")
        if where == "namespace":
            return str(meta.get("namespace"))
        places = {"label": "labels", "annotation": "annotations"}
        found = (meta.get(places.get(where, "")) or {}).get(key)
        return str(found) if found else None


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536
