"""Call: one request of a client as the gateway sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.prompt import Prompt
    from radixlm.router.traces import CallTrace

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in the order of arrival."""


class Call:
    """One request. The body's bytes are never written again: ``fields`` is for reading only, and
    what a worker needs besides is spliced in after the first brace."""

    __slots__ = (
        "_fields",
        "_named",
        "arrival_s",
        "body",
        "client",
        "first_s",
        "headers",
        "is_admin",
        "method",
        "num_events",
        "num_tries",
        "path",
        "path_args",
        "principal",
        "prompt",
        "query",
        "request_id",
        "tenant",
        "trace",
        "worker",
    )

    def __init__(
        self,
        method: str,
        path: str,
        query: str,
        headers: Headers,
        body: bytes,
        client: str = "",
        named: dict[bytes, bytes] | None = None,
    ) -> None:
        """``query``: without the question mark. ``client``: the address of the connection.
        ``named``: of the headers, where it is known."""
        self.method, self.path, self.query = method, path, query
        self.headers, self.body, self.client = headers, body, client
        self.arrival_s = time.monotonic()
        self.request_id = ""
        self.tenant = ""
        self.principal = ""  # who holds the key
        self.is_admin = False
        self.path_args: Mapping[str, str] = {}  # of the route's pattern
        self.worker: Worker | None = None  # the last one that it was sent to
        self.num_tries = 0
        self.trace: CallTrace | None = None  # with --enable-trace
        self.prompt: Prompt | None = None  # where the policy looks at tokens
        self.first_s = 0.0  # when the first event of its stream came (monotonic)
        self.num_events = 0  # of its stream
        self._fields: Mapping[str, Any] | None = None
        self._named = named

    @property
    def named(self) -> Mapping[bytes, bytes]:
        """Name in lower case -> the first value of each header."""
        if self._named is None:
            self._named = dict(reversed(self.headers))
        return self._named

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; ``name`` in lower case."""
        return self.named.get(name)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of a JSON body; empty where it is none."""
        if self._fields is None:
            try:
                parsed = orjson.loads(self.body) if self.body else {}
            except orjson.JSONDecodeError:
                parsed = {}
            self._fields = parsed if isinstance(parsed, dict) else {}
        return self._fields

    def replace_body(self, body: bytes) -> None:
        """Give it another body: for calls that the gateway itself changes."""
        self.body, self._fields = body, None

    @property
    def is_stream(self) -> bool:
        """Whether the client asks for server-sent events."""
        return self.fields.get("stream") is True

    @property
    def model(self) -> str | None:
        """The model that the body names."""
        model = self.fields.get("model")
        return model if isinstance(model, str) and model else None

    @property
    def text(self) -> str:
        """What the prompt says, for policies that compare texts: messages joined, no template."""
        fields = self.fields
        for key in ("text", "prompt", "input", "query"):
            value = fields.get(key)
            if isinstance(value, str):
                return value
            if isinstance(value, list) and value:
                return "".join(_texts(value))
        messages = fields.get("messages")
        return "".join(_texts(messages)) if isinstance(messages, list) else ""

    @property
    def num_prompt_tokens(self) -> int:
        """An estimate: token ids where the body has them, else a quarter of the characters."""
        for key in ("input_ids", "prompt", "input"):
            ids = self.fields.get(key)
            if isinstance(ids, list) and ids and isinstance(ids[0], int | list):
                return sum(len(one) if isinstance(one, list) else 1 for one in ids)
        return len(self.text) // 4 + 1

    @property
    def max_tokens(self) -> int:
        """Tokens of output that the body allows; 128 where it does not say."""
        fields = self.fields
        sampling = fields.get("sampling_params")
        places = (fields, sampling if isinstance(sampling, dict) else {})
        for place in places:
            for key in ("max_completion_tokens", "max_tokens", "max_new_tokens"):
                if isinstance(place.get(key), int):
                    return max(0, int(place[key]))  # below 0 it would give back more than was taken
        return 128

    def overridden(self, extra: Mapping[str, Any]) -> bytes:
        """The body with ``extra`` before its last brace, where it wins over the client's fields."""
        if not extra:
            return self.body
        head, brace, tail = self.body.rpartition(b"}")
        comma = b"," if head.rstrip()[-1:] != b"{" else b""
        return head + comma + orjson.dumps(extra)[1:-1] + brace + tail


def _texts(values: list[Any]) -> Iterator[str]:
    """All texts in a list of texts, messages or content parts."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            content = value.get("content", value.get("text"))
            if isinstance(content, str):
                yield content
            elif isinstance(content, list):
                yield from _texts(content)
