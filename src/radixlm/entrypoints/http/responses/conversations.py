"""/v1/conversations: items that responses continue and add to. They are kept where responses are:
``Stored.input_items`` are the items, ``Stored.response`` is the conversation itself."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import NotFound
from radixlm.continuation.stream_journal import draw_hex
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.responses.background import Responses
from radixlm.entrypoints.http.responses.schemas import listed_items, messages_of, page_of_items
from radixlm.entrypoints.http.responses.store import Stored
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Metadata, Objects
from radixlm.intake.identity import identity

router = APIRouter(tags=["responses"])

MAX_ITEMS = 20  # of one call
_PATH = "/v1/conversations/{conversation_id}"
Items = Annotated[Objects, Field(max_length=MAX_ITEMS)]


class ConversationBody(Body):
    """POST /v1/conversations."""

    is_kept = True

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationMetadata(Body):
    """POST /v1/conversations/{conversation_id}."""

    metadata: Metadata


class ConversationItems(Body):
    """POST /v1/conversations/{conversation_id}/items."""

    is_kept = True

    items: Items


def _checked(items: Objects | None) -> Objects:
    messages_of(items or [], "items")
    return listed_items(items or [])


@router.post("/v1/conversations", openapi_extra=documented(ConversationBody, required=False))
async def create(request: Request) -> Response:
    """Create a conversation."""
    body = await read_body(request, ConversationBody)
    shown = {
        "id": f"conv_{draw_hex(16)}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": body.metadata or {},
    }
    stored = Stored(shown, _checked(body.items), [], identity().owner)
    await state_of(request).extra(Responses).put(stored)
    return json_response(shown)


@router.get(_PATH)
async def retrieve(request: Request, conversation_id: str) -> Response:
    """A conversation without its items."""
    stored = await state_of(request).extra(Responses).conversation(conversation_id)
    return json_response(stored.response)


@router.post(_PATH, openapi_extra=documented(ConversationMetadata))
async def update(request: Request, conversation_id: str) -> Response:
    """Replace the metadata of a conversation."""
    body = await read_body(request, ConversationMetadata)
    responses = state_of(request).extra(Responses)
    stored = await responses.change(
        conversation_id, lambda one: one.response.update(metadata=body.metadata)
    )
    return json_response(stored.response)


@router.delete(_PATH)
async def delete(request: Request, conversation_id: str) -> Response:
    """Delete a conversation with its items."""
    responses = state_of(request).extra(Responses)
    await responses.conversation(conversation_id)
    await responses.forget(conversation_id)
    shown = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
    return json_response(shown)


@router.post(f"{_PATH}/items", openapi_extra=documented(ConversationItems))
async def create_items(request: Request, conversation_id: str) -> Response:
    """Add items at the end of a conversation."""
    items = _checked((await read_body(request, ConversationItems)).items)
    responses = state_of(request).extra(Responses)
    await responses.change(conversation_id, lambda one: one.input_items.extend(items))
    return json_response(page_of_items(items, len(items) or 1, "asc"))


@router.get(f"{_PATH}/items")
async def list_items(
    request: Request,
    conversation_id: str,
    limit: int = 20,
    order: str = "desc",
    after: str | None = None,
) -> Response:
    """The items of a conversation."""
    stored = await state_of(request).extra(Responses).conversation(conversation_id)
    return json_response(page_of_items(stored.input_items, limit, order, after))


def _place(stored: Stored, item_id: str) -> int:
    """Where an item is; NotFound."""
    for place, item in enumerate(stored.input_items):
        if item["id"] == item_id:
            return place
    raise NotFound(f"no item {item_id!r:.200} in this conversation", "item_id")


@router.get(f"{_PATH}/items/{{item_id}}")
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """An item of a conversation."""
    stored = await state_of(request).extra(Responses).conversation(conversation_id)
    return json_response(stored.input_items[_place(stored, item_id)])


@router.delete(f"{_PATH}/items/{{item_id}}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Delete an item; the answer is the conversation."""
    responses = state_of(request).extra(Responses)
    stored = await responses.change(
        conversation_id, lambda one: one.input_items.pop(_place(one, item_id))
    )
    return json_response(stored.response)
