"""Asks items of a server that speaks OpenAI's API, or of an engine in this process."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from radixlm.base.errors import ConfigError, RadixError, RequestError, TransferError
from radixlm.bench.backends import error_text
from radixlm.bench.client import HttpClient
from radixlm.entrypoints.offline import Engine
from radixlm.evals.items import Item, Reply

_TRIES = 4
_AGAIN = (429, 500, 502, 503, 504)


class Model(Protocol):
    """What answers. Failures are TransferError or RequestError."""

    async def chat(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Any:
        """The answer of /v1/chat/completions."""

    async def complete(self, prompt: str, fields: dict[str, Any]) -> Any:
        """The answer of /v1/completions."""

    async def likelihood(self, context: str, choice: str) -> float:
        """Log-probability of `choice` behind `context`. Spaces at the context's end count as the
        choice's, as in lm-evaluation-harness."""

    def close(self) -> None:
        """Nothing more is asked."""


class HttpModel:
    """A server at `url`, with or without /v1 at its end."""

    def __init__(self, url: str, name: str | None, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = HttpClient(self.url, headers)
        self._name = name

    async def name(self) -> str:
        """The model asked for: the given one, or the first that the server lists."""
        if self._name is None:
            response = await self._client.ask("GET", "/v1/models")
            models = (response.json() or {}).get("data") or []
            if response.status in (401, 403):
                raise ConfigError(f"{self.url} answers {response.status}: give the right --api-key")
            if not models:
                raise ConfigError(f"{self.url}/v1/models names no model; give --model NAME")
            self._name = str(models[0]["id"])
        return self._name

    async def reach(self) -> None:
        """TransferError if no server answers; ConfigError as for `name`."""
        try:
            if self._name is None:
                await self.name()
            else:
                await self._client.ask("GET", "/v1/models")
        finally:
            self.close()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer; a refused or broken request is sent again a few times."""
        for attempt in range(_TRIES):
            is_last = attempt + 1 == _TRIES
            try:
                response = await self._client.ask(
                    "POST", path, {"model": await self.name(), **body}
                )
            except TransferError:
                if is_last:
                    raise
            else:
                answer = response.json()
                if response.status == 200 and answer is not None:
                    return answer
                if response.status not in _AGAIN or is_last:
                    text = (
                        error_text(answer)
                        if answer
                        else response.body[:200].decode("utf-8", "replace")
                    )
                    raise RequestError(f"status {response.status}: {text}")
            await asyncio.sleep(0.2 * 4**attempt)
        raise AssertionError("the last try returns or raises")

    async def chat(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Any:
        return await self._post("/v1/chat/completions", {"messages": messages, **fields})

    async def complete(self, prompt: str, fields: dict[str, Any]) -> Any:
        return await self._post("/v1/completions", {"prompt": prompt, **fields})

    async def likelihood(self, context: str, choice: str) -> float:
        """By `echo` with `logprobs`; a token belongs to the choice if it begins in it."""
        body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
        answer = await self.complete(context + choice, body)
        found = answer["choices"][0].get("logprobs")
        if not found or "text_offset" not in found:
            raise RequestError("the server gives no logprobs of the prompt (echo, text_offset)")
        begin, end = len(context.rstrip()), len(context) + len(choice)
        pairs = zip(found["text_offset"], found["token_logprobs"], strict=True)
        return math.fsum(p for at, p in pairs if begin <= at < end and p is not None)

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()


class EngineModel:
    """An engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def chat(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Any:
        return await self._engine.async_chat(messages, **fields)

    async def complete(self, prompt: str, fields: dict[str, Any]) -> Any:
        sampling = dict(fields)
        sampling["max_new_tokens"] = sampling.pop("max_tokens")
        if (seed := sampling.pop("seed", None)) is not None:
            sampling["sampling_seed"] = seed
        answer = await self._engine.async_generate(prompt, sampling)
        meta = answer["meta_info"]
        usage = {name: meta[name] for name in ("prompt_tokens", "completion_tokens")}
        return {"choices": [{"text": answer["text"]}], "usage": usage}

    async def likelihood(self, context: str, choice: str) -> float:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "refused before the start"
        whole, begin = tokenizer.encode(context + choice), len(tokenizer.encode(context.rstrip()))
        answer = await self._engine.async_generate(
            input_ids=whole,
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        return math.fsum(one[0] for one in answer["meta_info"]["input_token_logprobs"][begin:])

    def close(self) -> None:
        """The engine's owner ends it."""


def as_text(item: Item) -> str:
    """The item as a text to continue. ConfigError for a conversation of several turns."""
    question = item.completion or item.question
    if not isinstance(question, str):
        if len(question) != 1 or not isinstance(question[0]["content"], str):
            raise ConfigError(f"item {item.id} is a conversation: use --api chat")
        question = question[0]["content"]
    return "".join(f"{asked}{answer}\n\n" for asked, answer in item.shots) + question


def as_messages(item: Item, is_multi_turn: bool, system: str | None) -> list[dict[str, Any]]:
    """The item as a conversation; the examples are turns of it, or stand in its only one."""
    first = [{"role": "system", "content": system}] if system else []
    if not isinstance(item.question, str):
        return [*first, *item.question]
    if not is_multi_turn:
        shots = "".join(f"{asked}{answer}\n\n" for asked, answer in item.shots)
        return [*first, {"role": "user", "content": shots + item.question}]
    for asked, answer in item.shots:
        first += [{"role": "user", "content": asked}]
        first += [{"role": "assistant", "content": answer.strip()}]
    return [*first, {"role": "user", "content": item.question}]


@dataclass(frozen=True, slots=True)
class Asking:
    """By which API: as a chat, whose examples are turns (`is_multi_turn`), or as a text."""

    is_chat: bool
    is_multi_turn: bool = False
    system: str | None = None


async def ask(model: Model, item: Item, fields: Mapping[str, Any], how: Asking) -> Reply:
    """The reply to one item; a failed request gives a reply with an error."""
    reply, start_s = Reply(), time.perf_counter()
    body = {**fields, **item.fields}
    try:
        if item.choices:
            context = as_text(item)
            found = [await model.likelihood(context, choice) for choice in item.choices]
            reply.likelihoods = found
        elif how.is_chat:
            messages = as_messages(item, how.is_multi_turn, how.system)
            _read(reply, await model.chat(messages, body))
        else:
            _read(reply, await model.complete(as_text(item), body))
    except ConfigError:
        raise
    except RadixError as error:
        reply.error = str(error) or type(error).__name__
    reply.latency_s = time.perf_counter() - start_s
    return reply


def _read(reply: Reply, answer: Any) -> None:
    """Text, calls and token counts of an answer in OpenAI's form; RequestError for another."""
    if not isinstance(answer, dict) or not answer.get("choices"):
        raise RequestError(f"the answer has no choices: {str(answer)[:200]}")
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    message = choice.get("message") or {}
    reply.text = choice.get("text") or message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except (TypeError, ValueError):
            arguments = None
        reply.calls.append({"name": function["name"], "arguments": arguments})
    reply.num_prompt = usage.get("prompt_tokens") or 0
    reply.num_output = usage.get("completion_tokens") or 0
