"""Reranking documents for a query: /v1/rerank as SGLang, /rerank and /v2/rerank as Cohere and Jina.

A model with a score head reads query and document together. Of an embedding model the score is the
cosine of the two vectors. A generating model is asked whether the document answers the query, and
the score is the probability of "yes" against "no".
"""

import math
import secrets
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.labels import label_logprobs, next_tokens, softmax
from radixlm.entrypoints.http.pooling.pool import (
    MAX_INPUTS,
    Limit,
    Pair,
    Prompt,
    activated,
    checked_limit,
    has_scores,
    pool,
)
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body
from radixlm.entrypoints.request_model import Body, Rid, Strings
from radixlm.intake.records import Output

router = APIRouter(tags=["pooled"])

DEFAULT_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


class Document(Body):
    """A document as an object."""

    text: str


Documents = Annotated[
    Strings | list[Document] | list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)
]


class _Rerank(Body):
    query: Annotated[str, Field(min_length=1)]
    documents: Documents
    instruct: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    truncate_prompt_tokens: Limit | None = None
    return_documents: bool = True
    model: str | None = None
    use_activation: bool | None = None
    # tokens of a longer document that are read, from its beginning; 0: all
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None


class RerankRequest(_Rerank):
    """POST /v1/rerank."""

    rid: Rid | None = None


class SharedRerankRequest(_Rerank):
    """POST /rerank, /v2/rerank and /reranking, in the form of Cohere, Jina, vLLM and llama.cpp."""

    user: str | None = None


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document. ``index``: its place in the request."""

    score: float
    index: int
    text: str
    output: Output


async def rank(state: ServerState, body: _Rerank, rid: str | None = None) -> list[Ranked]:
    """All documents, best first; those with equal scores in the order of the request."""
    documents = texts_of(body.documents)
    limit = checked_limit(state, body.truncate_prompt_tokens)
    read = [await _beginning(state, text, body.max_tokens_per_doc) for text in documents]
    scored = await scores_of(state, body.query, read, body.instruct, rid, limit)
    ranked = [
        Ranked(activated(state, score, body.use_activation), index, text, output)
        for index, ((score, output), text) in enumerate(zip(scored, documents, strict=True))
    ]
    return sorted(ranked, key=lambda one: -one.score)


async def _beginning(state: ServerState, text: str, count: int | None) -> str:
    """The text of the first ``count`` tokens of a document."""
    if not count:
        return text
    ids = await encode(state, text, "documents", False, truncates=True)
    return text if len(ids) <= count else state.require_tokenizer().decode(ids[:count])


Scored = list[tuple[float, Output]]


async def scores_of(
    state: ServerState,
    query: str,
    documents: list[str],
    instruct: str | None = None,
    rid: str | None = None,
    limit: int | None = None,
) -> Scored:
    """The score of each document for the query; ``limit`` as of ``pool``."""
    if has_scores(state):
        return await _by_head(state, query, documents, instruct, rid, limit)
    if not state.info.is_generation:
        return await _by_vectors(state, query, documents, instruct, rid, limit)
    if limit is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: this model reads a question behind the document: shorten "
            "the document",
            "truncate_prompt_tokens",
        )
    return await _by_answer(state, query, documents, instruct)


async def _by_head(
    state: ServerState,
    query: str,
    documents: list[str],
    instruct: str | None,
    rid: str | None,
    limit: int | None,
) -> Scored:
    if is_reranker_template(state):
        texts = [_template_text(state, query, text, instruct) for text in documents]
        prompts: list[Prompt] = [await encode(state, t, "documents", False) for t in texts]
    else:
        query = _instructed(query, instruct)
        prompts = [Pair(query, text) for text in documents]
    results = await pool(state, prompts, "documents", rid, limit=limit)
    return [(one.vector[-1] if len(one.vector) == 2 else one.vector[0], one.output)
            for one in results]  # fmt: skip


async def _by_vectors(
    state: ServerState,
    query: str,
    documents: list[str],
    instruct: str | None,
    rid: str | None,
    limit: int | None,
) -> Scored:
    known = state.info.sentence.prompts if state.info.sentence is not None else {}
    names = [next((n for n in kind if known.get(n)), None) for kind in _PROMPT_NAMES]
    asked: list[Prompt] = [_instructed(query, instruct)]
    ids = (f"{rid}_query", rid) if rid is not None else (None, None)
    first = (await pool(state, asked, "query", ids[0], prompt_name=names[0], limit=limit))[0]
    results = await pool(
        state, list(documents), "documents", ids[1], prompt_name=names[1], limit=limit
    )
    return [(cosine(first.vector, one.vector), one.output) for one in results]


# names of the prompts for queries and for documents
_PROMPT_NAMES = (("query",), ("document", "passage"))


async def _by_answer(
    state: ServerState, query: str, documents: list[str], instruct: str | None
) -> Scored:
    tokenizer = state.require_tokenizer()
    labels = [tokenizer.encode(word, False) for word in ("yes", "no")]
    if any(len(ids) != 1 for ids in labels):
        raise InvalidRequest(
            f"{state.info.architecture} cannot rank: it generates text, and its tokenizer has no "
            'tokens for "yes" and "no"; serve a cross-encoder, or start with --is-embedding'
        )
    yes_no = [ids[0] for ids in labels]
    texts = [_template_text(state, query, text, instruct) for text in documents]
    prompts = [await encode(state, text, "documents", False) for text in texts]
    outputs = await next_tokens(state, prompts, yes_no)
    return [(softmax(label_logprobs(output, yes_no))[0], output) for output in outputs]


def is_reranker_template(state: ServerState) -> bool:
    """Whether the chat template renders a query and a document instead of a conversation."""
    template = state.template
    if template is None:
        return False
    return any(template.mentions(f"<{word}>") for word in ("Document", "document"))


def _template_text(state: ServerState, query: str, document: str, instruct: str | None) -> str:
    """Query and document, rendered by a reranker's template; any other template gets the question
    that Qwen's rerankers were trained on."""
    template = state.require_template()
    if is_reranker_template(state):
        messages = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
            {"role": "system", "content": instruct or DEFAULT_INSTRUCT},
        ]
        kwargs = {"query": query, "document": document, "instruct": instruct or DEFAULT_INSTRUCT}
        return template.render(messages, template_kwargs=kwargs)
    asked = f"<Instruct>: {instruct or DEFAULT_INSTRUCT}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
    return template.render(messages, template_kwargs={"enable_thinking": False})


def _instructed(query: str, instruct: str | None) -> str:
    return f"Instruct: {instruct}\nQuery: {query}" if instruct else query


def cosine(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors; 0 if one is zero."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.hypot(*a) * math.hypot(*b) or 1.0)


def texts_of(documents: list[Any]) -> list[str]:
    """The texts of documents, which may be objects."""
    return [one.text if isinstance(one, Document) else one for one in documents]


async def _rerank(request: Request) -> Response:
    """Rank documents for a query."""
    body = await read_body(request, RerankRequest)
    return json_response(
        await cancel_on_disconnect(request, answer_rerank(state_of(request), body))
    )


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
    """Rows of score, document, index and meta_info, best first."""
    state.check_model(body.model)
    ranked = await rank(state, body, body.rid)
    return [
        {
            "score": one.score,
            "document": one.text if body.return_documents else None,
            "index": one.index,
            "meta_info": {"id": one.output.rid, "prompt_tokens": one.output.prompt_tokens},
        }
        for one in ranked[: body.top_n]
    ]


@router.post("/reranking", openapi_extra=documented(SharedRerankRequest))
@router.post("/v1/reranking", openapi_extra=documented(SharedRerankRequest))
@router.post("/rerank", openapi_extra=documented(SharedRerankRequest))
@router.post("/v2/rerank", openapi_extra=documented(SharedRerankRequest))
async def shared_rerank(request: Request) -> Response:
    """Rank documents for a query, in the form of Cohere, Jina, vLLM and llama.cpp."""
    body = await read_body(request, SharedRerankRequest)
    state = state_of(request)
    model = state.check_model(body.model)
    ranked = await cancel_on_disconnect(request, rank(state, body))
    count = sum(one.output.prompt_tokens for one in ranked)
    results: list[dict[str, Any]] = [
        {"index": one.index, "relevance_score": one.score} for one in ranked[: body.top_n]
    ]
    if body.return_documents:
        for row, one in zip(results, ranked, strict=False):
            row["document"] = {"text": one.text}
    return json_response(
        {
            "id": f"rerank-{secrets.token_hex(16)}",
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }
    )
