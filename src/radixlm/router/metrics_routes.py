"""Where metrics are read: --prometheus-port, GET /metrics, and GET /engine_metrics."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from radixlm.base.errors import ConfigError, TransferError
from radixlm.router.answer import Answer, Routes
from radixlm.router.call import Call
from radixlm.router.launch import bind
from radixlm.router.metrics import RouterMetrics
from radixlm.router.worker import Worker

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ASK_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?(\s.*)")


class _Workers:
    """The registry, which another part makes later."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._gateway.registry or ())


def attach(gateway: Any) -> None:
    """Make ``gateway.metrics`` and serve it. To be attached first: other parts report to it."""
    options = gateway.options
    backend = {True: "pd", False: "regular"}[options.pd_disaggregation]
    metrics = gateway.metrics = RouterMetrics(
        _Workers(gateway),
        calls=lambda: _calls(gateway.server),
        num_connections=lambda: len(gateway.server.connections),
        route_of=lambda path: path if path in gateway.data_routes else gateway.routes.shown(path),
        backend="external" if options.backend == "openai" else backend,
        duration_buckets=options.prometheus_duration_buckets,
    )
    gateway.observers.append(
        lambda call, client: metrics.http_ended(call, 499 if client.is_gone else client.status)
    )

    async def exposition(call: Call) -> Answer:
        return Answer(200, metrics.exposition(), CONTENT_TYPE)

    async def engine_metrics(call: Call) -> Answer:
        return await _engine_metrics(gateway)

    own = Routes()
    for routes in (gateway.routes, own):
        routes.add("GET", "/metrics", exposition, "open")
    gateway.routes.add("GET", "/engine_metrics", engine_metrics, "open")
    if options.prometheus_port >= 0:
        gateway.on_start.append(lambda: _open_port(gateway, own))


def _calls(server: Any) -> list[Call]:
    """The calls under way."""
    streams = (connection.stream for connection in server.connections)
    return [stream.call for stream in streams if stream is not None]


async def _open_port(gateway: Any, routes: Routes) -> None:
    """A second gateway on this machine finds the default port taken; it serves all the same."""
    options = gateway.options
    try:
        sock = bind(options.prometheus_host, options.prometheus_port, is_shared=options.reuse_port)
    except ConfigError as error:
        log.warning("--prometheus-port: metrics are at GET /metrics only (%s)", error.__cause__)
        return
    log.info("metrics on http://%s:%d/metrics", options.prometheus_host, sock.getsockname()[1])
    await gateway.open_port(sock, routes)


async def _engine_metrics(gateway: Any) -> Answer:
    """The workers' metrics in one text, each sample with its worker's address."""
    workers = {worker.url: worker for worker in gateway.registry}

    async def ask(worker: Worker) -> str | None:
        try:
            answer = await gateway.upstream.fetch(
                worker.url, "GET", "/metrics", timeout_s=ASK_TIMEOUT_S, api_key=worker.api_key
            )
        except TransferError:
            return None
        return answer.body.decode(errors="replace") if answer.status == 200 else None

    found = await asyncio.gather(*map(ask, workers.values()))
    texts = {url: text for url, text in zip(workers, found, strict=True) if text is not None}
    if not texts:
        why = "All backend requests failed" if workers else "No available workers"
        return Answer(500, why.encode(), "text/plain; charset=utf-8")
    return Answer(200, joined(texts).encode(), CONTENT_TYPE)


def joined(texts: Mapping[str, str]) -> str:
    """Expositions by worker as one. Each sample gets the label worker_addr; colons in names become
    underscores, as sglang-router writes them; a family is told once."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> HELP and TYPE, samples
    for url, text in texts.items():
        family: tuple[list[str], list[str]] = ([], [])
        label = 'worker_addr="' + url.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for line in text.splitlines():
            words = line.split(" ", 3)
            if words[:2] in (["#", "HELP"], ["#", "TYPE"]) and len(words) > 2:
                name = words[2].replace(":", "_")
                family = families.setdefault(name, ([], []))
                shown = " ".join([*words[:2], name, *words[3:]])
                if not any(known.startswith(f"# {words[1]} ") for known in family[0]):
                    family[0].append(shown)
            elif match := _SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                name = name.replace(":", "_")
                if not family[0]:
                    family = families.setdefault(name, ([], []))
                both = f"{label},{labels}" if labels else label
                family[1].append(f"{name}{{{both}}}{value}")
    lines = [line for heads, samples in families.values() for line in (*heads, *samples)]
    return "\n".join(lines) + "\n"
