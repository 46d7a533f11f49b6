"""POST /v2/embed: vectors in the form of Cohere's API, as vLLM serves it."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.packed import packed
from radixlm.entrypoints.http.pooling.pool import (
    MAX_INPUTS,
    MultimodalPrompt,
    Prompt,
    pool,
    prompt_text,
    prompt_usage,
    truncate,
)
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body
from radixlm.entrypoints.media import MediaSource
from radixlm.entrypoints.request_model import Body, Priority, Strings

router = APIRouter(tags=["pooled"])

# Cohere's purposes -> names that models have for the prompt of the same purpose
_PURPOSES = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
    "classification": (),
    "clustering": (),
}


class CohereEmbed(Body):
    """POST /v2/embed: texts, or images as data URIs. ``input_type``: a prompt of the model, or one
    of Cohere's purposes, which changes nothing if the model has no prompt for it. ``truncate``: the
    end of a longer text that is dropped; NONE refuses it."""

    model: str | None = None
    texts: Strings | None = None
    images: Strings | None = None
    input_type: str | None = None
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    priority: Priority | None = None


@router.post("/v2/embed", openapi_extra=documented(CohereEmbed))
async def embed(request: Request) -> Response:
    """Vectors of texts or images, in the forms that are asked for."""
    body = await read_body(request, CohereEmbed)
    return json_response(await cancel_on_disconnect(request, _answer(state_of(request), body)))


async def _answer(state: ServerState, body: CohereEmbed) -> dict[str, Any]:
    state.check_model(body.model)
    field = "texts" if body.texts is not None else "images"
    given = body.texts if body.texts is not None else body.images
    if not given or len(given) > MAX_INPUTS or None not in (body.texts, body.images):
        raise InvalidRequest(f"texts or images must hold 1 to {MAX_INPUTS} entries", field)
    name = _prompt_name(state, body.input_type)
    prompts: list[Prompt] = list(given)
    if field == "images":
        places = ((f"images[{i}]", image) for i, image in enumerate(given))
        prompts = [MultimodalPrompt(None, (MediaSource(v, where, "image"),)) for where, v in places]
    elif body.truncate == "START":
        prompts = [await _end_of(state, text, name, body.max_tokens) for text in given]
        name = None
    limit = (body.max_tokens or -1) if body.truncate == "END" else None
    results = await pool(state, prompts, field, None, body.priority, name, None, limit)
    vectors = [truncate(state, one.vector, body.output_dimension) for one in results]
    tokens = prompt_usage(results)["prompt_tokens"]
    billed = {"input_tokens": tokens, "image_tokens": 0}
    if field == "images":
        billed = {"input_tokens": 0, "image_tokens": tokens}
    return {
        "id": f"embd-{secrets.token_hex(16)}",
        "response_type": "embeddings_by_type",
        "texts": body.texts,
        "embeddings": {kind: _as(kind, vectors) for kind in body.embedding_types or ["float"]},
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
    }


def _prompt_name(state: ServerState, purpose: str | None) -> str | None:
    known = state.info.sentence.prompts if state.info.sentence is not None else {}
    names = (purpose, *_PURPOSES.get(purpose or "", ()))
    found = next((name for name in names if name in known), None)
    if purpose is not None and found is None and purpose not in _PURPOSES:
        works = ", ".join({**known, **_PURPOSES})
        message = f"Unsupported input_type {purpose!r:.80}; one of {works} works"
        raise InvalidRequest(message, "input_type")
    return found


async def _end_of(state: ServerState, text: str, name: str | None, limit: int | None) -> list[int]:
    """The last token ids of a text, behind the special ids that begin it."""
    text = prompt_text(state.info.sentence, name) + text
    ids = await encode(state, text, "texts", truncates=True)
    most = min(limit or len(ids), state.intake.facts.context_len)
    opening, head = set(state.require_tokenizer().encode("")), 0
    while head < min(most, len(ids)) and ids[head] in opening:
        head += 1
    return ids if len(ids) <= most else ids[:head] + ids[len(ids) - most + head :]


def _as(kind: str, vectors: list[list[float]]) -> list[Any]:
    """Vectors as numbers, as base64 of little-endian float32, or as one bit for each sign, packed:
    ``ubinary`` into bytes, ``binary`` into bytes less 128."""
    if kind == "float":
        return vectors
    if kind == "base64":
        return [packed(vector) for vector in vectors]
    if len(vectors[0]) % 8:
        message = f"embedding_types: {kind} needs a multiple of 8 numbers, not {len(vectors[0])}"
        raise InvalidRequest(message, "embedding_types")
    bits = np.packbits(np.asarray(vectors) >= 0, axis=1).astype(int)
    shown: list[Any] = (bits - 128 * (kind == "binary")).tolist()
    return shown
