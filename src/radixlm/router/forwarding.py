"""Which headers pass through the gateway: all but those of one connection (RFC 9110, 7.6.1)."""

from __future__ import annotations

import re

from radixlm.router.call import Call, Headers
from radixlm.router.worker import Worker

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade host content-length expect".split()
)
_MODEL = re.compile(
    rb'"model"\s*:\s*"([^"\\]{1,256})"|name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r]+)'
)
_STREAM = re.compile(rb'"stream"\s*:\s*true')


def seen_model(body: bytes) -> str:
    """The first model that the bytes of a body, JSON or a form, name; "unknown" if none. For
    labels: ``Call.model`` parses."""
    if b'"model"' not in body:
        return "unknown"
    match = _MODEL.search(body)
    return (match[1] or match[2]).decode("utf-8", "replace") if match else "unknown"


def is_stream(call: Call) -> bool:
    """Whether the bytes of the body ask for a stream. The content type of the answer decides."""
    body = call.body
    if call.path.startswith("/api/") and b'"stream"' not in body:
        return True  # Ollama's routes stream unless told not to
    return b'"stream"' in body and _STREAM.search(body) is not None


def to_worker(call: Call, added: Headers) -> Headers:
    """The headers of a call for a worker, the request's id among them; ``added`` win."""
    dropped = _dropped(call.headers)
    names = {name for name, _ in added}
    kept = [one for one in call.headers if one[0] not in dropped and one[0] not in names]
    if call.header(b"x-request-id") is None:
        kept.append((b"x-request-id", call.request_id.encode("latin-1", "replace")))
    return kept + added


def authorized(headers: Headers, worker: Worker) -> Headers:
    """``headers`` with the worker's own key, where it has one."""
    if worker.api_key is None:
        return headers
    kept = [one for one in headers if one[0] != b"authorization"]
    return [*kept, (b"authorization", b"Bearer " + worker.api_key.encode())]


def to_client(headers: Headers, added: Headers) -> Headers:
    """The headers of a worker's answer for the client, without those that the gateway adds."""
    dropped = _dropped(headers) | {name for name, _ in added}
    return [one for one in headers if one[0] not in dropped]


def _dropped(headers: Headers) -> frozenset[bytes]:
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            named = (part.strip().lower() for part in value.split(b","))
            return _HOP_BY_HOP | frozenset(named)
    return _HOP_BY_HOP
