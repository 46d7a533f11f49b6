"""Routes of Text Embeddings Inference, for Hugging Face's clients: POST /embed and /similarity, and
what POST / answers where the model gives vectors. Its /rerank is in ``rerank.py``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.pool import (
    MAX_INPUTS,
    as_prompts,
    normalized,
    normalizes,
    pool,
    pool_of,
    truncate,
)
from radixlm.entrypoints.http.pooling.rerank import TeiTexts, cosine
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body, read_json
from radixlm.entrypoints.request_model import Body, Ints, Strings

router = APIRouter(tags=["tei"])


class TeiEmbed(TeiTexts):
    """POST /embed, and POST / of a model that gives vectors. ``inputs``: texts or token ids."""

    inputs: str | Strings | Ints | list[Ints]
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class _Compared(Body):
    source_sentence: str
    sentences: Annotated[Strings, Field(min_length=1, max_length=MAX_INPUTS)]


class TeiParameters(TeiTexts):
    """Of TeiSimilarity."""

    prompt_name: str | None = None


class TeiSimilarity(Body):
    """POST /similarity, and POST / with such ``inputs``."""

    inputs: _Compared
    parameters: TeiParameters | None = None


@router.post("/embed", openapi_extra=documented(TeiEmbed))
async def embed(request: Request) -> Response:
    """Vectors of texts: a list of them, also of one."""
    body = await read_body(request, TeiEmbed)
    return json_response(await cancel_on_disconnect(request, _vectors(state_of(request), body)))


@router.post("/similarity", openapi_extra=documented(TeiSimilarity))
async def similarity(request: Request) -> Response:
    """How similar sentences are to one: the cosines of their vectors."""
    body = await read_body(request, TeiSimilarity)
    return json_response(await cancel_on_disconnect(request, _cosines(state_of(request), body)))


async def answer_inputs(request: Request) -> Response:
    """The response of POST / where the model gives vectors."""
    inputs = (await read_json(request)).get("inputs")
    return await (similarity(request) if isinstance(inputs, dict) else embed(request))


async def _vectors(state: ServerState, body: TeiEmbed) -> list[list[float]]:
    pool_of(state)
    scales, is_raw = normalizes(state, body.normalize), not body.normalize
    prompts = as_prompts(body.inputs, "inputs")
    results = await pool(
        state, prompts, "inputs", prompt_name=body.prompt_name, limit=body.limit(), is_raw=is_raw
    )
    vectors = [truncate(state, one.vector, body.dimensions, is_raw) for one in results]
    return [normalized(one) for one in vectors] if scales else vectors


async def _cosines(state: ServerState, body: TeiSimilarity) -> list[float]:
    asked, given = body.parameters or TeiParameters(), body.inputs
    texts = [given.source_sentence, *given.sentences]
    results = await pool(state, texts, "inputs", prompt_name=asked.prompt_name, limit=asked.limit())
    return [cosine(results[0].vector, one.vector) for one in results[1:]]
