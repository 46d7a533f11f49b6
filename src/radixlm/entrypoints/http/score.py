"""/v1/score: how likely given tokens follow; /v1/rerank: documents by how well they answer."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.body import read_body
from radixlm.entrypoints.http.client import client_key
from radixlm.entrypoints.http.disconnect import until_gone
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openai import run
from radixlm.entrypoints.http.openai.sampling import encode
from radixlm.entrypoints.http.pooled import MAX_INPUTS, has_head, pool, pooling_of
from radixlm.entrypoints.http.schema import Body, Int, Ints, Rid, Strings, documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.intake.records import GenerateRequest, Output
from radixlm.wire.requests import LogprobNeed
from radixlm.wire.sampling_params import SamplingParams

router = APIRouter(tags=["pooled"])


class ScoreRequest(Body):
    """POST /v1/score. The scores of an item are those of ``label_token_ids`` after query + item."""

    query: str | Ints
    items: str | Strings | list[Ints]
    label_token_ids: Annotated[Ints, Field(min_length=1, max_length=1024)]
    apply_softmax: bool = False
    item_first: bool = False
    temperature: Annotated[float, Field(gt=0)] = 1.0
    model: str | None = None


class RerankRequest(Body):
    """POST /v1/rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Strings, Field(min_length=1, max_length=MAX_INPUTS)]
    instruct: str | None = None
    top_n: Annotated[Int, Field(ge=1)] | None = None
    return_documents: bool = True
    model: str | None = None
    rid: Rid | None = None


@router.post("/v1/score", openapi_extra=documented(ScoreRequest))
async def score(request: Request) -> Response:
    """Probabilities of label tokens after each item."""
    body = await read_body(request, ScoreRequest)
    return json_response(await until_gone(request, answer_score(state_of(request), body)))


async def answer_score(state: ServerState, body: ScoreRequest) -> dict[str, Any]:
    """The whole answer."""
    model = state.check_model(body.model)
    vocab = state.intake.facts.vocab
    bad = next((i for i in body.label_token_ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise InvalidRequest(f"label_token_ids: {bad} is not a token id", "label_token_ids")
    items: list[Any] = [body.items] if isinstance(body.items, str) else list(body.items)
    if not items or len(items) > MAX_INPUTS:
        raise InvalidRequest(f"items must hold 1 to {MAX_INPUTS} entries", "items")
    need = LogprobNeed(-1, 0, tuple(body.label_token_ids))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(sampling=sampling, input_ids=ids, logprobs=need, fair_key=client_key())
        for ids in [await _prompt(state, body, item) for item in items]
    ]
    outputs = [found[0] for found in await run.collect(state, requests)]
    count = sum(output.prompt_tokens for output in outputs)
    return {
        "object": "scoring",
        "model": model,
        "scores": [_scores(body, output) for output in outputs],
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }


async def _prompt(state: ServerState, body: ScoreRequest, item: str | list[int]) -> list[int]:
    query = body.query
    if isinstance(query, str) and isinstance(item, str):
        text = item + query if body.item_first else query + item
        ids = await encode(state, text, "items")
    elif isinstance(query, list) and isinstance(item, list):
        ids = item + query if body.item_first else query + item
        vocab = state.intake.facts.vocab
        if any(not 0 <= i < vocab for i in ids):
            raise InvalidRequest(f"items: token ids must be in [0, {vocab})", "items")
    else:
        raise InvalidRequest("query and items must both be texts, or both token ids", "items")
    if not ids:
        raise InvalidRequest("items: query and item are both empty", "items")
    return ids


def _scores(body: ScoreRequest, output: Output) -> list[float]:
    rows = output.logprobs.asked if output.logprobs else []
    found = {token: logprob for logprob, token in (rows[0] if rows else None) or []}
    logprobs = [found.get(i, -math.inf) for i in body.label_token_ids]
    if not body.apply_softmax:
        return [math.exp(value) for value in logprobs]
    logprobs = [value / body.temperature for value in logprobs]
    top = max(logprobs)
    weights = [math.exp(value - top) if top > -math.inf else 1.0 for value in logprobs]
    return [weight / sum(weights) for weight in weights]


async def _rerank(request: Request) -> Response:
    """Documents by how well they fit a query."""
    body = await read_body(request, RerankRequest)
    return json_response(await until_gone(request, answer_rerank(state_of(request), body)))


for _method in ("POST", "PUT"):
    router.add_api_route(
        "/v1/rerank",
        _rerank,
        methods=[_method],
        name="rerank",
        operation_id=f"{_method.lower()}_rerank",
        openapi_extra=documented(RerankRequest),
        response_class=Response,
    )


async def answer_rerank(state: ServerState, body: RerankRequest) -> list[dict[str, Any]]:
    """Best first. A model with a score head reads query and document together; any other is asked
    for vectors, and the score is their cosine."""
    state.check_model(body.model)
    query = f"Instruct: {body.instruct}\nQuery: {body.query}" if body.instruct else body.query
    if has_head(state):
        prompts: list[str | list[int]] = [f"{query}\n{text}" for text in body.documents]
        found = await pool(state, prompts, "last+head", "documents", body.rid)
        scores = [one.vector[0] for one in found]
    else:
        texts: list[str | list[int]] = [query, *body.documents]
        found = await pool(state, texts, pooling_of(state.info.folder), "documents", body.rid)
        first, *found = found
        scores = [_cosine(first.vector, one.vector) for one in found]
    rows = [
        {
            "score": score,
            "document": text if body.return_documents else None,
            "index": index,
            "meta_info": {"prompt_tokens": one.output.prompt_tokens},
        }
        for index, (score, text, one) in enumerate(zip(scores, body.documents, found, strict=True))
    ]
    rows.sort(key=lambda row: -float(row["score"]))  # type: ignore[arg-type]
    return rows[: body.top_n]


def _cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.hypot(*a) * math.hypot(*b) or 1.0)
