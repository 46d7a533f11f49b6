"""Token ids at the gateway: equal to the worker's, sent where both agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

import radixlm
from radixlm.base.record import replace
from radixlm.router import tokens_api
from radixlm.router.call import Call
from radixlm.router.gateway_tokenizer import GatewayTokenizer, is_plain
from radixlm.router.options import Options
from radixlm.text.chat import load_chat_template, prompt_digest
from radixlm.text.tokenizer import load_tokenizer
from tests.router.client import Response, ask
from tests.router.conftest import StartWorkers
from tests.router.front import Front

FOLDER = Path(radixlm.__file__).parent / "assets" / "radix-tiny"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Tell me of a river.\n\nAnd of <|im_end|> a bridge."},
]
CACHES = {"tokenizer_cache_enable_l0": True, "tokenizer_cache_enable_l1": True}


def expected(messages: list[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer = load_tokenizer(FOLDER)
    template = load_chat_template(tokenizer, None, FOLDER)
    return tokenizer.encode(template.render(messages, **options), template.adds_special_tokens)


def call_of(path: str, **fields: Any) -> Call:
    return Call("POST", path, "", [], orjson.dumps(fields))


@pytest.mark.parametrize("caches", [{}, CACHES, CACHES | {"tokenizer_cache_l1_max_memory": 3000}])
def test_ids_of_chats_are_those_of_the_worker(caches: dict[str, Any]) -> None:
    made = GatewayTokenizer("m", str(FOLDER), None, replace(Options(), **caches))
    messages: list[dict[str, Any]] = []
    for turn in range(12):
        messages += [
            {"role": "user", "content": f"Question {turn}: why?\n"},
            {"role": "assistant", "content": " Because <|im_start|>it is so." * turn},
        ]
        for _ in range(2):
            assert made.of_chat({"messages": messages}).tolist() == expected(messages)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    fields = {"messages": MESSAGES, "tools": tools, "add_generation_prompt": False}
    found = made.of_chat(fields).tolist()
    assert found == expected(MESSAGES, tools=tools, add_generation_prompt=False)
    assert made.of_chat(fields | {"tool_choice": "none"}).tolist() == expected(
        MESSAGES, add_generation_prompt=False
    )


def test_only_roles_and_texts_are_plain() -> None:
    assert is_plain({"messages": MESSAGES, "stream": True, "temperature": 0, "tools": None})
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    for other in (
        {},
        {"messages": []},
        {"messages": parts},
        {"messages": [*MESSAGES, {"role": "tool", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
        {"messages": MESSAGES, "tools": [{}]},
        {"messages": MESSAGES, "chat_template_kwargs": {}},
        {"messages": MESSAGES, "input_ids": [1]},
        {"messages": MESSAGES, "truncate_prompt_tokens": 5},
    ):
        assert not is_plain(other), other


def test_the_digest_tells_tokenizers_and_templates_apart(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(FOLDER)
    template = load_chat_template(tokenizer, None, FOLDER)
    other = load_chat_template(tokenizer, "chatml", FOLDER)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (FOLDER / name).is_file():
            (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    digest = prompt_digest(FOLDER, "auto", template)
    assert digest == prompt_digest(tmp_path, "auto", template)
    (tmp_path / "tokenizer_config.json").write_bytes(b"{}")
    others = {
        prompt_digest(FOLDER, "auto", other),
        prompt_digest(FOLDER, "slow", template),
        prompt_digest(tmp_path, "auto", template),
    }
    assert len(others | {digest}) == 4


async def post(front: Front, path: str, method: str = "POST", **fields: Any) -> Response:
    return await ask(front.url, method, path, fields)


async def test_ids_are_sent_beside_plain_messages_where_the_digests_agree(
    start_workers: StartWorkers,
) -> None:
    workers = await start_workers(1)
    front = Front(workers, policy="least_work", tokenizer_path=str(FOLDER))
    tokens_api.attach(front.gateway)
    async with front:
        [worker] = front.workers
        tokens = front.gateway.tokens
        digest = tokens.by_name[str(FOLDER)].digest

        async def sent(**fields: Any) -> Any:
            assert (await front.chat(messages=MESSAGES, **fields)).status == 200
            return orjson.loads(workers[0].seen[-1].body).get("input_ids")

        assert await sent() is None  # the worker tells no digest
        worker.facts["prompt_digest"] = digest
        assert await sent() == expected(MESSAGES)
        assert await sent(stream=True) == expected(MESSAGES)
        long = [*MESSAGES, {"role": "user", "content": "again " * 5000}]  # tokenized in a thread
        assert (await front.chat(messages=long)).status == 200
        assert orjson.loads(workers[0].seen[-1].body)["input_ids"] == expected(long)
        assert await sent(tools=[{"type": "function", "function": {"name": "f"}}]) is None
        worker.facts["prompt_digest"] = "another"
        assert await sent() is None
        text = front.gateway.metrics.exposition().decode()
        assert 'radix_router_ids_forwarded_total{reason="sent"} 3.0' in text
        assert 'radix_router_ids_forwarded_total{reason="digest"} 2.0' in text
        assert 'radix_router_ids_forwarded_total{reason="shape"} 1.0' in text


async def test_prompts_of_all_routes(start_workers: StartWorkers) -> None:
    front = Front(await start_workers(1), policy="least_work", tokenizer_path=str(FOLDER))
    tokens_api.attach(front.gateway)
    async with front:
        tokens = front.gateway.tokens
        made = tokens.by_name[str(FOLDER)]

        def ids_of(path: str, **fields: Any) -> tuple[list[int], bool]:
            prompt = tokens.prompt(call_of(path, **fields), made)
            return prompt.ids.tolist(), prompt.is_text

        tokenizer = load_tokenizer(FOLDER)
        assert ids_of("/generate", input_ids=[1, 2]) == ([1, 2], False)
        assert ids_of("/v1/completions", prompt=[3, 4]) == ([3, 4], False)
        assert ids_of("/generate", text="a river") == (tokenizer.encode("a river"), False)
        assert ids_of("/v1/completions", prompt="a river") == (tokenizer.encode("a river"), False)
        assert ids_of("/v1/chat/completions", messages=MESSAGES) == (expected(MESSAGES), False)
        assert ids_of("/v1/embeddings", input="ab") == (list(b"ab"), True)
        bad = [{"role": "user", "content": [{"type": "poem"}]}, {"role": "user", "content": "x"}]
        assert ids_of("/v1/chat/completions", messages=bad) == (list(b"x"), True)
        assert tokens.prompt(call_of("/generate"), made) is None
        space = tokens.prompt(
            call_of("/generate", text="x", cache_salt="s", extra_key="e", lora_path="poet"), made
        ).namespace
        assert space == ("poet", "s", "e")


async def test_tokenizer_routes(start_workers: StartWorkers) -> None:
    front = Front(await start_workers(1))
    tokens_api.attach(front.gateway)
    async with front:
        assert (await post(front, "/v1/tokenizers", "GET")).json == {"tokenizers": []}
        refused = await post(front, "/v1/tokenizers", name="org/m")
        assert refused.status == 400 and "source" in refused.json["error"]["message"]
        lost = (await post(front, "/v1/tokenizers", name="org/m", source="/nowhere")).json["id"]
        added = await post(front, "/v1/tokenizers", name="org/m", source=str(FOLDER))
        key = added.json["id"]
        assert added.status == 202

        async def status(name: str) -> str:
            while True:
                found = (await post(front, f"/v1/tokenizers/{name}/status", "GET")).json
                if found["status"] != "pending":
                    return str(found["status"])

        assert (await status(lost), await status(key)) == ("failed", "completed")
        assert (await post(front, "/v1/tokenizers", name="org/m", source="x")).status == 409
        ids = load_tokenizer(FOLDER).encode("a river")
        one = (await post(front, "/v1/tokenize", prompt="a river")).json
        assert one == {"tokens": ids, "count": len(ids), "char_count": 7}
        many = (await post(front, "/v1/tokenize", prompt=["a river", ""])).json
        assert many["tokens"][0] == ids and many["count"][0] == len(ids)
        assert (await post(front, "/v1/detokenize", tokens=ids)).json == {"text": "a river"}
        back = (await post(front, "/v1/detokenize", tokens=[ids, ids])).json
        assert back == {"text": ["a river"] * 2}
        for bad in ([-1], ["a"], 3, [[1], 2], [1 << 40]):
            assert (await post(front, "/v1/detokenize", tokens=bad)).status == 400, bad
        assert (await post(front, "/v1/tokenize", prompt=[1])).status == 400
        assert (await post(front, "/v1/tokenizers/org%2Fm", "GET")).json["source"] == str(FOLDER)
        assert (await post(front, "/v1/tokenizers/org%2Fm", "DELETE")).json["success"]
        assert (await post(front, "/v1/tokenizers/org%2Fm", "GET")).status == 404
        assert (await post(front, "/v1/tokenizers/org%2Fm", "DELETE")).status == 404


def test_prompts_are_int32() -> None:
    made = GatewayTokenizer("m", str(FOLDER), None, Options())
    assert made.of_chat({"messages": MESSAGES}).dtype == np.int32


async def test_a_worker_that_is_gone_cannot_tokenize(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    front = Front([worker])
    tokens_api.attach(front.gateway)
    async with front:
        await worker.kill()
        assert (await post(front, "/v1/tokenize", prompt="x")).status == 503
