"""POST /invocations, the one route of SageMaker: its fields tell which route a body is for, as in
vLLM's server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.entrypoints.http.openai.chat import chat_completions
from radixlm.entrypoints.http.openai.completions import completions
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.embeddings import classify_v1, embeddings
from radixlm.entrypoints.http.pooling.pool import has_scores
from radixlm.entrypoints.http.pooling.rerank import shared_rerank
from radixlm.entrypoints.http.pooling.score import score
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_json

router = APIRouter(tags=["openai"])

Route = Callable[[Request], Awaitable[Response]]

# the first whose fields a body has; without any it is a chat, whose error says what is missing
_BY_FIELDS: tuple[tuple[tuple[str, ...], Route], ...] = (
    (("messages",), chat_completions),
    (("prompt",), completions),
    (("query", "documents"), shared_rerank),
    (("query", "items"), score),
    (("queries",), score),
    (("text_1",), score),
    (("data_1",), score),
)


@router.post("/invocations", openapi_extra=documented(ChatRequest))
async def invocations(request: Request) -> Response:
    """Answer a conversation; a body with `prompt`, with `input`, with `query` and `documents`, or
    with pairs is answered as by /v1/completions, /v1/embeddings (of a classifier /v1/classify),
    /rerank, or /score. A model for vectors or scores reads a conversation as an `input`."""
    body = await read_json(request)
    state = state_of(request)
    pooled = classify_v1 if has_scores(state) else embeddings
    if "messages" in body and state.info.decoder.pool is not None:
        return await pooled(request)
    for names, route in _BY_FIELDS:
        if all(name in body for name in names):
            return await route(request)
    if "input" in body:
        return await pooled(request)
    return await chat_completions(request)
