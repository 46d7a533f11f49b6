"""Files and batches through the gateway: a file lives in one worker, which runs its batches and
has their answers. Nothing is kept here: all workers are asked who has an id, with the client's key.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

import orjson

from radixlm.base.errors import InvalidRequest, NotFound, Overloaded, TransferError
from radixlm.base.record import Record
from radixlm.router.answer import Answer, cut_page, json_answer
from radixlm.router.call import Call
from radixlm.router.forwarding import authorized, chunks, key_for, seen_model, shown, to_worker
from radixlm.router.history.history import ID
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

_ASK_S = 10.0
_KINDS = ("regular", "decode")  # workers that run batches
MAX_PAGES = 1000  # of one worker's list


class _Kind(Record):
    """A kind of objects. ``limit``, ``max_limit``: of its pages. ``after``: the query's name of the
    object that a page begins behind."""

    path: str
    name: str
    limit: int
    max_limit: int
    after: str = "after"


FILES = _Kind("/v1/files", "file", 10_000, 10_000)
BATCHES = _Kind("/v1/batches", "batch", 20, 100)
MESSAGES = _Kind("/v1/messages/batches", "batch", 20, 1000, "after_id")


def attach(gateway: Gateway) -> None:
    """Register the routes."""
    routes, add = StoredFiles(gateway), gateway.routes.add
    for kind in (FILES, BATCHES, MESSAGES):
        one = kind.path + "/{id}"
        add("GET", kind.path, routes.lister(kind), "key")
        add("GET", one, routes.pass_on, "key")
        if kind is not FILES:
            add("POST", one + "/cancel", routes.pass_on, "key")
        if kind is not BATCHES:
            add("DELETE", one, routes.pass_on, "key")
            add("POST", kind.path, routes.create, "key")
    add("POST", BATCHES.path, routes.create_batch, "key")
    add("GET", FILES.path + "/{id}/content", routes.pass_on, "key")
    add("GET", MESSAGES.path + "/{id}/results", routes.pass_on, "key")


class StoredFiles:
    """Handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    # ---- one worker ----------------------------------------------------------------------------

    async def create(self, call: Call) -> Answer:
        """Store a file, or a batch with its requests, at the worker with the least to do."""
        registry = self._gateway.registry
        model = seen_model(call.body) if registry.is_mixed else "unknown"
        named = None if model == "unknown" else model
        workers = [one for kind in _KINDS for one in registry.pool(named, kind)]
        for worker in sorted(workers, key=lambda one: (one.num_inflight, random.random())):
            try:
                return await self._pass(call, worker)
            except TransferError:
                continue
        raise Overloaded("no worker is available", retry_after_s=1)

    async def create_batch(self, call: Call) -> Answer:
        """Run a batch at the worker that has its file."""
        file_id = call.fields.get("input_file_id")
        if not isinstance(file_id, str):
            raise InvalidRequest("input_file_id must be the id of a file", "input_file_id")
        return await self._pass(call, await self._holder(call, FILES, file_id, "input_file_id"))

    async def pass_on(self, call: Call) -> Answer:
        """Ask the worker that has the object."""
        kind = next(one for one in (MESSAGES, BATCHES, FILES) if call.path.startswith(one.path))
        worker = await self._holder(call, kind, call.path_args["id"], f"{kind.name}_id")
        return await self._pass(call, worker)

    async def _holder(self, call: Call, kind: _Kind, name: str, param: str) -> Worker:
        """The worker that has an object; NotFound. Overloaded: one that may have it is silent."""
        if not ID.fullmatch(name) or name in (".", ".."):  # never another path of a worker
            raise NotFound(f"no {kind.name} {name!r:.100}", param)
        workers = self._workers()
        told = await asyncio.gather(*(self._ask(call, w, f"{kind.path}/{name}") for w in workers))
        for worker, (status, _) in zip(workers, told, strict=True):
            if status == 200:
                return worker
        refused = [status for status, _ in told if status in (0, 401, 403, 429) or status >= 500]
        if refused or not workers:
            message = f"no {kind.name} {name!r:.100} at the workers that answer: try again"
            raise Overloaded(message, retry_after_s=1)
        raise NotFound(f"no {kind.name} {name!r:.100}", param)

    async def _pass(self, call: Call, worker: Worker) -> Answer:
        """The answer of ``worker``; TransferError if none comes."""
        target = call.path + (f"?{call.query}" if call.query else "")
        gateway, headers = self._gateway, authorized(to_worker(call, []), worker)
        headers = [one for one in headers if one[0] != b"accept-encoding"]  # JSON is read here
        exchange = await gateway.upstream.open(
            worker.url, call.method, target, headers, call.body,
            timeout_s=gateway.options.request_timeout_secs,
        )  # fmt: skip
        kind, headers = shown(exchange.headers)
        if not kind.startswith("application/json"):
            return Answer(exchange.status, chunks(exchange), kind, headers)
        body = await exchange.read(1 << 26)
        if call.path.startswith(MESSAGES.path) and exchange.status == 200:
            return json_answer(self._with_url(call, orjson.loads(body)))
        return Answer(exchange.status, body, kind, headers)

    # ---- all workers ---------------------------------------------------------------------------

    def lister(self, kind: _Kind) -> Any:
        """The handler of a list: the objects of all workers, the newest first."""

        async def handler(call: Call) -> Answer:
            asked = {name: values[-1] for name, values in parse_qs(call.query).items()}
            passed = {"purpose": asked["purpose"]} if "purpose" in asked else {}
            lists = await asyncio.gather(
                *(self._all(call, w, kind, passed) for w in self._workers())
            )
            found = {one["id"]: self._with_url(call, one) for listed in lists for one in listed}
            records = sorted(found.values(), key=lambda one: one["id"])
            records.sort(key=lambda one: one["created_at"], reverse=True)
            return json_answer(_page(kind, records, asked))

        return handler

    async def _all(
        self, call: Call, worker: Worker, kind: _Kind, query: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """All objects of a worker; Overloaded if it does not answer, none if it keeps none."""
        found: list[dict[str, Any]] = []
        query = query | {"limit": kind.max_limit}
        for _ in range(MAX_PAGES):
            status, body = await self._ask(call, worker, f"{kind.path}?{urlencode(query)}")
            if status in (404, 405):
                return []
            if status != 200:
                raise Overloaded(f"{worker.url} does not tell its list", retry_after_s=1)
            listed = orjson.loads(body)
            found += listed["data"]
            if not listed.get("has_more"):
                break
            query[kind.after] = listed["last_id"]
        return found

    def _workers(self) -> list[Worker]:
        """The servers that may have files, ranks once."""
        able = [w for w in self._gateway.registry if w.is_available and w.worker_type in _KINDS]
        return list({worker.url: worker for worker in able}.values())

    async def _ask(self, call: Call, worker: Worker, target: str) -> tuple[int, bytes]:
        """Status and body of a GET; 0 if none came."""
        try:
            got = await self._gateway.upstream.fetch(
                worker.url, "GET", target, headers=key_for(call, worker), timeout_s=_ASK_S
            )
        except TransferError:
            return 0, b""
        return got.status, got.body

    def _with_url(self, call: Call, record: dict[str, Any]) -> dict[str, Any]:
        """A record whose results are at this gateway's address."""
        if record.get("results_url") is None:
            return record
        scheme = "https" if self._gateway.options.tls_cert_path else "http"
        scheme = (call.header(b"x-forwarded-proto") or scheme.encode()).decode("latin-1")
        host = (call.header(b"host") or b"").decode("latin-1")
        return record | {"results_url": f"{scheme}://{host}{MESSAGES.path}/{record['id']}/results"}


def _page(kind: _Kind, records: list[dict[str, Any]], asked: dict[str, str]) -> dict[str, Any]:
    """A page of ``records``, which are the newest first."""
    is_back = kind is MESSAGES and "before_id" in asked  # the same list from its other end
    after = "before_id" if is_back else kind.after
    if is_back or (kind is FILES and asked.get("order") == "asc"):
        records = records[::-1]
    data, has_more = cut_page(records, asked, after, kind.limit, kind.max_limit)
    data = data[::-1] if is_back else data
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    page = {"data": data, "has_more": has_more, "first_id": None, "last_id": None}
    return ({} if kind is MESSAGES else {"object": "list"}) | page | ends
