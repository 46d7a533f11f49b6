"""One line of a batch file: a request by URL and body, answered as its route would answer it."""

import asyncio
import codecs
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.entrypoints.http.anthropic import MessagesRequest, chat_of
from radixlm.entrypoints.http.anthropic_answer import complete as complete_message
from radixlm.entrypoints.http.anthropic_answer import make_message
from radixlm.entrypoints.http.errors import body_of, error_body
from radixlm.entrypoints.http.off_loop import off_loop, off_loop_by_body
from radixlm.entrypoints.http.openai.chat import answer_chat
from radixlm.entrypoints.http.openai.completions import complete, make_call
from radixlm.entrypoints.http.openai.protocol import ChatRequest, CompletionRequest, Generation
from radixlm.entrypoints.http.pooling.embeddings import EmbeddingRequest, answer_embeddings
from radixlm.entrypoints.http.pooling.rerank import RerankRequest, answer_rerank
from radixlm.entrypoints.http.pooling.score import (
    ScoreRequest,
    answer_score,
)
from radixlm.entrypoints.http.responses.background import Responses
from radixlm.entrypoints.http.responses.routes import complete as complete_response
from radixlm.entrypoints.http.responses.schemas import ResponsesRequest
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.request_model import M, read
from radixlm.intake.call import current_call
from radixlm.wire.unknown import collect_unknown

log = logging.getLogger(__name__)

MESSAGES = "/v1/messages"
BUSY = (429, 503)
BATCH_PRIORITY = -1000
MAX_ID_CHARS = 512


class Line(msgspec.Struct, frozen=True):
    """A request of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_line(data: bytes) -> Line:
    """Parse a line; InvalidRequest names the fault."""
    try:
        line = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not a request: {error}") from None
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"custom_id must have 1 to {MAX_ID_CHARS} characters", "custom_id")
    if line.method.upper() != "POST":
        raise InvalidRequest(f"method {line.method!r:.20} must be POST", "method")
    if line.url not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise InvalidRequest(f"url {line.url!r:.80} must be one of {known}", "url")
    return line


async def _chat(state: ServerState, data: bytes) -> Any:
    return await answer_chat(state, _batched(state, await _read(ChatRequest, data)))


async def _completion(state: ServerState, data: bytes) -> Any:
    body = _batched(state, await _read(CompletionRequest, data))
    return await complete(await make_call(state, body))


async def _message(state: ServerState, data: bytes) -> Any:
    body = await _read(MessagesRequest, data)
    chat = _batched(state, await off_loop_by_body(chat_of, body))
    return await complete_message(await make_message(state, chat))


async def _response(state: ServerState, data: bytes) -> Any:
    body = _batched(state, await _read(ResponsesRequest, data))
    if body.background:
        raise InvalidRequest("background: a batch answers in its own time", "background")
    responses = state.extra(Responses)
    return await complete_response(await responses.make(state, body), responses)


async def _embedding(state: ServerState, data: bytes) -> Any:
    body = await _read(EmbeddingRequest, data)
    if body.encoding_format in ("bytes", "bytes_only"):
        raise InvalidRequest("encoding_format: a batch answers in JSON", "encoding_format")
    return await answer_embeddings(state, body)


async def _score(state: ServerState, data: bytes) -> Any:
    return await answer_score(state, await _read(ScoreRequest, data))


async def _rerank(state: ServerState, data: bytes) -> Any:
    return await answer_rerank(state, await _read(RerankRequest, data))


async def _read(model: type[M], data: bytes) -> M:
    if (call := current_call()) is not None:
        call.num_bytes = max(call.num_bytes, len(data))  # of the lines that run together
    return await off_loop(len(data), read, model, data)


def _batched(state: ServerState, body: Any) -> Any:
    """A body of a batch: not streamed, and with a lower priority than requests of clients."""
    assert isinstance(body, Generation | ResponsesRequest)
    if body.stream:
        raise InvalidRequest("stream: a batch cannot stream", "stream")
    schedule = state.config.schedule
    if body.priority is None and schedule.enable_priority_scheduling:
        sign = -1 if schedule.schedule_low_priority_values_first else 1
        body.priority = sign * BATCH_PRIORITY
    return body


ENDPOINTS: dict[str, Callable[[ServerState, bytes], Awaitable[Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    MESSAGES: _message,
    "/v1/responses": _response,
    "/v1/embeddings": _embedding,
    "/v1/score": _score,
    "/v1/rerank": _rerank,
}


async def answer_line(state: ServerState, line: Line) -> dict[str, Any]:
    """The line of the output file. A request that meets a busy server is repeated."""
    status, body = 200, None
    while True:
        try:
            with collect_unknown(state.config.serve.unknown_fields):
                body = await ENDPOINTS[line.url](state, json.dumps(line.body).encode())
            break
        except RadixError as error:
            status = int(getattr(error, "status", 500))
            if status in BUSY and state.intake.is_accepting:
                await asyncio.sleep(getattr(error, "retry_after_s", None) or 0.5)
                status = 200
                continue
            body = body_of(error)
            break
        except Exception:
            log.exception("a line of a batch failed")
            status, body = 500, error_body("internal error", 500)
            break
    return output_line(line.custom_id, status, body)


def output_line(custom_id: str, status: int, body: Any) -> dict[str, Any]:
    """A line of an output or error file."""
    response = {"status_code": status, "request_id": secrets.token_hex(8), "body": body}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }
