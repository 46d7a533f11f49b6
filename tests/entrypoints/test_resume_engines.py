"""Streams that go on at a second engine of the same model, with all that decides about tokens:
seeds, penalties, grammars, stops, adapters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tests.fakes.cut_streams import check_all_cuts, timeless
from tests.fakes.lockstep import LockstepLink
from tests.fakes.lora_adapters import write_adapter

from radixlm.config.server_config import ServerConfig
from radixlm.engine import launch
from radixlm.engine.launch import ThreadEngine, intake_tokenizer
from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL, resolved
from radixlm.entrypoints.http.app import create_app

MODEL = ASSETS / DEFAULT_MODEL
pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
HOT = 2.0  # two draws differ
DIGITS = re.compile(rb"(-?\d+\.\d+(?:e-?\d+)?)")


@asynccontextmanager
async def serving(adapter: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    given = {
        "model_path": str(MODEL),
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "cpu_threads": 1,
        "lora_paths": [f"mine={adapter}"],
        "num_continuous_decode_steps": 1,  # events are compared one by one
        **options,
    }
    config, info = resolved(ServerConfig.from_kwargs(**given), frozenset(given))
    tokenizer = intake_tokenizer(config, info)
    engine = ThreadEngine(config, info, tokenizer)
    await engine.start()
    try:
        await asyncio.wait_for(engine.intake.ready.wait(), 120)
        app = create_app(config, info, tokenizer, engine.intake)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as client:
            yield client
    finally:
        await engine.stop()


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "Tell me of the sea."}], "max_tokens": 24}
    return "/v1/chat/completions", body | fields


def generate(path: str = "/generate", **fields: Any) -> tuple[str, dict[str, Any]]:
    sampling = {"max_new_tokens": 20, "temperature": HOT, "ignore_eos": True} | fields
    return path, {"text": "The sea is", "sampling_params": sampling}


def schema(**properties: Any) -> dict[str, Any]:
    shape = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": shape}}


WORD = {"type": "string", "maxLength": 6}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"a": WORD}, "required": ["a"]}}}  # fmt: skip
KINDS = {
    "greedy": chat(temperature=0),
    "drawn seed": generate(),
    "several": chat(temperature=HOT, n=2),
    "penalties": chat(
        temperature=HOT, seed=3, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3
    ),
    "bias": chat(temperature=HOT, seed=2, logit_bias={"300": 4.0}, min_tokens=12, top_k=30),
    "schema": chat(temperature=HOT, response_format=schema(name=WORD, ok={"type": "boolean"})),
    "tool": chat(temperature=HOT, tools=[TOOL], tool_choice="required", max_tokens=40),
    "regex": generate(regex="[a-z]{3}( [a-z]{2,5}){2}", ignore_eos=False),
    "stop": generate(stop=["e"], no_stop_trim=True, sampling_seed=11),
    "words": generate(bad_words=["the"], frequency_penalty=1.0, min_new_tokens=4),
    "adapter": ("/generate", generate()[1] | {"lora_path": "mine"}),
    "logprobs": (
        "/generate",
        generate(temperature=0.0)[1]
        | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["The sea is", "A ship"], "max_tokens": 12, "n": 2, "temperature": HOT},
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "Tell me of the sea."}],
            "max_tokens": 20,
            "temperature": 1.0,
        },
    ),
    "responses": ("/v1/responses", {"input": "Tell me of the sea.", "max_output_tokens": 20}),
}
SEVERAL = ("several", "completions")


def close(data: bytes) -> bytes:
    """Without times; of log-probabilities three digits: KV that was computed as a prefill differs
    from that of single tokens in the last bits."""
    return DIGITS.sub(lambda m: b"%.3f" % float(m[1]), timeless(data))


def some(count: int) -> Sequence[int]:
    return sorted({1, 2, count // 3, count // 2, count - 2, count - 1, count})


async def check(clients: Sequence[httpx.AsyncClient], kind: str) -> None:
    path, fields = KINDS[kind]
    await check_all_cuts(
        clients[0],
        clients[1],
        path,
        orjson.dumps({"stream": True} | fields),
        cuts=some,
        has_choices=kind in SEVERAL,
        plain=close if kind == "logprobs" else timeless,
    )


async def test_a_second_engine_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(launch, "ThreadLink", LockstepLink)
    adapter = write_adapter(MODEL, tmp_path / "adapter", 4)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(serving(adapter)) for _ in range(2)]
        path, fields = KINDS["drawn seed"]
        drawn = [(await clients[0].post(path, json=fields)).json()["output_ids"] for _ in range(2)]
        assert drawn[0] != drawn[1]
        for kind in KINDS:
            await check(clients, kind)


async def test_disjoint_answers_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(launch, "ThreadLink", LockstepLink)
    adapter = write_adapter(MODEL, tmp_path / "adapter", 4)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(serving(adapter, stream_output=True)) for _ in range(2)
        ]
        for kind in ("regex", "stop", "logprobs"):
            await check(clients, kind)
