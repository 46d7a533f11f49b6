"""The unmodified openai client against a real server of the bundled model."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.fakes.http_server import scripted_server

pytestmark = pytest.mark.skipif(
    not (ASSETS / DEFAULT_MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
SUM: Any = [{"role": "user", "content": "What is 17 + 25?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on a free port; it must drain and exit with status 0."""
    command = [sys.executable, "-m", "radixlm", "serve", "--port", "0"]
    command += ["--max-total-tokens", "16384", "--enable-metrics", "--enable-cache-report"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        found = re.search(r"ready in .*: (http://\S+) serves", line)
        if found:
            break
    else:
        raise AssertionError("".join(lines))
    yield found.group(1)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=300)[1]
    assert process.returncode == 0, rest
    assert "Traceback" not in rest, rest


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=300) as made:
        yield made


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=300) as answer:
        return answer.read().decode()


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(model=DEFAULT_MODEL, messages=SUM)
    assert got.choices[0].finish_reason == "stop" and got.usage
    chunks = list(
        client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=SUM,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == got.choices[0].message.content
    usage: Any = chunks[-1].usage
    assert usage.completion_tokens == got.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0, "the second time from the cache"


def test_a_seed_gives_the_same_samples(client: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        got = client.completions.create(
            model=DEFAULT_MODEL, prompt="The", n=3, seed=seed, temperature=2.0, max_tokens=12
        )
        return [choice.text for choice in got.choices]

    first = sample(7)
    assert first == sample(7) and len(set(first)) > 1


def test_a_prediction_changes_the_steps_and_no_character(client: openai.OpenAI, url: str) -> None:
    story: Any = [{"role": "user", "content": "Write a short story about a cat."}]
    fixed: Any = {"model": DEFAULT_MODEL, "messages": story, "seed": 3, "max_tokens": 120}

    def ask(text: str | None) -> tuple[str, Any, int]:
        before = json.loads(get(url, "/get_server_info"))["internal_states"][0]["num_steps"]
        more: Any = {} if text is None else {"prediction": {"type": "content", "content": text}}
        got = client.chat.completions.create(**fixed, **more)
        assert got.usage is not None
        after = json.loads(get(url, "/get_server_info"))["internal_states"][0]["num_steps"]
        return got.choices[0].message.content or "", got.usage, after - before

    text, usage, num_plain = ask(None)
    again, counted, num_steps = ask(text)
    assert again == text and num_steps <= num_plain
    assert counted.completion_tokens == usage.completion_tokens
    details = counted.completion_tokens_details
    assert details.accepted_prediction_tokens > 0.8 * usage.completion_tokens
    edited = text[: len(text) // 3] + " But no." + text[len(text) // 2 :]
    again, counted, num_steps = ask(edited)
    assert again == text and num_steps <= num_plain
    assert counted.completion_tokens_details.rejected_prediction_tokens > 0


def test_logprobs_belong_to_the_text(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=SUM, logprobs=True, top_logprobs=3, temperature=0
    )
    logprobs = got.choices[0].logprobs
    assert logprobs and logprobs.content
    for entry in logprobs.content:
        best = entry.top_logprobs[0]
        assert entry.token == best.token and entry.logprob == best.logprob <= 0
        assert len(entry.top_logprobs) == 3


def test_a_token_that_is_none_of_the_likeliest_comes_first(client: openai.OpenAI) -> None:
    got = client.completions.create(
        model=DEFAULT_MODEL, prompt="Say 'Hello, world!'", echo=True, logprobs=1, max_tokens=3
    )
    logprobs = got.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.top_logprobs
    rows = logprobs.top_logprobs[1:]
    assert {len(row) for row in rows} == {1, 2}
    assert [next(iter(row)) for row in rows] == logprobs.tokens[1:]


def test_a_sampling_mask_holds_the_token_that_was_drawn(client: openai.OpenAI) -> None:
    mask = {"return_sampling_mask": True, "top_k": 3}
    wanted = {**mask, "return_meta_info": True, "return_token_ids": True}
    got = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=SUM, temperature=2, seed=1, max_tokens=8, extra_body=wanted
    )
    choice = got.choices[0].model_dump()
    masks = choice["meta_info"]["output_token_sampling_mask"]
    assert len(masks) == len(choice["response_token_ids"])
    assert choice["logprobs"] is None
    for token, kept in zip(choice["response_token_ids"], masks, strict=True):
        assert token in kept and len(kept) == 3
    for refused in (mask, {**wanted, "top_k": -1}):
        with pytest.raises(openai.BadRequestError, match="return_sampling_mask"):
            client.chat.completions.create(
                model=DEFAULT_MODEL, messages=SUM, temperature=2, extra_body=refused
            )


def test_parse_gives_a_model_of_pydantic(client: openai.OpenAI) -> None:
    got = client.chat.completions.parse(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        temperature=0.5,
        seed=1,
        max_tokens=300,
    )
    assert isinstance(got.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_is_valid(client: openai.OpenAI, choice: Any) -> None:
    got = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Weather in Paris?"}],
        tools=[TOOL],
        tool_choice=choice,
        max_tokens=200,
    )
    call: Any = (got.choices[0].message.tool_calls or [None])[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": -1},
        {"max_tokens": 10**9},
        {"extra_body": {"regex": "(((("}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "no"}},
            }
        },
    ],
)
def test_bad_requests_are_bad_requests(client: openai.OpenAI, extra: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=DEFAULT_MODEL, messages=SUM, **extra)


def test_an_unknown_field_is_ignored_and_named(client: openai.OpenAI) -> None:
    asked: Any = {"model": DEFAULT_MODEL, "messages": SUM, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    got = client.chat.completions.with_raw_response.create(**asked, extra_body={"nonsense": 1})
    assert got.http_response.status_code == 200
    assert got.headers["X-RadixLM-Ignored"] == "nonsense"
    assert got.parse().choices[0].message == plain.choices[0].message


def test_an_unknown_model_is_the_served_one(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(model="gpt-99", messages=SUM, temperature=0)
    known = client.chat.completions.create(model=DEFAULT_MODEL, messages=SUM, temperature=0)
    assert got.model == known.model == DEFAULT_MODEL
    assert got.choices[0].message == known.choices[0].message


async def test_strict_flags_refuse_both(tmp_path: Path) -> None:
    strict = {"unknown_fields": "refuse", "strict_model_name": True}
    async with scripted_server(tmp_path, {}, **strict) as made:
        client = openai.AsyncOpenAI(
            base_url="http://127.0.0.1/v1", api_key="x", max_retries=0, http_client=made.client
        )
        name = (await client.models.list()).data[0].id
        with pytest.raises(openai.BadRequestError, match="nonsense"):
            await client.chat.completions.create(
                model=name, messages=SUM, extra_body={"nonsense": 1}
            )
        with pytest.raises(openai.NotFoundError, match="gpt-99"):
            await client.chat.completions.create(model="gpt-99", messages=SUM)


def used_tokens(url: str) -> int:
    """Tokens that running requests hold after a flush of the cache."""
    text = get(url, "/flush_cache")
    assert text.startswith("Cache flushed.")
    facts = json.loads(get(url, "/get_server_info"))["internal_states"][0]
    assert facts["num_running_reqs"] == facts["num_waiting_reqs"] == facts["num_breaches"] == 0
    return int(facts["num_used_tokens"])


async def test_a_mix_of_good_bad_and_leaving_clients_leaks_nothing(url: str) -> None:
    before = used_tokens(url)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=300)

    async def one(i: int) -> str:
        body: Any = {"model": DEFAULT_MODEL, "messages": SUM, "max_tokens": 8}
        kinds: list[Any] = [{}, {"temperature": -1}, {"n": 2}, {"extra_body": {"regex": "("}}]
        body |= kinds[i % 5] if i % 5 < 4 else {"stream": True, "max_tokens": 500}
        try:
            got: Any = await client.chat.completions.create(**body)
            if i % 5 == 4:
                await anext(aiter(got))
                await got.close()
            return "ok"
        except openai.BadRequestError:
            return "bad"

    async with asyncio.timeout(200):
        kinds = await asyncio.gather(*(one(i) for i in range(60)))
    await client.close()
    assert kinds.count("bad") == 24 and kinds.count("ok") == 36
    async with asyncio.timeout(60):
        while True:
            facts = json.loads(get(url, "/get_server_info"))["internal_states"][0]
            if not facts["num_running_reqs"] + facts["num_waiting_reqs"]:
                break
            await asyncio.sleep(0.05)
    assert used_tokens(url) == before


def test_metrics_count_the_requests(url: str) -> None:
    text = get(url, "/metrics")
    found = re.search(r"sglang:num_requests_total\{.*\} (\d+)", text)
    assert found and int(found.group(1)) > 10
