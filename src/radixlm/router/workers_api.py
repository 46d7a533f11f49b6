"""/workers, and the routes of before: /add_worker, /remove_worker, /list_workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote
from uuid import UUID

import orjson

from radixlm.base.errors import InvalidRequest
from radixlm.router.answer import Answer, json_answer
from radixlm.router.call import Call
from radixlm.router.registry import Registry, update, worker_of
from radixlm.router.worker import State, Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

_TOLD = (
    "model_path served_model_name tp_size dp_size load_balance_method disaggregation_mode "
    "model_type architectures version"
).split()


def attach(gateway: Gateway) -> None:
    """Register the routes."""
    api, add = Workers(gateway.registry), gateway.routes.add
    add("GET", "/workers", api.all)
    add("POST", "/workers", api.create)
    add("GET", "/workers/{id}", api.show)
    for method in ("PUT", "PATCH"):
        add(method, "/workers/{id}", api.change)
    add("DELETE", "/workers/{id}", api.delete)
    add("POST", "/add_worker", api.old_add)
    add("POST", "/remove_worker", api.old_remove)
    add("GET", "/list_workers", api.old_list)


def shown(worker: Worker, problem: str = "") -> dict[str, Any]:
    """A worker as JSON. ``job_status`` stands only while it joins."""
    told = {name: worker.facts[name] for name in _TOLD if worker.facts.get(name) not in (None, "")}
    metadata = {
        name: value if isinstance(value, str) else orjson.dumps(value).decode()
        for name, value in (told | worker.labels).items()
    }
    body: dict[str, Any] = {
        "id": worker.id,
        "url": worker.name,
        "model_id": worker.model_id or "unknown",
        "priority": worker.priority,
        "cost": worker.cost,
        "worker_type": worker.worker_type,
        "is_healthy": worker.is_available,
        "state": worker.state,
        "load": worker.num_inflight,
        "connection_mode": "HTTP",
        "metadata": metadata,
        "disable_health_check": worker.disable_health_check,
    }
    if worker.bootstrap_port is not None:
        body["bootstrap_port"] = worker.bootstrap_port
    if worker.state is State.JOINING:
        body["job_status"] = _job("processing", worker.url, problem or None)
    return body


def _job(status: str, url: str, message: str | None) -> dict[str, Any]:
    return {"job_type": "AddWorker", "worker_url": url, "status": status, "message": message}


def _error(status: int, message: str, code: str) -> Answer:
    return json_answer({"error": message, "code": code}, status)


def _accepted(worker: Worker, what: str, **more: str) -> Answer:
    body = {"status": "accepted", "worker_id": worker.id, **more}
    body["message"] = f"Worker {what} queued for background processing"
    location = more.get("location")
    headers = [(b"location", location.encode())] if location else []
    return json_answer(body, 202, headers)


class Workers:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def all(self, call: Call) -> Answer:
        """GET /workers, all or those of ?model=."""
        model = parse_qs(call.query).get("model", [""])[-1]
        workers = [one for one in self.registry if not model or model in one.names]
        types = ("prefill", "decode", "regular")
        stats = {f"{one}_count": sum(w.worker_type == one for w in workers) for one in types}
        described = [shown(one, self.registry.problem(one)) for one in workers]
        return json_answer({"workers": described, "total": len(workers), "stats": stats})

    async def create(self, call: Call) -> Answer:
        """POST /workers: 202; the worker joins when it answers. One that is there is changed."""
        try:
            given = worker_of(call.fields)
            worker = self.registry.add(given)
            if worker is not given:
                self._change(worker, call)
        except InvalidRequest as error:
            return _error(400, error.message, "BAD_REQUEST")
        location = f"/workers/{worker.id}"
        return _accepted(worker, "addition", url=worker.url, location=location)

    async def show(self, call: Call) -> Answer:
        """GET /workers/{id}."""
        found, refusal = self.find(call)
        if found:
            return json_answer(shown(found[0], self.registry.problem(found[0])))
        url, why = self.registry.failed.get(call.path_args["id"], ("", ""))
        if not url:
            return refusal
        failed = Worker(url)
        failed.id, failed.state = call.path_args["id"], State.GONE
        return json_answer(shown(failed) | {"job_status": _job("failed", url, why)})

    async def change(self, call: Call) -> Answer:
        """PUT and PATCH /workers/{id}: priority, cost, labels, api_key, disable_health_check."""
        found, refusal = self.find(call)
        try:
            for worker in found:
                self._change(worker, call)
        except InvalidRequest as error:
            return _error(400, error.message, "BAD_REQUEST")
        return _accepted(found[0], "update") if found else refusal

    def _change(self, worker: Worker, call: Call) -> None:
        told = call.fields.get("worker_type", worker.worker_type)
        if told != worker.worker_type:
            message = f"{worker.url} is a {worker.worker_type} worker: delete it first"
            raise InvalidRequest(message, "worker_type")
        update(worker, call.fields)
        self.registry.changed(worker)

    async def delete(self, call: Call) -> Answer:
        """DELETE /workers/{id}: streams go on to their end."""
        found, refusal = self.find(call)
        for worker in found:
            self.registry.remove(worker)
        return _accepted(found[0], "removal") if found else refusal

    async def old_add(self, call: Call) -> Answer:
        """POST /add_worker?url=: answers when the worker has joined, or will not."""
        fields = {name: values[-1] for name, values in parse_qs(call.query).items()}
        port = fields.get("bootstrap_port", "")
        if port.isdecimal() and len(port) < 6:
            fields |= {"bootstrap_port": int(port)}  # type: ignore[dict-item]
        worker = self.registry.add(worker_of(fields))
        while worker.state is State.JOINING:
            await asyncio.sleep(0.02)
        if worker.state is State.GONE:
            _, why = self.registry.failed.get(worker.id, ("", "it was removed"))
            return Answer(503, f"Failed to add worker {worker.url}: {why}".encode(), "text/plain")
        return Answer(200, f"Successfully added worker: {worker.url}".encode(), "text/plain")

    async def old_remove(self, call: Call) -> Answer:
        """POST /remove_worker?url=."""
        url = parse_qs(call.query).get("url", [""])[-1]
        found = self.registry.find(url)
        for worker in found:
            self.registry.remove(worker)
        if not found:
            return Answer(404, f"Worker {url[:200]} not found".encode(), "text/plain")
        return Answer(200, f"Successfully removed worker: {url}".encode(), "text/plain")

    async def old_list(self, call: Call) -> Answer:
        """GET /list_workers."""
        return json_answer({"urls": [worker.name for worker in self.registry]})

    def find(self, call: Call) -> tuple[list[Worker], Answer]:
        """The worker of an id, or of a url (all its ranks); an answer for where there is none."""
        name = unquote(call.path_args["id"])
        if "://" in name:
            return self.registry.find(name), _error(
                404, f"Worker {name} not found", "WORKER_NOT_FOUND"
            )
        try:
            UUID(name)
        except ValueError:
            return [], _error(
                400, f"Invalid worker_id {name[:80]!r} (expected UUID)", "BAD_REQUEST"
            )
        worker = self.registry.get(name)
        missing = _error(404, f"Worker {name} not found", "WORKER_NOT_FOUND")
        return ([worker] if worker else []), missing
