"""Source: what one kind of discovery has found, and the registry that is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from radixlm.base.errors import RequestError
from radixlm.router.registry import worker_of
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

log = logging.getLogger(__name__)

Fields = dict[str, Any]
"""Of POST /workers: url, worker_type, model_id, bootstrap_port, labels, priority, cost."""


class Source:
    """Adds workers that are found, drains and removes those that are found no more. A worker that
    was there before, by a flag or by another source, is left alone."""

    def __init__(self, name: str, gateway: Gateway) -> None:
        """``name``: label of the metrics."""
        self._name, self._gateway, self._registry = name, gateway, gateway.registry
        metrics = gateway.metrics
        self._told: dict[str, Fields] = {}  # of workers that it added, by url
        self._leaving: set[str] = set()  # of those that are drained
        self._registered = metrics.counter(
            "smg_discovery_registrations_total", "Workers found.", ("source", "result")
        )
        self._deregistered = metrics.counter(
            "smg_discovery_deregistrations_total", "Workers found no more.", ("source", "reason")
        )
        self._seconds = metrics.histogram(
            "smg_discovery_sync_duration_seconds", "Seconds of telling the registry.", ("source",)
        )
        metrics.gauge(
            "smg_discovery_workers_discovered", "Workers that discovery keeps.",
            lambda: {(name,): len(self._told)}, ("source",),
        )  # fmt: skip

    def sync(self, found: Mapping[str, Fields], reason: str = "not_found") -> None:
        """``found``: url -> fields, of all workers that there are."""
        began_s = time.monotonic()
        for url in self._told.keys() - found.keys():
            self._remove(url, reason)
        for url, fields in found.items():
            workers = self._registry.find(url)
            if not workers:
                self._add(url, fields)
                continue
            if url in self._leaving:  # it was found again
                self._leaving.discard(url)
                self._told[url] = {}
                self._gateway.drainer.cancel(workers[0])
            if url in self._told and self._told[url] != fields:
                self._change(workers, fields)
        self._seconds.observe(time.monotonic() - began_s, self._name)

    def _add(self, url: str, fields: Fields) -> None:
        try:
            self._registry.add(worker_of(fields | {"url": url}))
        except RequestError as error:
            self._registered.inc(self._name, "failed")
            log.error("%s discovery: %s", self._name, error)
            return
        self._registered.inc(self._name, "success")
        self._told[url] = fields

    def _change(self, workers: Sequence[Worker], fields: Fields) -> None:
        """What was told of a server is no longer so."""
        url = workers[0].url
        self._told[url] = fields
        try:
            made = worker_of(fields | {"url": url})
        except RequestError as error:
            log.error("%s discovery: %s", self._name, error)
            return
        for worker in workers:
            self._registry.revise(worker, made)

    def _remove(self, url: str, reason: str) -> None:
        self._told.pop(url, None)
        self._deregistered.inc(self._name, reason)
        workers = self._registry.find(url)
        why = f"{self._name} discovery: {reason}"
        if any(worker.num_inflight for worker in workers):
            self._leaving.add(url)
            self._gateway.spawn(self._drain(workers[0], why))
            return
        for worker in workers:
            self._registry.remove(worker, why)

    async def _drain(self, worker: Worker, why: str) -> None:
        """Let its requests end, or its streams go on elsewhere, and remove it."""
        options, url = self._gateway.options, worker.url
        await self._gateway.drainer.drain(
            worker, options.drain_deadline_secs, options.request_timeout_secs, why=why
        )
        if url in self._leaving:
            self._leaving.discard(url)
            for one in self._registry.find(url):
                self._registry.remove(one, why)
