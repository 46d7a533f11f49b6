"""One POST /v1/responses: the input that its worker needs, and what is kept of the answer."""

from __future__ import annotations

import logging
import re
from typing import Any

import orjson

from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.router.call import Call, Headers
from radixlm.router.history.history import FINAL, History, Item, packed, with_ids

log = logging.getLogger(__name__)

_WHOLE = re.compile(
    rb"response\.(created|queued|in_progress|completed|incomplete|failed|cancelled)\b"
)
_HEAD = 200  # bytes of an event in which its type stands
MAX_EVENT_BYTES = 64 << 20


class Turn:
    """The part of the history in one call. ``context``: the items before its input."""

    def __init__(self, history: History, call: Call) -> None:
        self._history, self._call = history, call
        fields = call.fields
        given = fields.get("conversation")
        self.conversation = given.get("id") if isinstance(given, dict) else given
        self.previous = fields.get("previous_response_id")
        self.is_stored = fields.get("store") is not False
        self.context: list[Item] = []
        self.own: list[Item] = []

    async def prepare(self) -> None:
        """Put the context into the call's body. A ``previous_response_id`` that is unknown here is
        left to the worker. InvalidRequest, NotFound."""
        call = self._call
        input_ = call.fields.get("input")
        if isinstance(input_, str):
            part = {"type": "input_text", "text": input_}
            input_ = [{"type": "message", "role": "user", "content": [part]}]
        if not isinstance(input_, list) or not all(isinstance(item, dict) for item in input_):
            return  # the worker says what is wrong with it
        if self.conversation is not None:
            await self._continue_conversation()
        elif isinstance(self.previous, str):
            kept = await self._history.response(self.previous, call)
            if kept is None:
                self.previous, self.is_stored = None, False
            else:
                output = [item for item in kept["response"].get("output") or () if item]
                self.context = kept["context"] + kept["input"] + output
        items = self._resolved(input_)
        self.own = with_ids(items)
        if self.context or self.conversation or items != input_:
            dropped = ("previous_response_id", "conversation", "input")
            body = {name: value for name, value in call.fields.items() if name not in dropped}
            call.replace_body(packed(body | {"input": self.context + items}))

    async def _continue_conversation(self) -> None:
        if self.previous is not None:
            raise InvalidRequest(
                "conversation and previous_response_id exclude each other: send one",
                "conversation",
            )
        if not isinstance(self.conversation, str):
            raise InvalidRequest("conversation must be an id, or an object with one",
                                 "conversation")  # fmt: skip
        await self._history.conversation(self.conversation, self._call)
        self.context = await self._history.items(self.conversation)

    def _resolved(self, items: list[Item]) -> list[Item]:
        """The items, references to known ones replaced."""
        if not any(item.get("type") == "item_reference" for item in items):
            return items
        known = {item.get("id"): item for item in self.context}
        return [
            known.get(item.get("id"), item) if item.get("type") == "item_reference" else item
            for item in items
        ]

    def shown(self, response: Item) -> Item:
        """A worker's response with what the gateway resolved."""
        if self.conversation:
            response["conversation"] = {"id": self.conversation}
        elif self.previous is not None:
            response["previous_response_id"] = self.previous
        return response

    @property
    def changes_answers(self) -> bool:
        """Whether ``shown`` changes anything."""
        return bool(self.conversation) or self.previous is not None

    async def keep(self, response: Item) -> None:
        """Store a response, and a conversation's new items once it is complete. The client gets
        its answer even if the store fails."""
        try:
            await self._keep(response)
        except RadixError as error:
            log.error("response %s is not stored: %s", response.get("id"), error)

    async def _keep(self, response: Item) -> None:
        if not isinstance(response.get("id"), str):
            return
        call = self._call
        worker = call.worker.name if call.worker is not None else ""
        if self.is_stored:
            await self._history.save(call, response, self.own, self.context, worker)
        if self.conversation and response.get("status") in ("completed", "incomplete"):
            output = with_ids([item for item in response.get("output") or () if item])
            await self._history.add_items(self.conversation, self.own + output)


class TurnClient:
    """Stands between the dispatch of a call and its client's stream, which it passes on. A whole
    answer, or a stream's last event, goes out after it is stored: the client may continue it."""

    def __init__(self, inner: Any, turn: Turn) -> None:
        """``inner``: the client's stream."""
        self._inner, self._turn = inner, turn
        self._head: tuple[int, Headers] | None = None  # of an answer that is held
        self._held = bytearray()
        self._rest = b""  # of a stream: an event that is not complete
        self._final: Item | None = None
        self.has_begun = self.has_ended = False
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, status: int, headers: Headers, *, length: int | None = None) -> None:
        """As the inner stream's. Streams of events begin at once; all else waits for its end."""
        self.has_begun, self.status = True, status
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status == 200 and kind.startswith(b"text/event-stream"):
            self._inner.begin(status, headers, length=None)
        else:
            self._head = status, [h for h in headers if h[0] != b"content-length"]

    def write(self, data: bytes) -> None:
        """As the inner stream's."""
        if self._head is not None or self._final is not None:
            self._held += data
            return
        if not self._rest and data.endswith(b"\n\n") and not _WHOLE.search(data):
            self._inner.write(data)  # as good as always
            return
        whole = self._rest + data
        gap = b"\n\n" if b"\r\n\r\n" not in whole else b"\r\n\r\n"  # some servers' line ends
        blocks, end, self._rest = whole.rpartition(gap)
        if len(self._rest) > MAX_EVENT_BYTES:
            self._inner.abort()
        out = [self._event(block) + gap for block in blocks.split(gap)] if end else []
        if self._final is not None:
            self._held += out.pop()
        if out:
            self._inner.write(b"".join(out))

    def _event(self, block: bytes) -> bytes:
        """An event as the client gets it. Only those with a whole response are parsed."""
        if not _WHOLE.search(block, 0, _HEAD):
            return block
        lines = block.splitlines()
        data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        try:
            event = orjson.loads(data)
            response = event["response"]
            status = response["status"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return block
        event["response"] = self._turn.shown(response)
        if status in FINAL:
            self._final = response
        if not self._turn.changes_answers:
            return block
        kept = [line for line in lines if not line.startswith(b"data:")]
        return b"\n".join([*kept, b"data: " + packed(event)])

    def end(self) -> None:
        """The answer is complete; ``finish`` sends what is held."""
        self.has_ended = True

    def answer(self, answer: Any) -> None:
        """An answer of the gateway itself, which is not kept."""
        self.has_begun = self.has_ended = True
        self.status = answer.status
        self._inner.answer(answer)

    async def finish(self) -> None:
        """Store the response and send the rest."""
        inner = self._inner
        if not self.has_ended or inner.has_ended:
            return
        held = bytes(self._held)
        if self._head is not None:
            status, headers = self._head
            if status == 200:
                held = await self._whole(held)
            inner.begin(status, headers, length=len(held))
        elif self._final is not None:
            await self._turn.keep(self._final)
        inner.write(held + self._rest)
        inner.end()

    async def _whole(self, body: bytes) -> bytes:
        try:
            response = orjson.loads(body)
        except orjson.JSONDecodeError:
            return body
        if not isinstance(response, dict) or response.get("object") != "response":
            return body
        response = self._turn.shown(response)
        await self._turn.keep(response)
        return packed(response) if self._turn.changes_answers else body


async def serve_turn(history: History, serve: Any, call: Call, client: Any) -> None:
    """Serve a POST /v1/responses. ``serve``: the dispatch, called with call and client."""
    turn = Turn(history, call)
    await turn.prepare()
    between = TurnClient(client, turn)
    await serve(call, between)
    await between.finish()
