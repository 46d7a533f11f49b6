"""Texts to token ids and back: ``encode`` for all routes, /tokenize and /detokenize."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest, PromptTooLong
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Ints, Objects

router = APIRouter(tags=["admin"])

# longer texts are tokenized in a thread, so that other requests go on
LONG_TEXT_CHARS = 50_000


async def encode(
    state: ServerState, text: str, param: str, add_special_tokens: bool = True
) -> list[int]:
    """Token ids. A text too long for the context is an error before it is tokenized; a long text is
    tokenized in a thread."""
    tokenizer = state.require_tokenizer()
    if len(text) <= LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special_tokens)
    facts = state.intake.facts
    max_chars = facts.context_len * longest_token(state)
    if len(text) > max_chars and not facts.allow_auto_truncate:
        raise PromptTooLong(
            f"{param}: {len(text)} characters cannot fit the context of {facts.context_len} tokens",
            param=param,
        )
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


class _Longest:
    """The number of characters of the longest token, computed once."""

    def __init__(self, num_chars: int) -> None:
        self.num_chars = num_chars


def longest_token(state: ServerState) -> int:
    """The number of characters of the vocabulary's longest token."""
    longest = state.extras.get(_Longest)
    if longest is None:
        tokenizer = state.require_tokenizer()
        pieces = (tokenizer.id_to_piece(i) for i in range(tokenizer.vocab_size))
        longest = _Longest(max(len(piece or "") for piece in pieces))
        state.extras[_Longest] = longest
    return int(longest.num_chars)


class Tokenize(Body):
    """``prompt``, a list of prompts, or ``messages`` of a chat."""

    prompt: str | list[str] | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    model: str | None = None


class Detokenize(Body):
    tokens: Ints | list[Ints]
    skip_special_tokens: bool = True
    model: str | None = None


@router.post("/v1/tokenize", openapi_extra=documented(Tokenize))
@router.post("/tokenize", openapi_extra=documented(Tokenize))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, of several texts, or of the rendered prompt of messages."""
    args = await read_body(request, Tokenize, any_type=True)
    state = state_of(request)
    state.check_model(args.model)
    tokenizer = state.require_tokenizer()
    if (args.prompt is None) == (args.messages is None):
        raise InvalidRequest("exactly one of prompt and messages must be given", "prompt")
    if args.messages is not None:
        template = state.require_template()
        prompt: str | list[str] = template.render(
            args.messages,
            tools=args.tools,
            add_generation_prompt=args.add_generation_prompt,
            template_kwargs=args.chat_template_kwargs,
        )
        adds = template.adds_special_tokens
    else:
        assert args.prompt is not None
        prompt, adds = args.prompt, True
    adds = adds if args.add_special_tokens is None else args.add_special_tokens
    length = state.intake.facts.context_len
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, adds)
        body: dict[str, Any] = {"tokens": ids, "count": len(ids)}
    else:
        rows = tokenizer.encode_batch(prompt, adds)
        body = {"tokens": rows, "count": [len(row) for row in rows]}
    return json_response(body | {"max_model_len": length})


@router.post("/v1/detokenize", openapi_extra=documented(Detokenize))
@router.post("/detokenize", openapi_extra=documented(Detokenize))
async def detokenize(request: Request) -> Response:
    """The text of token ids, or of several lists of them."""
    args = await read_body(request, Detokenize, any_type=True)
    state = state_of(request)
    state.check_model(args.model)
    tokenizer = state.require_tokenizer()
    is_nested = bool(args.tokens) and isinstance(args.tokens[0], list)
    rows: Any = args.tokens if is_nested else [args.tokens]
    for row in rows:
        bad = next((i for i in row if not 0 <= i < state.intake.facts.vocab), None)
        if bad is not None:
            raise InvalidRequest(f"tokens: {bad} is not a token id", "tokens")
    texts = [tokenizer.decode(row, args.skip_special_tokens) for row in rows]
    shown = texts if is_nested else texts[0]
    return json_response({"text": shown, "prompt": shown})  # vLLM's clients read ``prompt``


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """tokenizer_config.json of the model, with its chat template (lm-eval, vLLM's clients)."""
    state = state_of(request)
    state.require_tokenizer()
    path = state.config.model.tokenizer_path
    is_own = path in (None, state.config.model.model_path)
    folder = state.info.folder if is_own else Path(str(path))
    facts: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        facts = orjson.loads((folder / "tokenizer_config.json").read_bytes())
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = facts.get(name)
        facts[name] = value.get("content") if isinstance(value, dict) else value
    if state.template is not None:
        facts["chat_template"] = state.template.source
    return json_response(facts)
