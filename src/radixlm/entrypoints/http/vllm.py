"""Routes of vLLM's server: several conversations in one call, and the requests that prompts become,
without running them (its entrypoints/openai and entrypoints/serve/render)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_answer, json_response
from radixlm.entrypoints.http.openai.chat import Chat, complete, prompt_ids
from radixlm.entrypoints.http.openai.completions import make_call
from radixlm.entrypoints.http.openai.conversation import make_chat_session
from radixlm.entrypoints.http.openai.protocol import ChatRequest, CompletionRequest, Generation
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body, read_json
from radixlm.entrypoints.request_model import make
from radixlm.entrypoints.sequences import check_sequences, paced
from radixlm.intake.records import GenerateRequest

router = APIRouter(tags=["vllm"])


@router.post("/v1/chat/completions/batch", openapi_extra=documented(ChatRequest))
async def batch(request: Request) -> Response:
    """Answer several conversations: ``messages`` is a list of them, and the choice of each has its
    place as its index."""
    body, state = await read_json(request), state_of(request)
    return await json_answer(await cancel_on_disconnect(request, _answer_all(state, body)))


async def _answer_all(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    many = body.get("messages")
    if not isinstance(many, list) or not many or not all(isinstance(one, list) for one in many):
        raise InvalidRequest("messages must be a list of conversations", "messages")
    check_sequences(len(many), 1, state.intake.facts.max_sequences, "messages")
    chats = []
    for index, messages in enumerate(many):
        chat = make(ChatRequest, body | {"messages": messages})
        wrong = "stream" if chat.stream else "n" if chat.n not in (None, 1) else None
        if wrong:
            raise InvalidRequest(f"{wrong}: leave it out for a batch of conversations", wrong)
        session = await make_chat_session(state, chat)
        chats.append(Chat(session))
        for name in ("rid", "default_rid"):
            if rid := getattr(session.request, name):
                setattr(session.request, name, f"{rid}-{index}")
    async with asyncio.TaskGroup() as group:
        made = (group.create_task(complete(chat)) for chat in chats)
        tasks = [task async for task in paced(made)]
    answers = [task.result() for task in tasks]
    choices = [one["choices"][0] | {"index": index} for index, one in enumerate(answers)]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counted = {name: sum(one["usage"][name] for one in answers) for name in names}
    return answers[0] | {"choices": choices, "usage": counted}


@router.post("/v1/chat/completions/render", openapi_extra=documented(ChatRequest))
async def render_chat(request: Request) -> Response:
    """The token ids and sampling parameters of a conversation."""
    chat = Chat(await make_chat_session(state_of(request), await read_body(request, ChatRequest)))
    session = chat.session
    ids = prompt_ids(session) or []
    return await json_answer(_shown(chat.id, session.model, session.body, session.request, ids))


@router.post("/v1/completions/render", openapi_extra=documented(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """The token ids and sampling parameters of each prompt."""
    call = await make_call(state_of(request), await read_body(request, CompletionRequest))
    return await json_answer(
        [_shown(call.id, call.model, call.body, one, one.input_ids or []) for one in call.requests]
    )


@router.get("/load")
async def load(request: Request) -> Response:
    """The number of requests that run or wait."""
    state = state_of(request)
    if state.config.serve.tokenizer_worker_num > 1:  # others have requests too
        count = sum(replica.num_requests for replica in state.intake.replicas)
    else:
        count = len(state.intake.requests)
    return json_response({"server_load": count})


def _shown(
    name: str, model: str, body: Generation, request: GenerateRequest, ids: list[int]
) -> dict[str, Any]:
    sampling = msgspec.to_builtins(request.sampling)
    return {
        "request_id": name,
        "model": model,
        "token_ids": ids,
        "sampling_params": sampling | {"max_tokens": sampling.get("max_new_tokens")},
        "stream": bool(body.stream),
        "stream_options": body.stream_options.model_dump() if body.stream_options else None,
        "cache_salt": request.cache_salt,
        "priority": request.priority or 0,
    }
