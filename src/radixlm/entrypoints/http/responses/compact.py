"""POST /v1/responses/compact: a conversation as its user messages and one item with a summary that
the model writes. Later input may hold that item."""

import base64
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.continuation.stream_journal import draw_hex, draw_time
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.responses.background import Responses
from radixlm.entrypoints.http.responses.routes import complete
from radixlm.entrypoints.http.responses.schemas import ResponsesRequest, listed_items, message_of
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body

router = APIRouter(tags=["responses"])

_ASK = (
    "Summarise our conversation so far, so that you can go on from the summary alone: what was "
    "asked, what was found and decided, names and numbers, and what is left to do."
)


@router.post("/v1/responses/compact", openapi_extra=documented(ResponsesRequest))
async def compact(request: Request) -> Response:
    """A shorter form of a conversation: its user messages and a summary."""
    body = await read_body(request, ResponsesRequest)
    items: Any = body.input or []
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    asked = [*items, {"role": "user", "content": _ASK}]
    changes = {"input": asked, "store": False, "background": False, "stream": False}
    body = body.model_copy(update=changes | {"tools": None, "tool_choice": None, "text": None})
    responses = state_of(request).extra(Responses)
    run = await responses.make(state_of(request), body)
    answer = await cancel_on_disconnect(request, complete(run, responses))
    users = [message_of(one) for one in run.messages[:-1] if one["role"] == "user"]
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    summary = base64.b64encode("".join(texts).encode()).decode()
    item = {"id": f"cmp_{draw_hex(16)}", "type": "compaction", "encrypted_content": summary}
    return json_response({
        "id": f"resp_{draw_hex(16)}",
        "object": "response.compaction",
        "created_at": draw_time(),
        "output": [*listed_items(users), item],
        "usage": answer["usage"],
    })  # fmt: skip
