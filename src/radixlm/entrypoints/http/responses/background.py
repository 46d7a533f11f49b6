"""What is stored of responses, and those that run in the background."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from radixlm.base.errors import InvalidRequest, NotFound, RadixError
from radixlm.entrypoints.http.responses.events import response_of_item
from radixlm.entrypoints.http.responses.schemas import ResponsesRequest
from radixlm.entrypoints.http.responses.store import MemoryStore, ResponseStore, Stored
from radixlm.entrypoints.http.responses.tool_loop import Turn, make_turn, previous_of, run
from radixlm.entrypoints.http.responses.toolbox import ToolServers
from radixlm.entrypoints.http.state import ServerState

log = logging.getLogger(__name__)
T = TypeVar("T")

FINAL = frozenset(("completed", "failed", "cancelled", "incomplete"))
MAX_ENDED = 256


class Responses:
    """The store, and the turns that nobody waits for."""

    def __init__(self, store: ResponseStore, servers: ToolServers | None = None) -> None:
        self.store = store
        self.servers = servers or ToolServers()
        self.running: dict[str, Turn] = {}
        self.ended: OrderedDict[str, Turn] = OrderedDict()  # whose events may be asked for again
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._last: set[asyncio.Task[None]] = set()

    async def make(self, state: ServerState, body: ResponsesRequest) -> Turn:
        """A checked request with its prompt."""
        if isinstance(body.input, list):
            items = [await self._item(item, place) for place, item in enumerate(body.input)]
            body = body.model_copy(update={"input": items})
        before = None
        if body.previous_response_id is not None:
            before = await self.get(body.previous_response_id)
        return await make_turn(state, body, self.servers, previous_of(body, before))

    async def _item(self, item: dict[str, Any], place: int) -> dict[str, Any]:
        """An input item; of a reference the stored item, NotFound where there is none."""
        if item.get("type") != "item_reference":
            return item
        item_id = str(item.get("id") or "")
        found = await self.get(response_of_item(item_id))
        output = found.response["output"] if found else []
        for one in output:
            if one.get("id") == item_id:
                return dict(one)
        raise NotFound(f"input[{place}].id: no item {item_id!r:.200}", f"input[{place}].id")

    # ---- the store ---------------------------------------------------------------------------

    async def _ask(self, work: Callable[..., T], *args: Any) -> T:
        """A store that has to wait for something does so in a thread."""
        if isinstance(self.store, MemoryStore):
            return work(*args)
        return await asyncio.to_thread(work, *args)

    async def keep(self, turn: Turn) -> None:
        """Store what there is of a response."""
        if turn.is_stored:
            await self._ask(self.store.put, turn.stored())

    def keep_later(self, turn: Turn) -> None:
        """As ``keep``, for callers that may not wait any more."""
        task = asyncio.ensure_future(self.keep(turn))
        self._last.add(task)
        task.add_done_callback(self._last.discard)

    async def get(self, response_id: str) -> Stored | None:
        """What is stored of a response."""
        return await self._ask(self.store.get, response_id)

    async def stored(self, response_id: str) -> Stored:
        """What is stored of a response; NotFound."""
        found = await self.get(response_id)
        if found is None:
            raise NotFound(f"no response {response_id!r:.200}", "response_id")
        return found

    async def find(self, response_id: str) -> dict[str, Any]:
        """A response, finished or not; NotFound."""
        turn = self.running.get(response_id)
        return turn.writer.response if turn else (await self.stored(response_id)).response

    async def delete(self, response_id: str) -> None:
        """Forget a response; one that runs is cancelled."""
        await self.find(response_id)
        await self.cancel(response_id)
        await self._ask(self.store.delete, response_id)
        self.ended.pop(response_id, None)

    def fail_unfinished(self) -> int:
        """What an earlier process left unfinished has failed; how many. Call once, at the start."""
        found = self.store.unfinished()
        for stored in found:
            error = {"code": "server_error", "message": "the server was restarted meanwhile"}
            stored.response.update(status="failed", error=error)
            self.store.put(stored)
        return len(found)

    # ---- the background ----------------------------------------------------------------------

    async def start(self, turn: Turn) -> None:
        """Run a response that nobody waits for."""
        await self.keep(turn)
        self.running[turn.id] = turn
        self.tasks[turn.id] = asyncio.create_task(self._run(turn))

    async def _run(self, turn: Turn) -> None:
        try:
            async with aclosing(run(turn)) as events:
                async for event in events:
                    turn.events.append(event)
                    turn.news.set()
        except RadixError as error:
            turn.events.append(turn.writer.fail(error))
        except asyncio.CancelledError:
            turn.writer.cancel()
        except Exception:
            log.exception("a response in the background failed")
            turn.events.append(turn.writer.fail(None))
        finally:
            await turn.toolbox.close()  # one that was cancelled before it began is open still
            try:
                await self.keep(turn)
            except RadixError as error:
                log.error("response %s is not stored: %s", turn.id, error)
            self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        self.running.pop(turn.id, None)
        self.tasks.pop(turn.id, None)
        self.ended[turn.id] = turn
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)
        turn.news.set()

    def watched(self, response_id: str) -> Turn | None:
        """A response of the background whose events are known."""
        return self.running.get(response_id) or self.ended.get(response_id)

    async def cancel(self, response_id: str) -> None:
        """End what runs; nothing where it has ended."""
        task = self.tasks.get(response_id)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return
        found = await self.find(response_id)
        if found["status"] not in FINAL:
            raise InvalidRequest(
                "this response runs in another process of this server: ask again", "response_id"
            )
