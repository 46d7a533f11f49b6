"""Drawn requests of all kinds beside each other in drawn engines with real drafters: predictions,
sessions, adapters that come and go, grammars, priorities and several tokens a step give the answers
of a plain engine that decodes token by token."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

import radixlm
from radixlm.engine.model_info import ASSETS, ZOO
from tests.engine.test_drafted_engine import facts
from tests.engine.test_drafted_pairs import WORDS, draw
from tests.engine.test_drafted_worlds import DrawnLength

ADAPTERS = {name: ZOO / f"radix-tiny-lora-{name}" for name in ("upper", "spanish")}
NEEDED = (ASSETS / "radix-tiny", ZOO / "radix-tiny-draft", ZOO / "radix-tiny-eagle3")
pytestmark = pytest.mark.skipif(
    not all(folder.is_dir() for folder in (*NEEDED, *ADAPTERS.values())),
    reason="the bundled models are not built",
)
HEADS = ("the a of one two " * 9, "Is a cat on the house? " * 5, "")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
KINDS = ("generate", "generate", "generate", "chat", "chat", "session", "adapter")
Task = tuple[str, str, dict[str, Any], float]  # kind, name, fields, seconds to wait


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def draw_chat(rng: random.Random) -> dict[str, Any]:
    """With a prediction."""
    text = words(rng, 4, 30)
    predicted = rng.choice([text, text + " and more", text[::2], text.split(" ", 2)[-1]])
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Repeat: {text}"}],
        "temperature": rng.choice([0, 0, 0.7, 1.3]),
        "seed": rng.randrange(1 << 30),
        "max_tokens": rng.choice([6, 20, 50]),
        "logprobs": rng.random() < 0.3,
        "prediction": {"type": "content", "content": predicted},
    }
    if rng.random() < 0.2:
        schema = {"name": "person", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body | ({"frequency_penalty": 0.7} if rng.random() < 0.2 else {})


def draw_task(rng: random.Random, name: str) -> Task:
    one, kind = draw(rng), rng.choice(KINDS)
    body = {
        "prompt": rng.choice(HEADS) + one["prompt"],
        "sampling_params": one["sampling"],
        "return_logprob": one["logprobs"],
        "top_logprobs_num": 2,
        "custom_logit_processor": one["processor"],
    }
    if kind == "chat":
        body = draw_chat(rng)
    elif kind != "generate":
        one["sampling"].pop("n", None)
    if kind == "session":
        body["turns"] = [words(rng, 1, 8) for _ in range(rng.choice([1, 2]))]
        body["is_stream"] = rng.random() < 0.3
    elif kind == "adapter":
        body["adapter"] = rng.choice(sorted(ADAPTERS))
    body["priority"] = rng.choice([0, 0, 1, 5, -3])
    return kind, name, body, rng.choice([0, 0, 0, 0.01, 0.05, 0.2])


async def chat(engine: radixlm.Engine, body: dict[str, Any]) -> Any:
    found = await engine.async_chat(**body)
    choice, usage = found["choices"][0], found["usage"]
    counts = usage["completion_tokens"], usage.get("completion_tokens_details")
    return choice["message"]["content"], choice["finish_reason"], choice.get("logprobs"), counts


async def session(engine: radixlm.Engine, body: dict[str, Any]) -> Any:
    turns, is_stream = body.pop("turns"), body.pop("is_stream")
    name = await asyncio.to_thread(engine.open_session, 4000, streaming=is_stream)
    found = await engine.async_generate(**body, session_params={"id": name})
    answers = [facts(found)]
    for turn in turns:
        params = {"id": name, "rid": None if is_stream else found["meta_info"]["id"]}
        found = await engine.async_generate(**body | {"prompt": turn}, session_params=params)
        answers.append(facts(found))
    await asyncio.to_thread(engine.close_session, name)
    return answers


async def adapted(engine: radixlm.Engine, name: str, body: dict[str, Any]) -> Any:
    await asyncio.to_thread(engine.load_lora_adapter, name, str(ADAPTERS[body.pop("adapter")]))
    found = await engine.async_generate(**body, lora_path=name)
    await asyncio.to_thread(engine.unload_lora_adapter, name)
    return facts(found)


def ask(engine: radixlm.Engine, tasks: list[Task], is_plain: bool) -> list[Any]:
    """All at once; as a plain engine, without priorities and pauses."""

    async def one(kind: str, name: str, body: dict[str, Any], wait_s: float) -> Any:
        body = {key: value for key, value in body.items() if key != "priority" or not is_plain}
        await asyncio.sleep(0 if is_plain else wait_s)
        if kind == "chat":
            return await chat(engine, body)
        if kind == "session":
            return await session(engine, body)
        if kind == "adapter":
            return await adapted(engine, name, body)
        found = await engine.async_generate(**body)
        return [facts(each) for each in (found if isinstance(found, list) else [found])]

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(*task) for task in tasks))

    answers = asyncio.run(every())
    assert engine.get_server_info()["internal_states"][0]["num_breaches"] == 0
    return answers


def draw_world(rng: random.Random) -> dict[str, Any]:
    world: dict[str, Any] = {
        "page_size": rng.choice([1, 4, 16]),
        "max_total_tokens": rng.choice([640, 900, 4096]),
        "max_running_requests": rng.choice([2, 5, 16]),
        "chunked_prefill_size": rng.choice([8, 24, 48, None]),
        "num_continuous_decode_steps": rng.choice([1, 5, 16, None]),
        "disable_radix_cache": rng.random() < 0.3,
        "disable_jump_forward": rng.random() < 0.3,
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": rng.choice([2, 10]),
    }
    drafter = rng.choice([None, "NGRAM", "NGRAM", "EAGLE3", "STANDALONE"])
    if drafter is not None:
        world["speculative_algorithm"] = drafter
        world["speculative_num_steps"] = rng.choice([None, 2, 4, 7])
    if drafter in ("EAGLE3", "STANDALONE") and rng.random() < 0.3:
        world |= {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
        world["speculative_num_steps"] = 3
    return {name: value for name, value in world.items() if value is not None}


def play(seed: int, count: int) -> None:
    rng = random.Random(seed)
    tasks = [draw_task(rng, f"a{number}") for number in range(count)]
    options: dict[str, Any] = {"model_path": "radix-tiny", "cpu_threads": 1, "random_seed": 1}
    options |= {"log_level": "error", "enable_lora": True, "max_lora_rank": 64}
    options |= rng.choice([{}, {"kv_cache_dtype": "int8"}, {"quantization": "w8a8_int8"}])
    with radixlm.Engine(**options, max_total_tokens=16384, num_continuous_decode_steps=1) as engine:
        plain = ask(engine, tasks, is_plain=True)
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.6:
            patch.setattr("radixlm.engine.drafting.DraftLength", DrawnLength)
        with radixlm.Engine(**options, **draw_world(rng)) as engine:
            wide = ask(engine, tasks, is_plain=False)
    for task, ours, theirs in zip(tasks, wide, plain, strict=True):
        assert ours == theirs, json.dumps(task)


def test_drawn_company() -> None:
    play(3, 7)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 140))
def test_much_drawn_company(seed: int) -> None:
    play(seed, 40)
