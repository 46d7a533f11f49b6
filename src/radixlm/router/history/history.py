"""What the gateway keeps of responses and conversations, above a store."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson

from radixlm.base.errors import InvalidRequest, NotFound
from radixlm.router.call import Call
from radixlm.router.history.stores import Store
from radixlm.router.metrics import RouterMetrics

T = TypeVar("T")
Item = dict[str, Any]

FINAL = frozenset(("completed", "failed", "cancelled", "incomplete"))
MAX_ITEMS = 20  # of one request, as OpenAI has it
MAX_METADATA = 16
ID = re.compile(r"[\w.-]{1,128}")  # what databases take as a key
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
}


class History:
    """Responses and conversations. Each belongs to the key that made it: others do not see it."""

    def __init__(self, store: Store, metrics: RouterMetrics, num_threads: int = 16) -> None:
        """``num_threads``: calls of the store at the same time, where it does I/O."""
        self.store = store
        self._threads = ThreadPoolExecutor(num_threads, "history")
        self._operations = metrics.counter(
            "smg_db_operations_total", "Operations of the history's store.",
            ("storage_type", "operation", "result"),
        )  # fmt: skip
        self._seconds = metrics.histogram(
            "smg_db_operation_duration_seconds", "Seconds of such an operation.",
            ("storage_type", "operation"),
        )  # fmt: skip

    async def _ask(self, work: Callable[..., T], kind: str, *args: Any) -> T:
        """Call the store: at once if it is in memory, else in a thread."""
        storage = "conversation_item" if ":" in kind else kind
        began_s, result = time.monotonic(), "error"
        try:
            if self.store.is_local:
                found = work(kind, *args)
            else:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._threads, work, kind, *args)
            result = "success" if found is not False else "not_found"
            return found
        finally:
            self._operations.inc(storage, work.__name__, result)
            self._seconds.observe(time.monotonic() - began_s, storage, work.__name__)

    async def _find(self, kind: str, key: str, call: Call) -> dict[str, Any] | None:
        """A response or a conversation that the client may see."""
        if not ID.fullmatch(key):
            return None
        data = await self._ask(self.store.get, kind, key)
        found = orjson.loads(data) if data is not None else None
        return found if found is not None and found["owner"] == call.principal else None

    # ---- responses -----------------------------------------------------------------------------

    async def save(
        self, call: Call, response: Item, own: list[Item], context: list[Item], worker: str
    ) -> None:
        """Keep a response, the items of its input, those before them, and its worker's name."""
        kept = {"owner": call.principal, "response": response, "input": own, "worker": worker}
        kept["context"] = context
        await self._ask(self.store.put, "response", response["id"], packed(kept))

    async def update(self, kept: dict[str, Any]) -> None:
        """Keep a response that has changed."""
        await self._ask(self.store.put, "response", kept["response"]["id"], packed(kept))

    async def response(self, response_id: str, call: Call) -> dict[str, Any] | None:
        """What ``save`` kept: owner, response, input, context, worker; None if unknown."""
        return await self._find("response", response_id, call)

    async def delete_response(self, response_id: str) -> None:
        """Delete it; the responses that continue it keep their context."""
        await self._ask(self.store.delete, "response", response_id)

    # ---- conversations -------------------------------------------------------------------------

    async def create(self, call: Call) -> Item:
        """POST /v1/conversations {metadata, items}."""
        items = _items(call.fields.get("items") or [])
        conversation_id = f"conv_{secrets.token_hex(24)}"
        shown: Item = {"id": conversation_id, "object": "conversation"}
        shown |= {"created_at": int(time.time()), "metadata": _metadata({}, call.fields)}
        kept = {"owner": call.principal, "shown": shown}
        await self._ask(self.store.put, "conversation", conversation_id, packed(kept))
        await self.add_items(conversation_id, items)
        return shown

    async def conversation(self, conversation_id: str, call: Call) -> Item:
        """A conversation; NotFound."""
        kept = await self._find("conversation", conversation_id, call)
        if kept is None:
            raise NotFound(f"no conversation {conversation_id!r:.100}", "conversation_id")
        shown: Item = kept["shown"]
        return shown

    async def update_conversation(self, conversation_id: str, call: Call) -> Item:
        """Merge metadata into it; null removes a key."""
        shown = await self.conversation(conversation_id, call)
        shown["metadata"] = _metadata(shown["metadata"] or {}, call.fields)
        kept = {"owner": call.principal, "shown": shown}
        await self._ask(self.store.put, "conversation", conversation_id, packed(kept))
        return shown

    async def delete_conversation(self, conversation_id: str, call: Call) -> Item:
        """Delete it with its items."""
        await self.conversation(conversation_id, call)
        await self._ask(self.store.drop, f"items:{conversation_id}")
        await self._ask(self.store.delete, "conversation", conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    async def items(self, conversation_id: str) -> list[Item]:
        """All its items, the oldest first."""
        found = await self._ask(self.store.items, f"items:{conversation_id}")
        return [orjson.loads(data) for data in found]

    async def add_items(self, conversation_id: str, items: list[Item]) -> None:
        """Append items, which have ids."""
        for item in items:
            data = packed(item)
            await self._ask(self.store.put, f"items:{conversation_id}", item["id"], data)

    async def add_new_items(self, conversation_id: str, call: Call) -> list[Item]:
        """POST /v1/conversations/{id}/items {items}."""
        await self.conversation(conversation_id, call)
        items = _items(call.fields.get("items"))
        known = {item["id"]: item for item in await self.items(conversation_id)}
        for place, item in enumerate(items):
            if item.get("type") == "item_reference":
                raise InvalidRequest(f"items[{place}]: send the item itself", "items")
            if item["id"] in known:
                error = InvalidRequest(f"items[{place}]: {item['id']!r:.100} is there", "items")
                error.code = "item_already_in_conversation"
                raise error
        await self.add_items(conversation_id, items)
        return items

    async def item(self, conversation_id: str, item_id: str, call: Call) -> Item:
        """One item; NotFound."""
        await self.conversation(conversation_id, call)
        data = None
        if ID.fullmatch(item_id):
            data = await self._ask(self.store.get, f"items:{conversation_id}", item_id)
        if data is None:
            raise NotFound(f"no item {item_id!r:.100} in this conversation", "item_id")
        found: Item = orjson.loads(data)
        return found

    async def delete_item(self, conversation_id: str, item_id: str, call: Call) -> Item:
        """Remove one item; the conversation."""
        await self.item(conversation_id, item_id, call)
        await self._ask(self.store.delete, f"items:{conversation_id}", item_id)
        return await self.conversation(conversation_id, call)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()


def packed(value: Any) -> bytes:
    """JSON, with levels to spare for what an answer puts around it; InvalidRequest for what orjson
    reads and cannot write."""
    try:
        return orjson.dumps([[[[[[[[value]]]]]]]])[8:-8]
    except orjson.JSONEncodeError as error:
        raise InvalidRequest("nested too deeply: 200 levels work") from error


def with_ids(items: list[Any]) -> list[Item]:
    """Items as they are shown: with an id and a type each, and content as a list of parts.
    InvalidRequest for what is no item."""
    made = []
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidRequest(f"items[{place}] must be an object", "items")
        kind = str(item.get("type") or "message")
        drawn = f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}"
        given = item.get("id")
        has_id = isinstance(given, str) and ID.fullmatch(given)
        named = item if has_id else item | {"id": drawn}
        content = named.get("content")
        if isinstance(content, str) and kind == "message":
            part = "output_text" if named.get("role") == "assistant" else "input_text"
            named = named | {"content": [{"type": part, "text": content}]}
        made.append({"type": kind} | named)
    return made


def _items(items: Any) -> list[Item]:
    if not isinstance(items, list):
        raise InvalidRequest("items must be a list of items", "items")
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"items: at most {MAX_ITEMS} in one request", "items")
    made = with_ids(items)
    for place, item in enumerate(items):
        if item.get("id") not in (None, made[place]["id"]):
            raise InvalidRequest(
                f"items[{place}].id: up to 128 letters, digits, _, - and . work", "items"
            )
    return made


def _metadata(before: Mapping[str, Any], fields: Mapping[str, Any]) -> Item | None:
    """The metadata after a request's patch; None where there is none."""
    patch = fields.get("metadata")
    if patch is None:
        return dict(before) or None
    if not isinstance(patch, dict):
        raise InvalidRequest("metadata must be an object", "metadata")
    merged = {name: value for name, value in (dict(before) | patch).items() if value is not None}
    if len(merged) > MAX_METADATA:
        raise InvalidRequest(f"metadata: at most {MAX_METADATA} keys", "metadata")
    return merged or None
