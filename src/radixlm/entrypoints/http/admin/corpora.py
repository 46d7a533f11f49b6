"""Operator routes about corpora, from which NGRAM drafts."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.off_loop import SMALL_BYTES, off_loop
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Strings
from radixlm.speculative.corpus import read_corpus, tokens_of
from radixlm.wire.replies import ControlReply

router = APIRouter(tags=["admin"])

Name = Annotated[str, Field(min_length=1, max_length=1024)]


class AddCorpus(Body):
    """``documents``, or ``file_path``: a JSONL file on the server, a JSON string a line."""

    corpus_id: Name | None = None
    documents: Strings | None = None
    file_path: Name | None = None


class RemoveCorpus(Body):
    corpus_id: Name


@router.post("/add_external_corpus", openapi_extra=documented(AddCorpus))
async def add_external_corpus(request: Request) -> Response:
    """Add a corpus for drafts (--speculative-algorithm NGRAM), kept until the engine restarts."""
    args = await read_body(request, AddCorpus)
    if bool(args.documents) == bool(args.file_path):
        raise InvalidRequest("documents: send texts in documents, or file_path", "documents")
    state = state_of(request)
    tokenizer = state.require_tokenizer()

    def read() -> bytes:
        try:
            texts = args.documents or read_corpus(str(args.file_path))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"file_path: {error}", "file_path") from None
        return tokens_of(texts, tokenizer).tobytes()

    size = sum(map(len, args.documents or ())) or SMALL_BYTES + 1
    ids, name = await off_loop(size, read), args.corpus_id or secrets.token_hex(16)
    reply = await state.intake.control("add_corpus", corpus_id=name, ids=ids)
    taken = int(reply.data or 0)
    cut = reply.ok and taken < len(ids) // 4
    return _answer(
        reply,
        corpus_id=name,
        message=f"cut to {taken} tokens, which is all that fits" if cut else reply.message,
        loaded_token_count=taken,
    )


@router.post("/remove_external_corpus", openapi_extra=documented(RemoveCorpus))
async def remove_external_corpus(request: Request) -> Response:
    """Remove a corpus."""
    args = await read_body(request, RemoveCorpus)
    reply = await state_of(request).intake.control("remove_corpus", corpus_id=args.corpus_id)
    return _answer(reply, message=reply.message)


@router.get("/list_external_corpora")
async def list_external_corpora(request: Request) -> Response:
    """The corpora and their tokens."""
    reply = await state_of(request).intake.control("list_corpora")
    return _answer(reply, corpus_token_counts=reply.data or {}, message=reply.message)


def _answer(reply: ControlReply, **fields: Any) -> Response:
    return json_response({"success": reply.ok} | fields, 200 if reply.ok else 400)
