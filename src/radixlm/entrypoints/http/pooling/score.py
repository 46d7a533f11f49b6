"""/v1/score: probabilities of label tokens after each item, or the scores of a score head."""

import math
import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.contents import Document, listed
from radixlm.entrypoints.http.pooling.labels import label_logprobs, next_tokens, softmax
from radixlm.entrypoints.http.pooling.overrides import (
    Overrides,
    Vectors,
    VectorsOfInputs,
    read_pair_overrides,
)
from radixlm.entrypoints.http.pooling.pool import (
    MAX_INPUTS,
    Limit,
    Pair,
    Prompt,
    activated,
    checked_limit,
    has_scores,
    pool,
    probabilities,
    prompt_usage,
)
from radixlm.entrypoints.http.pooling.rerank import scores_of
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body
from radixlm.entrypoints.request_model import (
    Body,
    Ints,
    Strings,
    reject_unsupported,
    with_fields,
)

router = APIRouter(tags=["pooled"])


Side = str | Strings | Document | list[str | Document]


@with_fields("score")
class ScoreRequest(Body):
    """POST /v1/score. The scores of an item are those of ``label_token_ids`` after query + item; of
    a model with a score head they are its scores of query + item (a cross-encoder reads both texts
    as a pair), and ``label_token_ids`` may choose some of its labels by their number. With
    ``text_1`` and ``text_2``, or vLLM's other names of both sides of pairs, the answer is vLLM's:
    the score of each pair, as of /rerank."""

    query: str | Ints | None = None
    items: str | Strings | list[Ints] | None = None
    label_token_ids: Annotated[Ints, Field(min_length=1, max_length=1024)] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    temperature: Annotated[float, Field(gt=0)] = 1.0
    return_pooled_hidden_states: bool = False
    return_token_logprobs: bool = False
    embed_override_token_id: int | None = None
    query_embed_overrides: Vectors | None = None
    item_embed_overrides: VectorsOfInputs | None = None
    model: str | None = None
    # of vLLM
    text_1: Side | None = None
    text_2: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    queries: Side | None = None
    documents: Side | None = None
    truncate_prompt_tokens: Limit | None = None
    use_activation: bool | None = None


class GenerativeScoringRequest(Body):
    """POST /generative_scoring, vLLM's: ``label_token_ids`` after query + item, as /v1/score."""

    query: str | Ints
    items: Annotated[Strings | list[Ints], Field(min_length=1, max_length=MAX_INPUTS)]
    label_token_ids: Annotated[Ints, Field(min_length=1, max_length=1024)]
    apply_softmax: bool = True
    item_first: bool = False
    model: str | None = None


# the names of both sides of vLLM's pairs
_PAIRS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
_MIXED = "query and items must both be texts, or both token ids"


@router.post("/score", openapi_extra=documented(ScoreRequest))
@router.post("/v1/score", openapi_extra=documented(ScoreRequest))
async def score(request: Request) -> Response:
    """Probabilities of label tokens after each item, or scores of each item or pair."""
    body = await read_body(request, ScoreRequest)
    return json_response(await cancel_on_disconnect(request, answer_score(state_of(request), body)))


@router.post("/generative_scoring", openapi_extra=documented(GenerativeScoringRequest))
async def generative_scoring(request: Request) -> Response:
    """Probabilities of the first label token after each item, in the form of vLLM."""
    body = await read_body(request, GenerativeScoringRequest)
    answer = _answer_generative(state_of(request), body)
    return json_response(await cancel_on_disconnect(request, answer))


async def _answer_generative(state: ServerState, body: GenerativeScoringRequest) -> dict[str, Any]:
    reject_unsupported(body)
    model = state.check_model(body.model)
    asked = ScoreRequest(**{name: getattr(body, name) for name in type(body).model_fields})
    scores, usage, _ = await _of_tokens(state, asked, list(body.items))
    prompt, count = usage["prompt_tokens"], len(scores)
    return {
        "id": f"generative-scoring-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": i, "object": "score", "score": s[0]} for i, s in enumerate(scores)],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        },
    }


async def answer_score(state: ServerState, body: ScoreRequest) -> dict[str, Any]:
    """The whole answer."""
    reject_unsupported(body)
    model = state.check_model(body.model)
    for first, second in _PAIRS:
        if None not in (getattr(body, first), getattr(body, second)):
            return await _of_pairs(state, body, model, first, second)
    if body.query is None or body.items is None:
        missing = "query" if body.query is None else "items"
        raise InvalidRequest(f"{missing} is required, or text_1 and text_2", missing)
    items: list[Any] = [body.items] if isinstance(body.items, str) else list(body.items)
    if len(items) > MAX_INPUTS:
        raise InvalidRequest(f"items must hold up to {MAX_INPUTS} entries", "items")
    hidden: list[list[float] | None] | None = None
    logprobs: list[list[float]] | None = None
    if not items:  # no scores of none, as SGLang answers
        scores, usage = list[list[float]](), prompt_usage([])
    elif has_scores(state):
        scores, usage, hidden = await _of_head(state, body, items)
    else:
        scores, usage, logprobs = await _of_tokens(state, body, items)
    shown: dict[str, Any] = {} if hidden is None else {"pooled_hidden_states": hidden}
    if body.return_token_logprobs and logprobs is not None:
        shown["token_logprobs"] = logprobs
    return {"object": "scoring", "model": model, "scores": scores, "usage": usage, **shown}


async def _of_pairs(
    state: ServerState, body: ScoreRequest, model: str, left: str, right: str
) -> dict[str, Any]:
    """vLLM's answer: one text against each of several, or lists of the same length, of the fields
    ``left`` and ``right``."""
    sides = [getattr(body, name) for name in (left, right)]
    if any(isinstance(side, list) and side and isinstance(side[0], list) for side in sides):
        raise InvalidRequest(f"{right}: pairs are of texts, images and videos, not ids", right)
    names = (left, right)
    first, second = (listed(state, side, n) for side, n in zip(sides, names, strict=True))
    if not first or not second or len(first) not in (1, len(second)) or len(second) > MAX_INPUTS:
        raise InvalidRequest(
            f"{left} and {right}: one text and 1 to {MAX_INPUTS}, or as many of both", right
        )
    rows = [(first[0], second)]
    if len(first) > 1:
        rows = [(a, [b]) for a, b in zip(first, second, strict=True)]
    limit = checked_limit(state, body.truncate_prompt_tokens)
    is_raw = body.use_activation is False
    scored = [
        pair
        for a, many in rows
        for pair in await scores_of(state, a, many, limit=limit, is_raw=is_raw)
    ]
    scores = [activated(state, score, body.use_activation) for score, _ in scored]
    count = sum(output.prompt_tokens for _, output in scored)
    return {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)],
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }


async def _of_head(
    state: ServerState, body: ScoreRequest, items: list[Any]
) -> tuple[list[list[float]], dict[str, int], list[list[float] | None] | None]:
    """The scores of the score head for query and item, and what it got."""
    if state.info.decoder.encoder is not None and isinstance(body.query, str):
        prompts: list[Prompt] = [_pair(body, item) for item in items]
    else:
        prompts = [await _prompt(state, body, item) for item in items]
    with_hidden = body.return_pooled_hidden_states
    overrides = _overrides(state, body, len(items))
    results = await pool(state, prompts, "items", with_hidden=with_hidden, overrides=overrides)
    rows = []
    for one in results:
        scores = [value / body.temperature for value in one.vector]
        rows.append(_chosen(body, probabilities(state, scores) if body.apply_softmax else scores))
    hidden = [one.hidden for one in results] if with_hidden else None
    return rows, prompt_usage(results), hidden


def _chosen(body: ScoreRequest, scores: list[float]) -> list[float]:
    wanted = body.label_token_ids
    if wanted is None:
        return scores
    bad = next((i for i in wanted if not 0 <= i < len(scores)), None)
    if bad is not None:
        raise InvalidRequest(
            f"label_token_ids: {bad} is no label; the model has {len(scores)}", "label_token_ids"
        )
    return [scores[i] for i in wanted]


async def _of_tokens(
    state: ServerState, body: ScoreRequest, items: list[Any]
) -> tuple[list[list[float]], dict[str, int], list[list[float]]]:
    """Probabilities of the label tokens after query and item, the usage, and log-probabilities
    among all tokens."""
    if body.return_pooled_hidden_states:
        raise InvalidRequest(  # in SGLang's words
            "return_pooled_hidden_states is not supported for CausalLM models: it needs one with a "
            "score head",
            "return_pooled_hidden_states",
        )
    if body.label_token_ids is None:
        raise InvalidRequest("label_token_ids is required: the tokens to score", "label_token_ids")
    vocab = state.intake.facts.vocab
    bad = next((i for i in body.label_token_ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise InvalidRequest(  # in SGLang's words
            f"label_token_ids: Token ID {bad} is out of vocabulary (vocab size: {vocab})",
            "label_token_ids",
        )
    prompts: list[Any] = [await _prompt(state, body, item) for item in items]
    if (overrides := _overrides(state, body, len(items))) is not None:
        prompts = [overrides.put(state, ids, i) or ids for i, ids in enumerate(prompts)]
    outputs = await next_tokens(state, prompts, body.label_token_ids)
    logprobs = [label_logprobs(output, body.label_token_ids) for output in outputs]
    count = sum(output.prompt_tokens for output in outputs)
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    return [_scores(body, row) for row in logprobs], usage, logprobs


def _overrides(state: ServerState, body: ScoreRequest, count: int) -> Overrides | None:
    token, query, items = (
        body.embed_override_token_id,
        body.query_embed_overrides,
        body.item_embed_overrides,
    )
    return read_pair_overrides(state, token, query, items, count, body.item_first)


async def _prompt(state: ServerState, body: ScoreRequest, item: str | list[int]) -> list[int]:
    """Token ids of query and item, one after the other."""
    query = body.query
    if isinstance(query, str) and isinstance(item, str):
        text = item + query if body.item_first else query + item
        ids = await encode(state, text, "items")
    elif isinstance(query, list) and isinstance(item, list):
        ids = item + query if body.item_first else query + item
    else:
        raise InvalidRequest(_MIXED, "items")
    vocab = state.intake.facts.vocab
    if any(not 0 <= i < vocab for i in ids):
        raise InvalidRequest(f"items: token ids must be in [0, {vocab})", "items")
    if not ids:
        raise InvalidRequest("items: query and item are both empty", "items")
    return ids


def _pair(body: ScoreRequest, item: str | list[int]) -> Pair:
    """Query and item for a cross-encoder, whose tokenizer joins them."""
    if not isinstance(body.query, str) or not isinstance(item, str):
        raise InvalidRequest(_MIXED, "items")
    return Pair(item, body.query) if body.item_first else Pair(body.query, item)


def _scores(body: ScoreRequest, logprobs: list[float]) -> list[float]:
    if not body.apply_softmax:
        return [math.exp(value) for value in logprobs]
    return softmax([value / body.temperature for value in logprobs])
