"""Reranking documents for a query: /v1/rerank as SGLang, /rerank and /v2/rerank as Cohere and Jina
(/v1/rerank too, for clients of theirs that say who they are).

A model with a score head reads query and document together. Of an embedding model the score is the
cosine of the two vectors. A generating model is asked whether the document answers the query, and
the score is the probability of "yes" against "no".
"""

import math
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling.contents import (
    Content,
    Document,
    content_of,
    listed,
    prompt_of,
)
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
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body, read_json
from radixlm.entrypoints.request_model import Body, Objects, Rid, Strings
from radixlm.intake.records import Output
from radixlm.multimodal.processor import Prompt as ReadPrompt

router = APIRouter(tags=["pooled"])

DEFAULT_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


Documents = Annotated[
    Strings | list[Document] | list[str | Document | Objects],
    Field(min_length=1, max_length=MAX_INPUTS),
]


class _Rerank(Body):
    query: Annotated[str, Field(min_length=1)] | Document | Objects
    documents: Documents | Document
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


class TeiTexts(Body):
    """How texts of Text Embeddings Inference are cut: ``truncate`` a longer one to the context, at
    its end."""

    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] = "right"

    def limit(self) -> int | None:
        """``limit`` as of ``pool``."""
        return -1 if self.truncate else None


class TeiRerank(TeiTexts):
    """POST /rerank with ``texts``, in the form of Text Embeddings Inference."""

    query: Annotated[str, Field(min_length=1)]
    texts: Annotated[Strings, Field(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: bool = False
    return_text: bool = False


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document. ``index``: its place in the request."""

    score: float
    index: int
    text: str
    output: Output


async def rank(state: ServerState, body: _Rerank, rid: str | None = None) -> list[Ranked]:
    """All documents, best first; those with equal scores in the order of the request."""
    documents = listed(state, body.documents, "documents")
    query = content_of(state, body.query, "query")
    limit = checked_limit(state, body.truncate_prompt_tokens)
    read = [await _beginning(state, one, body.max_tokens_per_doc) for one in documents]
    is_raw = body.use_activation is False
    scored = await scores_of(state, query, read, body.instruct, rid, limit, is_raw)
    ranked = [
        Ranked(activated(state, score, body.use_activation), index, one.text, output)
        for index, ((score, output), one) in enumerate(zip(scored, documents, strict=True))
    ]
    return sorted(ranked, key=lambda one: -one.score)


async def _beginning(state: ServerState, one: Content, count: int | None) -> Content:
    """The first ``count`` tokens of a document's text; one with media is left whole."""
    if not count or one.sources:
        return one
    ids = await encode(state, one.text, "documents", False, truncates=True)
    return one if len(ids) <= count else Content(state.require_tokenizer().decode(ids[:count]))


Scored = list[tuple[float, Output]]


async def scores_of(
    state: ServerState,
    query: Content,
    documents: list[Content],
    instruct: str | None = None,
    rid: str | None = None,
    limit: int | None = None,
    is_raw: bool = False,
) -> Scored:
    """The score of each document for the query; ``limit`` and ``is_raw`` as of ``pool``."""
    first = next((one.sources[0].where for one in (query, *documents) if one.sources), None)
    if has_scores(state):
        if first is not None:
            raise InvalidRequest(f"{first}: this model's score head compares texts only", first)
        return await _by_head(state, query, documents, instruct, rid, limit, is_raw)
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
    query: Content,
    documents: list[Content],
    instruct: str | None,
    rid: str | None,
    limit: int | None,
    is_raw: bool,
) -> Scored:
    if is_reranker_template(state):
        texts = [_template_text(state, query, one, instruct) for one in documents]
        prompts: list[Prompt] = [await encode(state, t, "documents", False) for t in texts]
    else:
        asked = _instructed(query.text, instruct)
        prompts = [Pair(asked, one.text) for one in documents]
    results = await pool(state, prompts, "documents", rid, limit=limit, is_raw=is_raw)
    return [(one.vector[-1] if len(one.vector) == 2 else one.vector[0], one.output)
            for one in results]  # fmt: skip


async def _by_vectors(
    state: ServerState,
    query: Content,
    documents: list[Content],
    instruct: str | None,
    rid: str | None,
    limit: int | None,
) -> Scored:
    known = state.info.sentence.prompts if state.info.sentence is not None else {}
    names = [next((n for n in kind if known.get(n)), None) for kind in _PROMPT_NAMES]
    query = replace(query, text=_instructed(query.text, instruct))
    if any(one.sources for one in (query, *documents)):
        asked, *read = (prompt_of(state, one) for one in (query, *documents))
    else:
        asked, read = query.text, [one.text for one in documents]
    ids = (f"{rid}_query", rid) if rid is not None else (None, None)
    first = (await pool(state, [asked], "query", ids[0], prompt_name=names[0], limit=limit))[0]
    results = await pool(state, read, "documents", ids[1], prompt_name=names[1], limit=limit)
    return [(cosine(first.vector, one.vector), one.output) for one in results]


# names of the prompts for queries and for documents
_PROMPT_NAMES = (("query",), ("document", "passage"))


async def _by_answer(
    state: ServerState, query: Content, documents: list[Content], instruct: str | None
) -> Scored:
    tokenizer = state.require_tokenizer()
    labels = [tokenizer.encode(word, False) for word in ("yes", "no")]
    if any(len(ids) != 1 for ids in labels):
        raise InvalidRequest(
            f"{state.info.architecture} cannot rank: it generates text, and its tokenizer has no "
            'tokens for "yes" and "no"; serve a cross-encoder, or start with --is-embedding'
        )
    yes_no = [ids[0] for ids in labels]
    prompts = [await _question(state, query, one, instruct) for one in documents]
    outputs = await next_tokens(state, prompts, yes_no)
    return [(softmax(label_logprobs(output, yes_no))[0], output) for output in outputs]


async def _question(
    state: ServerState, query: Content, document: Content, instruct: str | None
) -> list[int] | ReadPrompt:
    """What a generating model is asked about one document."""
    sources = (*query.sources, *document.sources)
    if state.media is None or not sources:
        return await encode(
            state, _template_text(state, query, document, instruct), "documents", False
        )
    await state.media.ready()  # the template writes its placeholders
    text = _template_text(state, query, document, instruct)
    return await state.media.prompt(text, sources, False)


def is_reranker_template(state: ServerState) -> bool:
    """Whether the chat template renders a query and a document instead of a conversation."""
    template = state.template
    if template is None:
        return False
    return any(template.mentions(f"<{word}>") for word in ("Document", "document"))


def _template_text(
    state: ServerState, query: Content, document: Content, instruct: str | None
) -> str:
    """Query and document, rendered by a reranker's template; any other template gets the question
    that Qwen's rerankers were trained on."""
    template, instruct = state.require_template(), instruct or DEFAULT_INSTRUCT
    first, second = (list(one.parts) or one.text for one in (query, document))
    if is_reranker_template(state):
        messages: list[dict[str, Any]] = [
            {"role": "query", "content": first},
            {"role": "document", "content": second},
            {"role": "system", "content": instruct},
        ]
        kwargs = {"query": first, "document": second, "instruct": instruct}
        return template.render(messages, template_kwargs=kwargs)
    words = f"<Instruct>: {instruct}\n<Query>: ", "\n<Document>: "
    asked: Any = f"{words[0]}{first}{words[1]}{second}"
    if query.sources or document.sources:
        asked = []
        for word, one in zip(words, (query, document), strict=True):
            asked += [{"type": "text", "text": word}, *one.as_parts()]
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
    return template.render(messages, template_kwargs={"enable_thinking": False})


def _instructed(query: str, instruct: str | None) -> str:
    return f"Instruct: {instruct}\nQuery: {query}" if instruct else query


def cosine(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors; 0 if one is zero."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.hypot(*a) * math.hypot(*b) or 1.0)


# User-Agent of clients that post Cohere's and Jina's form to /v1/rerank, the body of which may be
# the same as of SGLang's
_OF_COHERE = ("cohere", "litellm/")


def _is_cohere(request: Request) -> bool:
    """Whether the client reads Cohere's form; its SDKs before 5.14 named themselves elsewhere."""
    agent, sdk = (request.headers.get(name, "") for name in ("user-agent", "x-fern-sdk-name"))
    return agent.startswith(_OF_COHERE) or sdk.startswith("cohere")


async def _rerank(request: Request) -> Response:
    """Rank documents for a query: a list, and in the form of Cohere and Jina for Cohere's SDKs and
    LiteLLM, told by their User-Agent."""
    if _is_cohere(request):
        return await shared_rerank(request)
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
    """Rank documents for a query, in the form of Cohere, Jina, vLLM and llama.cpp; with `texts`
    in that of Text Embeddings Inference."""
    if "texts" in await read_json(request):
        return await _tei_rerank(request)
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


async def _tei_rerank(request: Request) -> Response:
    body, state = await read_body(request, TeiRerank), state_of(request)
    asked = _Rerank(
        query=body.query, documents=body.texts, truncate_prompt_tokens=body.limit(),
        use_activation=not body.raw_scores,
    )  # fmt: skip
    ranked = await cancel_on_disconnect(request, rank(state, asked))
    rows: list[dict[str, Any]] = [{"index": one.index, "score": one.score} for one in ranked]
    if body.return_text:
        rows = [row | {"text": one.text} for row, one in zip(rows, ranked, strict=True)]
    return json_response(rows)
