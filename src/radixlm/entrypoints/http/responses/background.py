"""Stored responses, and those that run in the background."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson

from radixlm.base.errors import InvalidRequest, NotFound, RadixError
from radixlm.base.thread_pool import FairThreadPool
from radixlm.entrypoints.client import run_in
from radixlm.entrypoints.http.responses.events import response_of_item
from radixlm.entrypoints.http.responses.schemas import (
    ResponsesRequest,
    conversation_of,
    messages_of,
)
from radixlm.entrypoints.http.responses.store import MemoryStore, ResponseStore, Stored
from radixlm.entrypoints.http.responses.tool_loop import (
    ResponseRun,
    make_run,
    previous_of,
    run_events,
)
from radixlm.entrypoints.http.responses.toolbox import ToolServers
from radixlm.entrypoints.http.state import ServerState
from radixlm.intake.identity import identity

log = logging.getLogger(__name__)
T = TypeVar("T")

FINAL = frozenset(("completed", "failed", "cancelled", "incomplete"))
MAX_ENDED = 256
_THREADS, _THREADS_OF_ONE = 8, (4,)  # of all clients, and of one
MAX_ENDED_BYTES = 64 << 20


class Responses:
    """The store of responses and the runs in the background."""

    def __init__(self, store: ResponseStore, servers: ToolServers | None = None) -> None:
        self.store = store
        self._threads = FairThreadPool("reads of stored responses", _THREADS, _THREADS_OF_ONE)
        self.servers = servers or ToolServers()
        self.running: dict[str, ResponseRun] = {}
        self.ended: OrderedDict[str, ResponseRun] = OrderedDict()  # their events can be read again
        self._ended_bytes: dict[str, int] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._saving: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()  # of conversations

    async def make(self, state: ServerState, body: ResponsesRequest) -> ResponseRun:
        """Check a request and render its prompt."""
        if isinstance(body.input, list):
            items = [await self._item(item, place) for place, item in enumerate(body.input)]
            body = body.model_copy(update={"input": items})
        before = None
        if conversation_id := conversation_of(body):
            items = (await self.conversation(conversation_id)).input_items
            before = Stored({}, [], messages_of(items))
            body = body.model_copy(update={"conversation": conversation_id})
        if body.previous_response_id is not None:
            before = await self.get(body.previous_response_id)
        return await make_run(state, body, self.servers, previous_of(body, before))

    async def _item(self, item: dict[str, Any], place: int) -> dict[str, Any]:
        """An input item, or the stored item that it refers to; NotFound if there is none."""
        if item.get("type") != "item_reference":
            return item
        item_id = str(item.get("id") or "")
        stored = await self.get(response_of_item(item_id))
        output = stored.response["output"] if stored else []
        for one in output:
            if one.get("id") == item_id:
                return dict(one)
        raise NotFound(f"input[{place}].id: no item {item_id!r:.200}", f"input[{place}].id")

    # ---- the store ---------------------------------------------------------------------------

    async def _ask(self, work: Callable[..., T], *args: Any) -> T:
        """Call a store; those that do I/O are called in a thread."""
        if isinstance(self.store, MemoryStore):
            return work(*args)
        return await run_in(self._threads, work, *args)

    async def put(self, stored: Stored) -> None:
        await self._ask(self.store.put, stored)

    async def save(self, run: ResponseRun) -> None:
        """Store a response in its current state; if it has ended well, its conversation too."""
        if not run.is_stored:
            return
        await self.put(run.stored())
        response, conversation_id = run.writer.response, run.body.conversation
        if conversation_id is not None and response["status"] in ("completed", "incomplete"):
            items = run.items + response["output"]
            with suppress(NotFound):  # it was deleted
                await self.change(str(conversation_id), lambda one: one.input_items.extend(items))

    def save_later(self, run: ResponseRun) -> None:
        """As ``save``, for callers that cannot wait."""
        task = asyncio.ensure_future(self.save(run))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def get(self, stored_id: str, kind: str = "response") -> Stored | None:
        """A stored response, or conversation, that the client may see, or None."""
        stored = await self._ask(self.store.get, stored_id)
        if stored is None or stored.response.get("object", kind) != kind:
            return None
        return stored if identity().may_see(stored.owner) else None

    async def conversation(self, conversation_id: str) -> Stored:
        """A conversation; NotFound."""
        stored = await self.get(conversation_id, "conversation")
        if stored is None:
            raise NotFound(f"no conversation {conversation_id!r:.200}", "conversation")
        return stored

    async def change(self, conversation_id: str, change: Callable[[Stored], Any]) -> Stored:
        """Change a conversation by ``change`` and store it; NotFound."""
        async with self._changing:
            stored = await self.conversation(conversation_id)
            change(stored)
            await self.put(stored)
        return stored

    async def stored(self, response_id: str) -> Stored:
        """A stored response; NotFound."""
        stored = await self.get(response_id)
        if stored is None:
            raise NotFound(f"Response with id '{response_id:.200}' not found.", "response_id")
        return stored

    async def find(self, response_id: str) -> dict[str, Any]:
        """A response that runs or is stored; NotFound."""
        run = self.run_of(response_id)
        return run.writer.response if run else (await self.stored(response_id)).response

    def run_of(self, response_id: str) -> ResponseRun | None:
        """A running response that the client may see, or None."""
        run = self.running.get(response_id)
        return run if run is not None and identity().may_see(run.owner) else None

    async def delete(self, response_id: str) -> None:
        """Delete a response; one that runs is cancelled."""
        await self.find(response_id)
        await self.cancel(response_id)
        await self.forget(response_id)
        self._drop_ended(response_id)

    async def forget(self, stored_id: str) -> None:
        """Delete a stored response or conversation."""
        await self._ask(self.store.delete, stored_id)

    def fail_unfinished(self) -> int:
        """Mark unfinished responses of processes that have ended as failed; how many. Call at
        start."""
        unfinished = self.store.unfinished()
        for stored in unfinished:
            error = {"code": "server_error", "message": "the server was restarted"}
            stored.response.update(status="failed", error=error)
            self.store.put(stored)
        return len(unfinished)

    # ---- the background ----------------------------------------------------------------------

    async def start(self, run: ResponseRun) -> None:
        await self.save(run)
        self.running[run.id] = run
        self.tasks[run.id] = asyncio.create_task(self._run(run))

    async def _run(self, run: ResponseRun) -> None:
        try:
            async with aclosing(run_events(run)) as events:
                async for event in events:
                    run.events.append(event)
                    run.news.set()
        except RadixError as error:
            run.events.append(run.writer.fail(error))
        except asyncio.CancelledError:
            run.writer.cancel()
        except Exception:
            log.exception("a response in the background failed")
            run.events.append(run.writer.fail(None))
        finally:
            await run.toolbox.close()  # still open if the run was cancelled before it began
            try:
                await self.save(run)
            except RadixError as error:
                log.error("response %s is not stored: %s", run.id, error)
            self._forget(run)

    def _forget(self, run: ResponseRun) -> None:
        self.running.pop(run.id, None)
        self.tasks.pop(run.id, None)
        size = len(orjson.dumps((run.events, run.items, run.messages)))
        self.ended[run.id] = run
        self._ended_bytes[run.id] = size
        while len(self.ended) > MAX_ENDED or sum(self._ended_bytes.values()) > MAX_ENDED_BYTES:
            self._drop_ended(next(iter(self.ended)))
        run.news.set()

    def _drop_ended(self, response_id: str) -> None:
        self.ended.pop(response_id, None)
        self._ended_bytes.pop(response_id, None)

    def watched(self, response_id: str) -> ResponseRun | None:
        """A response of the background whose events are in memory."""
        run = self.running.get(response_id) or self.ended.get(response_id)
        return run if run is not None and identity().may_see(run.owner) else None

    async def cancel(self, response_id: str) -> None:
        """Cancel a running response; nothing to do if it has ended."""
        task = self.tasks.get(response_id)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return
        response = await self.find(response_id)
        if response["status"] not in FINAL:
            raise InvalidRequest(
                "this response runs in another process of this server: ask again", "response_id"
            )
