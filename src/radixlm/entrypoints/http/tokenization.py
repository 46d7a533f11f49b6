"""Texts to token ids and back: ``encode`` for all routes, /tokenize and /detokenize."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Tag

from radixlm.base.errors import InvalidRequest, PromptTooLong
from radixlm.base.thread_pool import FairThreadPool
from radixlm.engine.located import tokenizer_folder
from radixlm.entrypoints.client import run_in
from radixlm.entrypoints.http.errors import json_answer, json_response
from radixlm.entrypoints.http.off_loop import SMALL_BYTES, body_size, off_loop
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.openai.thinking import template_variables
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Ints, Objects, make
from radixlm.text.tokenizer import Tokenizer

router = APIRouter(tags=["admin"])

# longer texts are tokenized in a thread, so that other requests go on
LONG_TEXT_CHARS = SMALL_BYTES
MESSAGE_BYTES = 128  # what a message weighs besides its text
ROWS_AT_ONCE = 64
MAX_ROWS = 4096  # texts, or lists of ids, of one call
SLOW_LIMIT_S = 10.0
_slow = FairThreadPool("texts to tokenize", 4, (2,))


def is_slow(tokenizer: Tokenizer | None, text: str) -> bool:
    """Whether a text is tokenized in a thread."""
    return len(text) > LONG_TEXT_CHARS or (tokenizer is not None and tokenizer.may_be_slow)


async def encode(
    state: ServerState,
    text: str,
    param: str,
    add_special_tokens: bool = True,
    *,
    truncates: bool = False,
) -> list[int]:
    """Token ids. A text too long for the context is an error before it is tokenized, unless the
    caller ``truncates`` them; a long text is tokenized in a thread."""
    tokenizer = state.require_tokenizer()
    await asyncio.sleep(0)  # a call may have thousands of texts
    if not is_slow(tokenizer, text):
        return tokenizer.encode(text, add_special_tokens)
    if not truncates and not state.intake.facts.allow_auto_truncate:
        await _check_chars(state, text, param)
    return (await _encoded(tokenizer, [text], param, add_special_tokens))[0]


async def _encoded(
    tokenizer: Tokenizer, texts: list[str], param: str, adds: bool
) -> list[list[int]]:
    """Token ids of texts, made in threads: apart from others, within a time limit, where the
    patterns of the tokenizer may need long for a short text."""
    if not tokenizer.may_be_slow:
        return await off_loop(sum(map(len, texts)), tokenizer.encode_batch, texts, adds)
    try:
        async with asyncio.timeout(SLOW_LIMIT_S):
            return await run_in(_slow, tokenizer.encode_batch, texts, adds)
    except TimeoutError:
        message = f"{param}: the tokenizer needs more than {SLOW_LIMIT_S:g} s for it; shorten it"
        raise InvalidRequest(message, param) from None


async def _check_chars(state: ServerState, text: str, param: str) -> None:
    """PromptTooLong for a text that has more characters than the context's tokens can have."""
    if len(text) <= LONG_TEXT_CHARS:
        return
    context_len = state.intake.facts.context_len
    longest = await off_loop(SMALL_BYTES + 1, longest_token, state)
    if len(text) > context_len * longest:
        raise PromptTooLong(
            f"{param}: {PromptTooLong.maximum(context_len)}; {len(text)} characters cannot fit",
            param=param,
        )


def check_rows(count: int, param: str) -> None:
    """InvalidRequest for more texts, or lists of ids, than a call may have."""
    if count > MAX_ROWS:
        raise InvalidRequest(f"{param}: {count} entries, a call may have {MAX_ROWS}", param)


async def render(state: ServerState, messages: list[dict[str, Any]], **options: Any) -> str:
    """The chat template's text of ``messages``; ``options`` as for ``ChatTemplate.render``. A long
    conversation is rendered in a thread, one that cannot fit the context is PromptTooLong."""
    facts, count = state.intake.facts, len(messages)
    if count > facts.context_len and not facts.allow_auto_truncate:
        raise PromptTooLong(
            f"messages: {PromptTooLong.maximum(facts.context_len)}; {count} messages cannot fit",
            param="messages",
        )
    template = state.require_template()
    check_template(state, options.get("chat_template"))
    options["template_kwargs"] = {
        **state.template_defaults,
        **(options.get("template_kwargs") or {}),
    }
    size = sum(MESSAGE_BYTES + _content_bytes(message.get("content")) for message in messages)
    size = max(size, body_size())  # of tools and variables too
    return await off_loop(size, lambda: template.render(messages, **options))


def check_template(state: ServerState, source: str | None) -> None:
    """InvalidRequest for a template of a client, unless the operator allows them."""
    if source is not None and not state.config.serve.trust_request_chat_template:
        message = "chat_template: templates are the operator's (--trust-request-chat-template)"
        raise InvalidRequest(message, "chat_template")


def _content_bytes(content: Any) -> int:
    return len(content) if isinstance(content, str) else SMALL_BYTES * isinstance(content, list)


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
    """``prompt``, a list of prompts, or ``messages`` of a chat. ``return_token_strs`` (vLLM's) adds
    each token as its vocabulary spells it; ``return_token_bytes`` its bytes in hexadecimal, and 1
    in ``special_tokens_mask`` for special tokens. ``content``, ``add_special`` (false if it is
    missing) and ``with_pieces`` are llama.cpp's."""

    prompt: str | list[str] | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    return_token_strs: bool = False
    return_token_bytes: bool = False
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False
    model: str | None = None


def _form(tokens: Any) -> str:
    """The form of ``Detokenize.tokens``, by its first entry: an error is about one form."""
    is_nested = isinstance(tokens, list) and tokens[:1] and isinstance(tokens[0], list)
    return "list[Ints]" if is_nested else "list"


class Detokenize(Body):
    tokens: Annotated[
        Annotated[Ints, Tag("list")] | Annotated[list[Ints], Tag("list[Ints]")],
        Discriminator(_form),
    ]
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
    if args.content is not None and args.prompt is None:
        args.prompt, args.add_special_tokens = args.content, args.add_special
    if (args.prompt is None) == (args.messages is None):
        raise InvalidRequest("exactly one of prompt and messages must be given", "prompt")
    check_template(state, args.chat_template)
    if args.messages is not None:
        template = state.require_template()
        names = ("messages", "chat_template_kwargs", "reasoning_effort")
        chat = make(ChatRequest, {name: getattr(args, name) for name in names})
        prompt: str | list[str] = await render(
            state,
            args.messages,
            tools=None if args.tool_choice == "none" else args.tools,
            add_generation_prompt=args.add_generation_prompt,
            continue_final_message=args.continue_final_message,
            chat_template=args.chat_template,
            template_kwargs=template_variables(state, chat),
        )
        adds = template.adds_special_tokens
    else:
        assert args.prompt is not None
        prompt, adds = args.prompt, True
    adds = adds if args.add_special_tokens is None else args.add_special_tokens
    length = state.intake.facts.context_len
    if isinstance(prompt, str):
        await _check_chars(state, prompt, "prompt")
        [ids] = await _encoded(tokenizer, [prompt], "prompt", adds)
        body: dict[str, Any] = {"tokens": ids, "count": len(ids)}
    else:
        rows = await _encode_rows(state, prompt, adds)
        body = {"tokens": rows, "count": [len(row) for row in rows]}
    body |= await off_loop(8 * len(prompt), _pieces, tokenizer, body["tokens"], args)
    if args.with_pieces:
        body["tokens"] = _each(body["tokens"], lambda i: {"id": i, "piece": tokenizer.decode([i])})
    return await json_answer(body | {"max_model_len": length})


def _pieces(tokenizer: Tokenizer, ids: Any, args: Tokenize) -> dict[str, Any]:
    """What is asked for about each token of ``ids``, a list or a list of lists."""
    made: dict[str, Any] = {}
    if args.return_token_strs:
        made["token_strs"] = _each(ids, lambda i: tokenizer.id_to_piece(i) or "")
    if args.return_token_bytes:
        made["token_bytes"] = _each(ids, lambda i: tokenizer.token_bytes(i).hex())
        made["special_tokens_mask"] = _each(ids, lambda i: int(tokenizer.is_special(i)))
    return made


def _each(ids: Any, of: Callable[[int], Any]) -> list[Any]:
    return [_each(i, of) if isinstance(i, list) else of(i) for i in ids]


async def _encode_rows(state: ServerState, texts: list[str], adds: bool) -> list[list[int]]:
    """Token ids of each text; the texts are tokenized together, some at a time."""
    check_rows(len(texts), "prompt")
    rows: list[list[int]] = []
    tokenizer = state.require_tokenizer()
    for place in range(0, len(texts), ROWS_AT_ONCE):
        some = texts[place : place + ROWS_AT_ONCE]
        for text in some:
            await _check_chars(state, text, "prompt")
        rows += await _encoded(tokenizer, some, "prompt", adds)
    return rows


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
    check_rows(len(rows), "tokens")
    context_len = state.intake.facts.context_len
    too_long = next((row for row in rows if len(row) > context_len), None)
    if too_long is not None:
        raise PromptTooLong(
            f"tokens: {len(too_long)} ids; the context is {context_len} tokens", "tokens"
        )

    def text_of(row: list[int]) -> str:
        bad = next((i for i in row if not 0 <= i < state.intake.facts.vocab), None)
        if bad is not None:
            raise InvalidRequest(f"tokens: {bad} is not a token id", "tokens")
        return tokenizer.decode(row, args.skip_special_tokens)

    texts = []
    for row in rows:
        texts.append(await off_loop(4 * len(row), text_of, row))
        await asyncio.sleep(0)
    shown = texts if is_nested else texts[0]
    # vLLM's clients read ``prompt``, llama.cpp's ``content``
    return await json_answer({"text": shown, "prompt": shown, "content": shown})


def _as_texts(value: Any) -> Any:
    """Tokens with their properties as their texts, at any depth."""
    if isinstance(value, list):
        return [_as_texts(one) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(text := value.get("content"), str):
        return text
    return {name: _as_texts(one) for name, one in value.items()}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """tokenizer_config.json of the model in the form of vLLM's route: `tokenizer_class`, special
    tokens as texts, `chat_template`; and `adds_bos_token`."""
    state = state_of(request)
    tokenizer = state.require_tokenizer()
    folder = tokenizer_folder(state.config, state.info.folder)
    facts: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        facts = orjson.loads((folder / "tokenizer_config.json").read_bytes())
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **_as_texts(facts)}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        facts.setdefault(name)
    facts["adds_bos_token"] = bool(tokenizer.added_bos)
    if state.template is not None:
        facts["chat_template"] = state.template.source
    return json_response(facts)
