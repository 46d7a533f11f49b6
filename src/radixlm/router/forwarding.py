"""Which headers pass through the gateway: all but those of one connection (RFC 9110, 7.6.1); and
how the answers of workers to routes of the gateway pass."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from typing import Any

from radixlm.router.call import Call, Headers
from radixlm.router.worker import Worker

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade host content-length expect".split()
)
_OF_BODY = frozenset((b"content-length", b"content-type", b"transfer-encoding", b"connection"))
_NONE: AbstractSet[bytes] = frozenset()
_PLAIN = (b"close", b"keep-alive", b"Keep-Alive")  # a Connection header that names no other
_OWN = _HOP_BY_HOP | {b"x-request-id"}
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')
_MODEL_OF_FORM = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r]{1,256})')
_DRAWN = re.compile(r"(?:chatcmpl|cmpl|gnt|resp|req)-([0-9a-f]{24})")
_STREAM = re.compile(rb'"stream"\s*:\s*true')


def named_model(call: Call) -> str | None:
    """The model that a body names: a field of its JSON, or of a form."""
    if call.body.lstrip()[:1] == b"{":
        return call.model
    model = seen_model(call.body)
    return None if model == "unknown" else model


def seen_model(body: bytes) -> str:
    """The first model that the bytes of a body, JSON or a form, name; "unknown" if none. For
    labels: ``Call.model`` parses."""
    at = body.find(b'"model"')  # faster than a search of the pattern
    if at < 0:
        return "unknown"
    match = _MODEL.search(body, at) or _MODEL_OF_FORM.search(body, max(at - 5, 0))
    return match[1].decode("utf-8", "replace") if match else "unknown"


def is_stream(call: Call) -> bool:
    """Whether the bytes of the body ask for a stream. The content type of the answer decides."""
    at = call.body.find(b'"stream"')
    if at < 0:
        return call.path.startswith("/api/")  # Ollama's routes stream unless told not to
    return _STREAM.search(call.body, at) is not None


def to_worker(call: Call, added: Headers) -> Headers:
    """The headers of a call for a worker, the request's id among them; ``added`` win."""
    named, headers = call.named, call.headers
    is_plain = named.get(b"connection", b"close") in _PLAIN and len(named) == len(headers)
    dropped = _HOP_BY_HOP if is_plain and not added else _dropped(headers, added)
    kept = [one for one in headers if one[0] not in dropped]
    if b"x-request-id" not in named or b"x-request-id" in dropped:
        # a worker puts the prefix of its route before it: "chatcmpl-" would stand twice
        drawn = _DRAWN.fullmatch(call.request_id)
        name = drawn[1] if drawn else call.request_id
        kept.append((b"x-request-id", name.encode("latin-1", "replace")))
    return kept + added if added else kept


def authorized(headers: Headers, worker: Worker) -> Headers:
    """``headers`` with the worker's own key in place of the client's, where it has one."""
    if worker.api_key is None:
        return headers
    kept = [one for one in headers if one[0] not in (b"authorization", b"x-api-key")]
    return [*kept, (b"authorization", b"Bearer " + worker.api_key.encode())]


def to_client(headers: Headers, added: Headers) -> Headers:
    """The headers of a worker's answer for the client, without those that the gateway adds."""
    dropped = _dropped(headers, added)
    return [one for one in headers if one[0] not in dropped]


def _dropped(headers: Headers, added: Headers) -> AbstractSet[bytes]:
    named: AbstractSet[bytes] = _NONE
    base = _OWN if len(added) == 1 and added[0][0] == b"x-request-id" else _HOP_BY_HOP
    if added and base is _HOP_BY_HOP:
        named = {name for name, _ in added}
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            named = named | {part.strip().lower() for part in value.split(b",")}
    return base | named if named else base


def key_for(call: Call, worker: Worker) -> Headers:
    """The key for a worker: its own, else the client's."""
    if worker.api_key is not None:
        return [(b"authorization", f"Bearer {worker.api_key}".encode())]
    return [one for one in call.headers if one[0] in (b"authorization", b"x-api-key")]


def shown(headers: Headers) -> tuple[str, Headers]:
    """The content type and the other headers of a worker's answer."""
    kind = next((v.decode("latin-1") for n, v in headers if n == b"content-type"), "")
    return kind, [header for header in headers if header[0] not in _OF_BODY]


async def chunks(exchange: Any) -> AsyncIterator[bytes]:
    """The body of an exchange as it comes, no faster than it is read."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def take(data: bytes) -> None:
        queue.put_nowait(data)
        exchange.pause()

    exchange.start(take)

    def over(task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            task.exception()  # raised below, unless the client has left
        queue.put_nowait(None)

    ended = asyncio.ensure_future(exchange.wait())
    ended.add_done_callback(over)
    try:
        while (data := await queue.get()) is not None:
            yield data
            if queue.empty():
                exchange.resume()
        await ended
    finally:
        exchange.close()
        ended.cancel()
