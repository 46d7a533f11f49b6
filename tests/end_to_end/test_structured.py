"""Structured output of a real server at a high temperature: every finished output must match its
grammar.

The bundled model at temperature 1.5, through every API, streamed and not. Outputs cut by their
length are counted apart, because they are prefixes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.end_to_end.server import RunningServer

pytestmark = pytest.mark.skipif(
    not (ASSETS / DEFAULT_MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
MAX_TOKENS = 700
WORD = {"type": "string", "maxLength": 8}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Any] = {
    "flat": record(name=WORD, ok={"type": "boolean"}, nothing={"type": "null"}),
    "nested": record(a=record(b=record(c=record(d=WORD)))),
    "enum": record(kind={"enum": ["a", "b c", 3, None, {"x": [1]}]}, const={"const": "fixed"}),
    "array": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 4},
    "limits": record(
        percent={"type": "integer", "minimum": 0, "maximum": 100},
        cold={"type": "number", "minimum": -273.15, "exclusiveMaximum": 0},
    ),
    "pattern": record(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "format": record(day={"type": "string", "format": "date"}),
    "ref": {
        "$defs": {
            "leaf": record(value={"type": "integer", "minimum": 0, "maximum": 9}),
            "pair": record(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
        },
        "$ref": "#/$defs/pair",
    },
    "anyOf": record(id={"anyOf": [{"type": "integer", "minimum": 1, "maximum": 999}, WORD]}),
    "optional": {
        "type": "object",
        "properties": {"a": WORD, "b": {"type": "boolean"}, "c": {"enum": [1, 2]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [WORD, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "propertyNames": {"maxLength": 5},
        "maxProperties": 3,
    },
}
REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no)( indeed){0,3}",
    r"\d{1,3}(\.\d{1,3}){3}",
    r"[α-ω]{2,6}",
]
SUMS = 'root ::= term ("+" term){0,4}\nterm ::= num | "(" num "*" num ")"\nnum ::= [0-9]{1,3}'
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<call>", "schema": record(n={"enum": [1, 2, 3]}), "end": "</call>"},
    ],
    "triggers": ["<call>"],
    "at_least_one": True,
}
Checker = Callable[[str], None]


@dataclass(frozen=True)
class Form:
    """A constraint as sampling parameters and as `response_format`, with a check of the output."""

    name: str
    native: dict[str, Any]
    openai: dict[str, Any]
    check: Checker


def by_schema(schema: Any) -> Checker:
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker(["date"])
    )
    return lambda text: checker.validate(json.loads(text))


def by_regex(pattern: str) -> Checker:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def check_tag(text: str) -> None:
    """Free text may follow the first call; every whole call must match."""
    calls = re.findall(r"<call>(.*?)</call>", text, re.DOTALL)
    assert calls and text.startswith("<call>"), text
    for call in calls:
        by_schema(TAG["structures"][0]["schema"])(call)


def forms() -> list[Form]:
    found = []
    for name, schema in SCHEMAS.items():
        wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        found.append(
            Form(name, {"json_schema": json.dumps(schema)}, {"response_format": wrapped},
                 by_schema(schema))
        )  # fmt: skip
    for pattern in REGEXES:
        given = {"regex": pattern}
        found.append(Form(pattern, given, given, by_regex(pattern)))
    sums = by_regex(r"(\d{1,3}|\(\d{1,3}\*\d{1,3}\))(\+(\d{1,3}|\(\d{1,3}\*\d{1,3}\))){0,4}")
    found.append(Form("ebnf", {"ebnf": SUMS}, {"ebnf": SUMS}, sums))
    tag = {"structural_tag": json.dumps(TAG)}
    found.append(Form("tag", tag, {"response_format": TAG}, check_tag))
    return found


FORMS = forms()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = ("--max-total-tokens", "1536", "--schedule-conservativeness", "0.1")
    with RunningServer(*options) as running:
        yield running


def generate(client: httpx.Client, form: Form, seed: int, stream: bool) -> tuple[str, str]:
    """Text and finish reason by /generate."""
    params = {"temperature": 1.5, "max_new_tokens": MAX_TOKENS, "sampling_seed": seed}
    body = {"text": f"Item {seed}: ", "sampling_params": params | form.native, "stream": stream}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    final = events(answer)[-1] if stream else answer.json()
    return final["text"], final["meta_info"]["finish_reason"]["type"]


def complete(client: httpx.Client, form: Form, seed: int, stream: bool) -> tuple[str, str]:
    """The same by /v1/completions."""
    body = {"model": "radix-tiny", "prompt": "Write: ", "temperature": 1.5, "seed": seed}
    return openai(client, "/v1/completions", body, form, stream)


def chat(client: httpx.Client, form: Form, seed: int, stream: bool) -> tuple[str, str]:
    """The same by /v1/chat/completions."""
    messages = [{"role": "user", "content": f"Give me item {seed}."}]
    body = {"model": "radix-tiny", "messages": messages, "temperature": 1.5, "seed": seed}
    return openai(client, "/v1/chat/completions", body, form, stream)


def openai(
    client: httpx.Client, path: str, body: dict[str, Any], form: Form, stream: bool
) -> tuple[str, str]:
    body |= {"max_tokens": MAX_TOKENS, "stream": stream} | form.openai
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    texts, reason = [], ""
    for piece in events(answer) if stream else [answer.json()]:
        for choice in piece["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts.append(said.get("content") or "")
            reason = choice["finish_reason"] or reason
    return "".join(texts), reason


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


APIS = (generate, complete, chat)


def run_all(server: RunningServer, rounds: int) -> tuple[int, int]:
    """Run every form `rounds` times; how many ended by their grammar, and how many were cut."""
    plan = [(form, number) for number in range(rounds) for form in FORMS]
    ways = list(itertools.product(APIS, (False, True)))

    def one(job: tuple[int, tuple[Form, int]]) -> bool:
        place, (form, number) = job
        api, stream = ways[(place + number) % len(ways)]
        text, reason = api(server.client, form, 1000 * number + place, stream)
        if reason == "stop":
            form.check(text)
        else:
            assert reason == "length", (form.name, reason)
        return reason == "stop"

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(one, enumerate(plan)))
    return sum(ended), len(ended) - sum(ended)


def test_every_form_once_and_more(server: RunningServer) -> None:
    ended, cut = run_all(server, 2)
    assert ended + cut == 2 * len(FORMS)
    assert cut <= 4  # free text after a tag may never end


@pytest.mark.slow
def test_three_hundred(server: RunningServer) -> None:
    ended, cut = run_all(server, -(-330 // len(FORMS)))
    print(f"\n{ended} ended by their grammar and fit it, {cut} were cut by their length")
    assert ended >= 300


def test_samples_logprobs_and_the_prefix_cache(server: RunningServer) -> None:
    """n samples with log-probabilities, twice; the second time the prompt is cached."""
    schema = SCHEMAS["limits"]
    params = {"temperature": 1.5, "max_new_tokens": 200, "n": 4, "json_schema": json.dumps(schema)}
    body = {"text": "Weather today. " * 20, "sampling_params": params, "return_logprob": True}
    for _ in range(2):
        answers = server.post("/generate", **body).json()
        assert len(answers) == 4
        for answer in answers:
            info = answer["meta_info"]
            assert len(info["output_token_logprobs"]) == len(answer["output_ids"])
            if info["finish_reason"]["type"] == "stop":
                by_schema(schema)(answer["text"])
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in answers)


def test_more_than_the_cache_holds(server: RunningServer) -> None:
    """Long answers in a small cache: retracted requests continue where they were."""
    colours: dict[str, Any] = {"type": "array", "items": {"enum": ["red", "blue", 1, 2.5]}}
    schema = colours | {"minItems": 25, "maxItems": 25}
    before = server.info()["num_retracted_reqs"]
    params = {"temperature": 1.5, "max_new_tokens": 600, "json_schema": json.dumps(schema)}
    texts = [f"Colours {i}: " for i in range(24)]
    answers = server.post("/generate", text=texts, sampling_params=params).json()
    ended = [a["text"] for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    for text in ended:
        by_schema(schema)(text)
    assert len(ended) >= 20
    assert server.info()["num_retracted_reqs"] > before


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_then_the_grammar(server: RunningServer, stream: bool) -> None:
    """Reasoning is free, the answer is not; a budget ends the reasoning."""
    form = Form("sum", {}, {"regex": "[0-9]{2}"}, by_regex("[0-9]{2}"))
    body = {
        "model": "radix-tiny",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "custom_logit_processor": "thinking_budget",
        "custom_params": {"thinking_budget": 20},
        "temperature": 1.0,
        "seed": 5,
        "n": 2,
    }
    answer = server.post(
        "/v1/chat/completions", **body, **form.openai, max_tokens=100, stream=stream
    )
    assert answer.status_code == 200, answer.text
    said: dict[int, dict[str, str]] = {}
    for piece in events(answer) if stream else [answer.json()]:
        for choice in piece["choices"]:
            whole = said.setdefault(choice["index"], {"content": "", "reasoning_content": ""})
            part = choice.get("delta") or choice.get("message") or {}
            for name in whole:
                whole[name] += part.get(name) or ""
    assert len(said) == 2 and any(whole["reasoning_content"] for whole in said.values())
    for whole in said.values():
        form.check(whole["content"].strip())
        assert "think>" not in whole["content"] + whole["reasoning_content"]


def test_any_object(server: RunningServer) -> None:
    params = {"temperature": 1.5, "max_new_tokens": 300, "json_schema": "$$ANY$$"}
    answers = server.post("/generate", text=["{"] * 6, sampling_params=params).json()
    for answer in answers:
        assert answer["text"].startswith("{")
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert isinstance(json.loads(answer["text"]), dict)


@pytest.mark.parametrize("extra", [{}, {"custom_logit_processor": "disallowed_tokens"}], ids=str)
def test_a_killed_engine_changes_no_character(server: RunningServer, extra: dict[str, Any]) -> None:
    """The grammar continues from the tokens that were sent, including forced ones."""
    names = ["first_name", "family_name", "favourite_colour"]
    schema = record(**{f"{name}_{i}": {"enum": ["a", "b"]} for i in range(8) for name in names})
    params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": MAX_TOKENS}
    params |= {"json_schema": json.dumps(schema), "custom_params": {"token_ids": [5]}}
    body = {"text": "x", "sampling_params": params, "stream": True} | extra
    whole = [events(server.post("/generate", **body))[-1]["text"]]
    num_seen = 0
    with server.client.stream("POST", "/generate", json=body) as answer:
        for line in answer.iter_lines():
            num_seen += line.startswith("data: {")
            if num_seen == 12:
                server.engine().kill()
                num_seen += 1
            if line.startswith("data: {"):
                whole.append(json.loads(line[6:])["text"])
    assert whole[-1] == whole[0] and num_seen > 14
    by_schema(schema)(whole[-1])
    server.wait_ready()
