"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest
from radixlm.continuation.stream_journal import draw_hex, draw_time
from radixlm.entrypoints.http.errors import json_answer
from radixlm.entrypoints.http.middleware import request_id
from radixlm.entrypoints.http.off_loop import off_loop, off_loop_by_body, off_loop_of
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.logprobs import (
    CompletionLogprobs,
    asked_ids,
    asked_top,
    prompt_need,
    prompt_rows,
)
from radixlm.entrypoints.http.openai.protocol import (
    MAX_PROMPTS,
    CompletionRequest,
    check_request,
)
from radixlm.entrypoints.http.openai.sampling import (
    check_sampling,
    client_names,
    request_of,
    sampling_of,
    truncated,
    unheld_of_body,
)
from radixlm.entrypoints.http.openai.usage import extension, usage, wanted_usage
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.http.transport import (
    DONE,
    cancel_on_disconnect,
    event,
    read_body,
    stream_response,
)
from radixlm.entrypoints.native.response import last_hidden
from radixlm.entrypoints.request_model import of_prompt
from radixlm.entrypoints.request_options import answer_error
from radixlm.entrypoints.sequences import check_sequences, likeliest, num_logprobs, take_rows
from radixlm.intake.records import GenerateRequest, Output
from radixlm.multimodal.features import float_rows
from radixlm.text.answer_check import UnheldSchema
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams
from radixlm.wire.unknown import note_warning

router = APIRouter(tags=["openai"])

DEFAULT_MAX_TOKENS = 16
PROMPT_KINDS = "a string, a list of strings, token ids or a list of token ids"


@dataclass(frozen=True, slots=True)
class Embeds:
    """A prompt of vectors: a file of one tensor in base64. Errors name ``where``."""

    file: str
    where: str


Prompt: TypeAlias = str | list[int] | Embeds


@dataclass(slots=True)
class Call:
    """One call: its requests, one a prompt, and what the answers need."""

    state: ServerState
    body: CompletionRequest
    model: str
    requests: list[GenerateRequest]
    echoes: list[str]
    num_samples: int  # that are computed for a prompt: ``best_of``
    num_shown: int
    id: str = ""
    created: int = field(default_factory=draw_time)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self.fingerprint = self.state.fingerprint
        rid = self.body.rid if isinstance(self.body.rid, str) else None
        self.id = rid or f"cmpl-{request_id() or draw_hex(16)}"

    @property
    def envelope(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@router.post("/v1/completions", openapi_extra=documented(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue prompts."""
    body = await read_body(request, CompletionRequest)
    return await answer_completion(request, body)


async def answer_completion(request: Request, body: CompletionRequest) -> Response:
    """The response to a parsed body."""
    call = await make_call(state_of(request), body)
    if body.stream:
        return await stream_response(request, _events(call))
    return await json_answer(await cancel_on_disconnect(request, complete(call)))


async def make_call(state: ServerState, body: CompletionRequest) -> Call:
    """Check the request and tokenise its prompts."""
    check_request(body)
    model = state.check_model(body.model)
    n, best_of = _counts(body)
    sampling, unheld = await off_loop_by_body(_sampling, state, body, best_of)
    need = _logprob_need(body, best_of > n, state.intake.facts.vocab)
    texts = _prompts(body)
    check_sequences(
        len(texts),
        max(best_of, sampling.beam_width or 1),
        state.intake.facts.max_sequences,
        "prompt",
    )
    call = Call(state, body, model, [], [], best_of, n)
    for index, prompt in enumerate(texts):
        request = request_of(
            state, body, sampling, unheld, _rid(body, index, len(texts)), index, len(texts)
        )
        await _set_prompt(state, body, request, prompt)
        request.logprobs = need
        if request.default_rid is not None and len(texts) > 1:
            request.default_rid += f"-{index}"
        call.requests.append(request)
        call.echoes.append(_echo(state, body, prompt))
    return call


def _sampling(
    state: ServerState, body: CompletionRequest, best_of: int
) -> tuple[SamplingParams, UnheldSchema | None]:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_of(body, state.defaults, limit)
    sampling = msgspec.structs.replace(sampling, n=best_of, best_of=None)
    named = {"n": "best_of"} if body.best_of is not None else {}
    check_sampling(state, sampling, client_names(body) | named)
    return sampling, unheld_of_body(body, sampling)


def _rid(body: CompletionRequest, index: int, count: int) -> str | None:
    """The id of one prompt's request: its own, or the call's with a number."""
    rid = body.rid
    if isinstance(rid, list):
        own: str = of_prompt("rid", rid, index, count)
        return own
    return rid if count == 1 or rid is None else f"{rid}-{index}"


def _counts(body: CompletionRequest) -> tuple[int, int]:
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if n < 1:
        raise InvalidRequest(f"n must be 1 or more, got {n}", "n")
    if body.use_beam_search:
        return n, n  # best_of: of the beams
    if best_of < n:
        raise InvalidRequest(f"best_of ({best_of}) must not be less than n ({n})", "best_of")
    if best_of > n and body.stream:
        raise InvalidRequest("best_of: more samples than n cannot be streamed", "best_of")
    return n, best_of


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """The prompts, those of ``prompt_embeds`` first, as in vLLM."""
    prompt: Any = body.prompt
    vectors = list[Prompt](_vectors(body))
    if isinstance(prompt, str):
        return [*vectors, prompt]
    if prompt is None and vectors:
        return vectors
    if not prompt:
        raise InvalidRequest(f"prompt must be {PROMPT_KINDS}, not empty", "prompt")
    if isinstance(prompt[0], int):
        return [*vectors, prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts a call", "prompt")
    return [*vectors, *prompt]


def _vectors(body: CompletionRequest) -> Iterator[Embeds]:
    given = body.prompt_embeds or []
    taken = {
        "echo": body.echo,
        "suffix": body.suffix,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }
    if given and (name := next((name for name, value in taken.items() if value), None)):
        raise InvalidRequest(f"{name}: not compatible with prompt_embeds, which are no text", name)
    for index, file in enumerate([given] if isinstance(given, str) else given):
        yield Embeds(
            file, f"prompt_embeds[{index}]" if isinstance(given, list) else "prompt_embeds"
        )


async def _set_prompt(
    state: ServerState, body: CompletionRequest, request: GenerateRequest, prompt: Prompt
) -> None:
    """Set the token ids of the prompt, or its vectors."""
    if not isinstance(prompt, Embeds):
        request.input_ids = await _ids(state, body, prompt)
        return
    rows = await off_loop(len(prompt.file), float_rows, prompt.file, prompt.where)
    request.embeds, request.num_embeds = rows.tobytes(), len(rows)
    request.names["input_embeds"] = prompt.where


async def _ids(state: ServerState, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    """The prompt's token ids, checked, so that an error names the prompt."""
    if isinstance(prompt, str):
        adds = body.add_special_tokens is not False
        text, cut = filled(state, prompt, body.suffix), body.truncate_prompt_tokens
        ids = await encode(state, text, "prompt", adds, truncates=cut is not None)
    else:
        ids = prompt
        vocab = state.intake.facts.vocab
        await asyncio.sleep(0)  # a call may have thousands of prompts
        bad = await off_loop(8 * len(ids), _not_in, vocab, ids)
        if bad is not None:
            raise InvalidRequest(
                f"prompt: {bad} is not a token id; the vocabulary has {vocab}", "prompt"
            )
    if not ids:
        raise InvalidRequest("prompt: at least one token is needed", "prompt")
    return truncated(body, ids, state.intake.facts.context_len)


def _not_in(vocab: int, ids: list[int]) -> int | None:
    return next((i for i in ids if not 0 <= i < vocab), None)


def filled(state: ServerState, prompt: str, suffix: str | None) -> str:
    """The prompt with its suffix, in the model's fill-in-the-middle format."""
    if not suffix:
        return prompt
    if state.fim is None:
        raise InvalidRequest(
            "suffix: the model has no known tokens for filling in; name them by "
            "--completion-template",
            "suffix",
        )
    return state.fim.render(prompt, suffix)


def _echo(state: ServerState, body: CompletionRequest, prompt: Prompt) -> str:
    if not body.echo or isinstance(prompt, Embeds):
        return ""
    if isinstance(prompt, str):
        return prompt
    return state.require_tokenizer().decode(prompt)


def _logprob_need(body: CompletionRequest, ranks: bool, vocab: int) -> LogprobParams | None:
    top = asked_top(body.logprobs, vocab, "logprobs")
    ids = asked_ids(body.logprob_token_ids, dict(body))
    if body.prompt_logprobs is not None:
        return prompt_need(body.prompt_logprobs, top, vocab, bool(body.stream))
    if body.logprobs is None:
        return LogprobParams() if ranks else None
    return LogprobParams(0 if body.echo else -1, 0 if ids else top, ids)


async def complete(call: Call) -> dict[str, Any]:
    """The whole answer."""
    results = await generate.collect(call.state, call.requests)
    shown = [likeliest(outputs, call.num_shown) for outputs in results]
    choices: list[dict[str, Any]] = []
    for index, outputs in enumerate(shown):
        for output in outputs:
            args = call, len(choices), index, output
            choices.append(await off_loop_of(num_logprobs(output), _choice, *args))
    every = [output for outputs in results for output in outputs]
    cached = call.state.config.serve.enable_cache_report
    counted = usage(every, shows_cached=cached, num_prompts=len(results))
    metadata = {"weight_version": call.state.weight_version}
    answer = call.envelope | {"choices": choices, "usage": counted, "metadata": metadata}
    return answer | extension(call.body, [output for outputs in shown for output in outputs])


def _choice(call: Call, index: int, prompt: int, output: Output) -> dict[str, Any]:
    body = call.body
    choice: dict[str, Any] = {
        "index": index,
        "text": call.echoes[prompt] + output.text,
        "logprobs": None,
        "finish_reason": generate.finish_reason(output),
        "matched_stop": output.finish.matched if output.finish else None,
    }
    if body.logprobs is not None:
        lists = _lists(call)
        echoed = output.prompt_logprobs if body.echo else None
        choice["logprobs"] = lists.read(echoed, output.logprobs)
    if body.prompt_logprobs is not None:
        tokenizer = call.state.require_tokenizer()
        found = output.prompt_logprobs
        choice["prompt_logprobs"] = prompt_rows(tokenizer, found, body.prompt_logprobs)
    if output.hidden_states is not None:
        choice["hidden_states"] = last_hidden(output, call.state.intake.facts.embed_dim)
    if error := answer_error(call.requests[prompt].unheld, output):
        choice["schema_error"] = error
        note_warning(f"choice {index}: {error}")
    if body.return_token_ids:
        choice["token_ids"] = output.token_ids
        choice["prompt_token_ids"] = call.requests[prompt].input_ids
    return choice


def _lists(call: Call) -> CompletionLogprobs:
    tokenizer, body = call.state.require_tokenizer(), call.body
    return CompletionLogprobs(tokenizer, body.logprobs or 0, bool(body.return_tokens_as_token_ids))


async def _events(call: Call) -> AsyncGenerator[bytes, None]:
    """Chunks, then the usage if asked for, then [DONE]."""
    wants_usage, continuous = wanted_usage(call.body.stream_options, call.state.config.serve)
    lists: dict[int, CompletionLogprobs] = {}
    totals: dict[int, Output] = {}
    texts: dict[int, str] = {}
    cached = call.state.config.serve.enable_cache_report
    async with aclosing(generate.stream(call.state, call.requests)) as deltas:
        async for prompt, output in deltas:
            index = prompt * call.num_samples + output.index
            is_first = index not in totals
            if not is_first:
                take_rows(output, totals[index])
            totals[index] = output
            if is_first and call.body.logprobs is not None:
                lists[index] = _lists(call)
            chunk = call.envelope
            args = call, index, prompt, output, is_first, lists.get(index)
            chunk["choices"] = [await off_loop_of(num_logprobs(output), _delta, *args)]
            if unheld := call.requests[prompt].unheld:
                texts[index] = texts.get(index, "") + output.text
                error = answer_error(unheld, output, texts[index])
                chunk["choices"][0] |= {"schema_error": error} if error else {}
            if wants_usage or continuous:
                one = usage([output], shows_cached=cached) if continuous else None
                chunk["usage"] = one
            yield await off_loop_of(num_logprobs(output), event, chunk)
    last = [totals[i] for i in sorted(totals)]
    if details := extension(call.body, last):
        yield event(call.envelope | {"choices": []} | details)
    if wants_usage:
        counted = usage(last, shows_cached=cached, num_prompts=len(call.requests))
        yield event(call.envelope | {"choices": [], "usage": counted})
    yield DONE


def _delta(
    call: Call,
    index: int,
    prompt: int,
    output: Output,
    is_first: bool,
    lists: CompletionLogprobs | None,
) -> dict[str, Any]:
    text = (call.echoes[prompt] if is_first else "") + output.text
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": lists.read(output.prompt_logprobs, output.logprobs) if lists else None,
        "finish_reason": generate.finish_reason(output),
        "matched_stop": output.finish.matched if output.finish else None,
    }
    if output.finish is not None and output.hidden_states is not None:
        choice["hidden_states"] = last_hidden(output, call.state.intake.facts.embed_dim)
    if call.body.return_token_ids:
        choice["token_ids"] = output.token_ids
        if is_first:
            choice["prompt_token_ids"] = call.requests[prompt].input_ids
    return choice
