"""The routes of stored responses and of conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import orjson

from radixlm.base.errors import InvalidRequest, NotFound, TransferError
from radixlm.router.answer import Answer, cut_page, error_answer, json_answer
from radixlm.router.call import Call
from radixlm.router.forwarding import chunks, key_for, shown
from radixlm.router.history.history import FINAL, ID, History, Item, with_ids
from radixlm.router.history.stores import open_store
from radixlm.router.history.turn import serve_turn
from radixlm.router.worker import Worker

ASK_TIMEOUT_S = 30.0


def attach(gateway: Any) -> None:
    """Serve the routes; with --history-backend none those of responses go to the workers."""
    store = open_store(gateway.options)
    routes = HistoryRoutes(gateway, None)
    if store is not None:
        sizes = {"redis": gateway.options.redis_pool_max, "oracle": gateway.options.oracle_pool_max}
        num_threads = sizes.get(gateway.options.history_backend, gateway.options.postgres_pool_max)
        history = History(store, gateway.metrics, num_threads)
        gateway.history = routes.history = history
        gateway.data_wrappers["/v1/responses"] = lambda serve, call, client: serve_turn(
            history, partial(serve, gateway), call, client
        )
        gateway.on_stop.append(history.close)
        routes.add_conversations()
    routes.add_responses()


class HistoryRoutes:
    """Handlers. ``history`` None: nothing is kept here."""

    def __init__(self, gateway: Any, history: History | None) -> None:
        self._gateway, self.history = gateway, history

    # ---- responses -----------------------------------------------------------------------------

    def add_responses(self) -> None:
        """Register the routes of responses."""
        add, path = self._gateway.routes.add, "/v1/responses/{response_id}"
        add("GET", path, self.get, "key")
        add("DELETE", path, self.delete, "key")
        add("POST", path + "/cancel", self.cancel, "key")
        add("GET", path + "/input_items", self.input_items, "key")

    async def _kept(self, call: Call) -> dict[str, Any] | None:
        """The response that a call names, asked of its worker while it is not final."""
        if self.history is None:
            return None
        kept = await self.history.response(call.path_args["response_id"], call)
        if kept is None or kept["response"].get("status") in FINAL:
            return kept
        path = f"/v1/responses/{kept['response']['id']}"
        answer = await self._ask(self._named(kept["worker"]), "GET", path, call)
        if answer is not None and answer.status == 200:
            await self._refresh(kept, _told(answer.body))
        elif self._named(kept["worker"]) is None or (answer is not None and answer.status == 404):
            message = "the worker that computed this response is gone"
            failed = {"status": "failed", "error": {"code": "server_error", "message": message}}
            await self._refresh(kept, kept["response"] | failed)
        return kept

    async def _refresh(self, kept: dict[str, Any], response: Item) -> None:
        """Take over what has become of a response of the background."""
        assert self.history is not None
        before = kept["response"]
        if response.get("id") != before["id"]:
            return  # the worker tells of something else
        resolved = {n: before[n] for n in ("conversation", "previous_response_id") if n in before}
        kept["response"] = response | resolved
        if response.get("status") not in FINAL:
            return
        await self.history.update(kept)
        conversation = before.get("conversation")
        if conversation and response["status"] in ("completed", "incomplete"):
            output = with_ids(response.get("output") or [])
            await self.history.add_items(conversation["id"], kept["input"] + output)

    async def get(self, call: Call) -> Answer:
        """A response. With ?stream=true, and where it is not kept here, its worker answers."""
        kept = await self._kept(call)
        if kept is None or "stream=true" in call.query:
            worker = self._named(kept["worker"]) if kept else None
            return await self._forward(call, worker)
        return json_answer(kept["response"])

    async def delete(self, call: Call) -> Answer:
        """Delete it here and at its worker."""
        kept, name = await self._kept(call), call.path_args["response_id"]
        if kept is None or self.history is None:
            return await self._forward(call, None)
        await self._ask(self._named(kept["worker"]), "DELETE", call.path, call)
        await self.history.delete_response(name)
        return json_answer({"id": name, "object": "response", "deleted": True})

    async def cancel(self, call: Call) -> Answer:
        """Cancel a response of the background."""
        kept = await self._kept(call)
        if kept is None or self.history is None:
            return await self._forward(call, None)
        if not kept["response"].get("background"):
            raise InvalidRequest("Cannot cancel a synchronous response.",
                                 "response_id")  # fmt: skip
        if kept["response"]["status"] not in FINAL:
            answer = await self._forward(call, self._named(kept["worker"]))
            if answer.status != 200 or not isinstance(answer.body, bytes):
                return answer
            await self._refresh(kept, _told(answer.body))
        return json_answer(kept["response"])

    async def input_items(self, call: Call) -> Answer:
        """The items of its input."""
        kept = await self._kept(call)
        if kept is None:
            return await self._forward(call, None)
        return json_answer(_page(kept["input"], call.query, 20))

    # ---- workers -------------------------------------------------------------------------------

    def _named(self, name: str) -> Worker | None:
        return next((w for w in self._gateway.registry if w.name == name), None)

    async def _ask(self, worker: Worker | None, method: str, target: str, call: Call) -> Any:
        """A worker's answer, None if it has none."""
        if worker is None:
            return None
        try:
            return await self._gateway.upstream.fetch(
                worker.url, method, target, headers=key_for(call, worker), timeout_s=ASK_TIMEOUT_S
            )
        except TransferError:
            return None

    async def _forward(self, call: Call, worker: Worker | None) -> Answer:
        """The answer of ``worker``, else the first of any worker that is no 404."""
        name = call.path_args["response_id"]
        if not ID.fullmatch(name) or name in (".", ".."):  # never another path of the worker
            raise NotFound(f"Response with id '{name:.100}' not found.", "response_id")
        workers = [worker] if worker else [w for w in self._gateway.registry if w.is_available]
        target = call.path + (f"?{call.query}" if call.query else "")
        if "stream=true" in call.query:
            return await self._forward_stream(call, workers, target)
        for one in workers:
            answer = await self._ask(one, call.method, target, call)
            if answer is not None and answer.status not in (404, 405):
                return Answer(answer.status, answer.body, *shown(answer.headers))
        raise NotFound(f"Response with id '{name:.100}' not found.", "response_id")

    async def _forward_stream(self, call: Call, workers: list[Worker], target: str) -> Answer:
        for one in workers:
            try:
                exchange = await self._gateway.upstream.open(
                    one.url, "GET", target, key_for(call, one),
                    timeout_s=self._gateway.options.request_timeout_secs,
                )  # fmt: skip
            except TransferError:
                continue
            if exchange.status not in (404, 405):
                return Answer(exchange.status, chunks(exchange), *shown(exchange.headers))
            exchange.close()
        return error_answer(404, "no worker has the events of this response", "not_found")

    # ---- conversations -------------------------------------------------------------------------

    def add_conversations(self) -> None:
        """Register the routes of conversations."""
        assert self.history is not None
        history, add = self.history, self._gateway.routes.add
        one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"

        def serve(method: str, path: str, work: Callable[..., Awaitable[Any]], *names: str) -> None:
            async def handler(call: Call) -> Answer:
                if not call.fields and call.body.strip() not in (b"", b"{}"):
                    raise InvalidRequest("the body must be a JSON object")
                return json_answer(await work(*(call.path_args[name] for name in names), call))

            add(method, path, handler, "key")

        async def list_items(conversation_id: str, call: Call) -> Item:
            await history.conversation(conversation_id, call)
            return _page(await history.items(conversation_id), call.query, 100)

        async def add_items(conversation_id: str, call: Call) -> Item:
            made = await history.add_new_items(conversation_id, call)
            return _listed(made, False)

        serve("POST", "/v1/conversations", history.create)
        serve("GET", one, history.conversation, "id")
        serve("POST", one, history.update_conversation, "id")
        serve("DELETE", one, history.delete_conversation, "id")
        serve("GET", items, list_items, "id")
        serve("POST", items, add_items, "id")
        serve("GET", items + "/{item}", history.item, "id", "item")
        serve("DELETE", items + "/{item}", history.delete_item, "id", "item")


def _told(body: bytes) -> Item:
    """The response that a worker's answer holds; empty where it holds none."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _page(items: list[Item], query: str, limit: int) -> Item:
    """A page of ``items`` by the query's limit, order (desc unless asc) and after."""
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    if asked.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    found = items if asked.get("order") == "asc" else items[::-1]
    return _listed(*cut_page(found, asked, "after", limit, 100))


def _listed(items: list[Item], has_more: bool) -> Item:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    blank: Item = {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, "has_more": has_more} | blank | ends
