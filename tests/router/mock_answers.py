"""The answers of a mock worker, and every way to fail at them."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from tests.router.mock_worker import Connection

Headers = list[tuple[bytes, bytes]]


@dataclass
class Faults:
    """How to answer the data routes. One request changes them for itself by a header ``x-mock``
    with JSON, another process for all by ``POST /mock``."""

    latency_s: float = 0.0
    gap_s: float = 0.0  # between events of a stream; 0: as fast as the socket takes them
    num_events: int = 2  # where the body has no max_tokens
    always_stream: bool = False
    status: int = 200
    retry_after: str = ""
    fail_first: int = 0  # so many requests get a 500
    fail_rate: float = 0.0
    hang: bool = False  # read the request, never answer
    crash: bool = False  # die at the next request
    cut_after: int = -1  # close after so many bytes of the answer, head included
    cut_first: int = -1  # cut only so many answers
    reset: bool = False  # cut by RST, not by FIN
    stall_after: int = -1  # say no more after so many bytes, but stay connected
    bytes_per_s: float = 0.0  # dribble one byte at a time
    html: bool = False  # 200 with a page of HTML
    is_deaf: bool = False  # accept connections and never read
    drop_kept: bool = False  # close a kept connection at its second request, without a byte
    until_close: bool = False  # neither length nor chunks: the end of the connection ends the body
    pad: int = 0  # so many bytes more in each answer or event
    raw: str = ""  # answer exactly this (latin-1)
    health_status: int = 200
    holds_ready: bool = False  # GET /ready?wait_s= waits for `MockWorker.leaving`
    health_fail_after_s: float = 0.0
    is_foreign: bool = False  # streams as of SGLang and vLLM, without a journal
    echo: bool = True  # put the request's JSON into the answer
    max_payload: int = 1 << 30
    api_key: str = ""


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    headers: Headers
    body: bytes
    connection: int

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; ``name`` in lower case."""
        return next((value for key, value in self.headers if key == name), None)


def head_of(status: int, *headers: tuple[str, str]) -> bytes:
    """The bytes of an answer's head."""
    lines = [f"HTTP/1.1 {status} Mock", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


BARE = Faults(echo=False)
_BODY = (
    b'{"id":"cmpl-1","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":4,"completion_tokens":1,"total_tokens":5}}'
)
BARE_ANSWER = (
    head_of(200, ("content-type", "application/json"), ("content-length", str(len(_BODY)))) + _BODY
)


class Exchange:
    """One answer of a data route."""

    def __init__(self, connection: Connection, seen: Seen, faults: Faults) -> None:
        self.connection, self.seen, self.faults = connection, seen, faults
        self.worker = connection.worker
        self.num_sent = 0
        self.is_chunked = False

    async def run(self) -> None:
        self.worker.num_inflight += 1
        try:
            await self.answer()
        except ConnectionAbortedError:
            pass
        finally:
            self.worker.num_inflight -= 1

    def status(self) -> int:
        """The status that the faults ask for."""
        shared = self.worker.faults
        key = self.seen.header(b"authorization")
        if self.faults.api_key and key != b"Bearer " + self.faults.api_key.encode():
            return 401
        if len(self.seen.body) > self.faults.max_payload:
            return 413
        if shared.fail_first > 0:
            shared.fail_first -= 1
            return 500
        if self.faults.fail_rate and random.random() < self.faults.fail_rate:
            return 500
        return self.faults.status

    async def answer(self) -> None:
        faults = self.faults
        if faults.crash and self.worker.dies_with_process:
            os._exit(1)
        if faults.crash:
            return await self.worker.kill()
        if faults.hang:
            await asyncio.Event().wait()
        if faults.latency_s:
            await asyncio.sleep(faults.latency_s)
        if (status := self.status()) != 200:
            return await self.plain({"error": f"mock failure {status}"}, status)
        if faults.raw:
            await self.put(faults.raw.encode("latin-1"))
            return await self.end()
        if faults.html:
            return await self.plain("<html><body>not a worker</body></html>", 200, "text/html")
        try:
            request = orjson.loads(self.seen.body) if self.seen.body else {}
        except orjson.JSONDecodeError:
            request = {}
        request = request if isinstance(request, dict) else {"value": request}
        if faults.always_stream or request.get("stream") is True:
            return await self.stream(request)
        return await self.plain(self.value(request), 200)

    def value(self, request: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a whole answer."""
        number = self.worker.num_requests
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
        value: dict[str, Any] = {"worker_id": self.worker.worker_id}
        if self.seen.target.startswith("/generate"):
            meta: dict[str, Any] = {"id": f"gnt-{number}", "finish_reason": {"type": "stop"}}
            if request.get("return_logprob"):
                meta["input_token_logprobs"] = [[-0.5, 1, None]]
                meta["output_token_logprobs"] = [[-0.25, 2, None]]
            value |= {"text": "ok", "meta_info": meta | usage | {"cached_tokens": 0}}
        elif self.seen.target.startswith("/v1/embeddings"):
            vector = {"object": "embedding", "index": 0, "embedding": [0.5]}
            value |= {"object": "list", "data": [vector], "model": "mock", "usage": usage}
        else:
            message = {"role": "assistant", "content": "ok"}
            choice = {"index": 0, "text": "ok", "message": message, "finish_reason": "stop"}
            value |= {"id": f"cmpl-{number}", "created": 1, "model": "mock", "usage": usage}
            value |= {"object": "chat.completion", "choices": [choice]}
        if self.faults.pad:
            value["pad"] = "x" * self.faults.pad
        return value | {"echo": request} if self.faults.echo else value

    async def plain(self, value: Any, status: int, kind: str = "application/json") -> None:
        """An answer that is no stream."""
        body = value.encode() if isinstance(value, str) else orjson.dumps(value)
        await self.put(self.head(status, kind, len(body)) + body)
        await self.end()

    def head(self, status: int, kind: str, length: int | None) -> bytes:
        """Head with a length, chunks, or neither where the end of the connection is the end."""
        headers = [("content-type", kind), ("x-worker-id", self.worker.worker_id)]
        if self.faults.retry_after:
            headers.append(("retry-after", self.faults.retry_after))
        if self.faults.until_close:
            headers.append(("connection", "close"))
        elif length is not None:
            headers.append(("content-length", str(length)))
        else:
            self.is_chunked = True
            headers.append(("transfer-encoding", "chunked"))
        return head_of(status, *headers)

    async def stream(self, request: dict[str, Any]) -> None:
        """Events ``t0 ``, ``t1 `` ..., then [DONE]; each its own write."""
        await self.put(self.head(200, "text/event-stream", None))
        if self.faults.is_foreign:
            for block in foreign_blocks(self.seen.target, request, self.worker.port):
                await self.block(block)
            await self.done()
            return
        resume = request.get("resume") or {}
        records = [orjson.loads(base64.b64decode(one)) for one in resume.get("journal", [])]
        self.worker.num_resumed += bool(resume)
        number = records[0]["number"] if records else self.worker.num_requests
        has_journal = self.seen.header(b"x-radixlm-journal") is not None
        count = request.get("max_tokens") or request.get("max_completion_tokens")
        sampling = request.get("sampling_params") or {}
        count = count or sampling.get("max_new_tokens") or self.faults.num_events
        for index in range(count + 1):
            block = b"data: [DONE]\n\n" if index == count else self.event(index, number, request)
            if index < resume.get("num_events", 0):
                continue
            if has_journal and index >= len(records):
                record = base64.b64encode(orjson.dumps({"number": number, "index": index}))
                block = b": j " + record + b"\n" + block
            await self.block(block, is_last=index == count)
        await self.done()

    async def block(self, block: bytes, *, is_last: bool = False) -> None:
        """One event of a stream."""
        await self.put(b"%x\r\n%b\r\n" % (len(block), block) if self.is_chunked else block)
        await asyncio.sleep(0 if is_last else self.faults.gap_s)

    async def done(self) -> None:
        """A stream is complete."""
        if self.is_chunked:
            await self.put(b"0\r\n\r\n")
        await self.end()

    def event(self, index: int, number: int, request: dict[str, Any]) -> bytes:
        """Block ``index`` of a stream, the same from every worker but for ``worker_id``."""
        text = f"t{index} "
        event: dict[str, Any] = {"id": f"cmpl-{number}", "created": 1, "model": "mock"}
        if self.seen.target.startswith("/generate"):
            event = {"text": "".join(f"t{i} " for i in range(index + 1))}
            event["meta_info"] = {"id": f"gnt-{number}", "finish_reason": None}
        elif self.seen.target.startswith("/v1/completions"):
            event["choices"] = [{"index": 0, "text": text, "finish_reason": None}]
        else:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            event |= {"object": "chat.completion.chunk", "choices": [choice]}
        if request.get("resume") is None and self.faults.echo:
            event["worker_id"] = self.worker.worker_id
        if self.faults.pad:
            event["pad"] = "x" * self.faults.pad
        return b"data: " + orjson.dumps(event) + b"\n\n"

    async def put(self, data: bytes) -> None:
        """Write, as far as the faults let; wait while the client does not read."""
        connection, faults = self.connection, self.faults
        shared = self.worker.faults
        is_cut = faults.cut_after >= 0 and shared.cut_first != 0
        limit = faults.cut_after if is_cut else faults.stall_after
        if limit >= 0 and self.num_sent + len(data) >= limit:
            connection.transport.write(data[: limit - self.num_sent])
            if not is_cut:
                await asyncio.Event().wait()
            shared.cut_first -= shared.cut_first > 0
            self.cut()
        if faults.bytes_per_s:
            for byte in data:
                connection.transport.write(bytes([byte]))
                await asyncio.sleep(1 / faults.bytes_per_s)
        else:
            connection.transport.write(data)
        self.num_sent += len(data)
        if not connection.can_write.is_set():
            await connection.can_write.wait()

    def cut(self) -> None:
        """End the connection after what was written, and with it this answer."""
        if self.faults.reset:
            self.connection.cut(reset=True)
        else:
            self.connection.transport.close()
        raise ConnectionAbortedError

    async def end(self) -> None:
        """The answer is complete."""
        if self.faults.until_close:
            self.connection.transport.close()


FOREIGN_TEXT = "".join("\n\n" if i % 4 == 3 else f" t{i}" for i in range(20)).lstrip()
"""What a foreign worker says, greedy, to any prompt: twenty tokens, some of them white space."""


def foreign_blocks(target: str, request: dict[str, Any], number: int) -> Iterator[bytes]:
    """The blocks of a stream of a foreign worker, which goes on where its prompt ends. ``number``:
    its own, for id and time."""
    kind = {"/v1/chat/completions": "chat", "/generate": "whole"}.get(target, "piece")
    prompt = request["messages"][-1]["content"] if kind == "chat" else ""
    if kind == "chat" and (request.get("continue_final_message"), prompt[:1]) != (True, "t"):
        prompt = ""  # of the user
    prompt = (
        prompt.rstrip() or request.get("prompt") or request.get("text") or ""
    )  # as templates do
    said = prompt[prompt.find("t0") :] if "t0" in prompt else ""
    assert FOREIGN_TEXT.startswith(said)
    limits = request.get("sampling_params") or request
    limit = limits.get("max_tokens") or limits.get("max_new_tokens") or 99
    tokens = re.findall(r"\n+| ?t\d+", FOREIGN_TEXT[len(said) :])
    is_cut, tokens = limit < len(tokens), tokens[:limit]
    num_prompt = 4 + len(re.findall(r"\n+| ?t\d+", said))
    head: dict[str, Any] = {"id": f"id-{number}", "created": number, "model": "mock"}
    reason = "length" if is_cut else "stop"

    def usage(count: int) -> dict[str, int]:
        total = {"total_tokens": num_prompt + count} if kind != "whole" else {}
        return {"prompt_tokens": num_prompt, "completion_tokens": count} | total

    def event(**fields: Any) -> bytes:
        return b"data: " + orjson.dumps(head | fields) + b"\n\n"

    if kind == "chat":
        yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for i, token in enumerate([*tokens, ""], 1):
        end = reason if i > len(tokens) else None
        if kind == "whole":
            count = min(i, len(tokens))
            meta = {"id": head["id"], "finish_reason": end and {"type": end}} | usage(count)
            text = "".join(tokens[:count])
            yield b"data: " + orjson.dumps({"text": text, "meta_info": meta}) + b"\n\n"
            continue
        piece = {"delta": {"content": token}} if kind == "chat" else {"text": token}
        yield event(choices=[{"index": 0, **piece, "logprobs": None, "finish_reason": end}])
    if (request.get("stream_options") or {}).get("include_usage"):
        yield event(choices=[], usage=usage(len(tokens)))
    yield b"data: [DONE]\n\n"
