"""vLLM's routes: compared with OpenAI's, which compute the same."""

from __future__ import annotations

import asyncio

from tests.fakes.http_server import ScriptedServer

TOKENS = "/inference/v1/generate"


def _talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_batch_answers_each_conversation(server: ScriptedServer) -> None:
    talks = [_talk("stop me"), _talk("hello there")]
    path, options = "/v1/chat/completions", {"max_tokens": 5}
    alone = [(await server.post(path, messages=one, **options)).json() for one in talks]
    got = (await server.post(f"{path}/batch", messages=talks, **options)).json()
    for index, one in enumerate(alone):
        assert got["choices"][index] == one["choices"][0] | {"index": index}
    counts = [one["usage"]["total_tokens"] for one in alone]
    assert got["usage"]["total_tokens"] == sum(counts)
    for wrong, where in (
        ({"messages": talks, "stream": True}, "stream"),
        ({"messages": talks, "n": 2}, "n"),
        ({"messages": talks[0]}, "messages"),
        ({"messages": []}, "messages"),
    ):
        refused = await server.post(f"{path}/batch", **wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == where


async def test_rendered_requests_have_ids_and_sampling(server: ScriptedServer) -> None:
    options = {"temperature": 0.5, "max_tokens": 7, "stream": True}
    chat = await server.post("/v1/chat/completions/render", messages=_talk("hi"), **options)
    ids = (await server.post("/tokenize", messages=_talk("hi"))).json()["tokens"]
    shown = chat.json()
    assert shown["token_ids"] == ids and shown["stream"] is True
    assert shown["sampling_params"]["temperature"] == 0.5
    assert shown["sampling_params"]["max_tokens"] == 7
    texts = ["hi", "hi there"]
    rendered = (await server.post("/v1/completions/render", prompt=texts)).json()
    plain = [(await server.post("/tokenize", prompt=text)).json()["tokens"] for text in texts]
    assert [one["token_ids"] for one in rendered] == plain
    assert all(one["request_id"].startswith("cmpl-") for one in rendered)


async def test_rendered_requests_are_answered_in_token_ids(server: ScriptedServer) -> None:
    options = {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    shown = (await server.post("/v1/chat/completions", messages=_talk("hi"), **options)).json()
    rendered = (
        await server.post("/v1/chat/completions/render", messages=_talk("hi"), max_tokens=5)
    ).json()
    wanted = [one["token"] for one in shown["choices"][0]["logprobs"]["content"]]
    got = (await server.post(TOKENS, **rendered)).json()
    (choice,) = got["choices"]
    assert got["request_id"] == rendered["request_id"]
    assert [server.tokenizer.token_text(i) for i in choice["token_ids"]] == wanted
    assert choice["finish_reason"] == shown["choices"][0]["finish_reason"]
    assert got["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    chunks = await server.events(TOKENS, **rendered | {"request_id": "again"})
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]


async def test_token_ids_come_with_log_probabilities(server: ScriptedServer) -> None:
    for count in (0, 2):
        sampling = {"max_tokens": 3, "logprobs": count, "prompt_logprobs": 0, "detokenize": False}
        got = (await server.post(TOKENS, token_ids=[5, 6, 7], sampling_params=sampling)).json()
        content = got["choices"][0]["logprobs"]["content"]
        assert len(content) == len(got["choices"][0]["token_ids"])
        assert all(len(one["top_logprobs"]) == max(count, 1) for one in content)
        assert got["prompt_logprobs"][0] is None and len(got["prompt_logprobs"]) == 3
    many = {"n": 2, "max_tokens": 2, "temperature": 0.5}
    got = (await server.post(TOKENS, token_ids=[5], sampling_params=many)).json()
    assert [choice["index"] for choice in got["choices"]] == [0, 1]
    whole = (await server.post(TOKENS, token_ids=[5], sampling_params={"ignore_eos": True})).json()
    assert len(whole["choices"][0]["token_ids"]) > 16  # not the default of completions


async def test_all_tokens_of_the_vocabulary_are_shown(server: ScriptedServer) -> None:
    vocab, ids = server.state.intake.facts.vocab, [5, 6]
    sampling = {"max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1}
    tokens = (await server.post(TOKENS, token_ids=ids, sampling_params=sampling)).json()
    text = (await server.post("/v1/completions", prompt=ids, **sampling)).json()["choices"][0]
    asked = {"max_tokens": 1, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
    path = "/v1/chat/completions"
    chat = (await server.post(path, messages=_talk("hi"), **asked)).json()
    for whole, choice in ((tokens, tokens["choices"][0]), (text, text), (chat, chat["choices"][0])):
        first, second, *_ = whole["prompt_logprobs"]
        assert first is None and len(second) == vocab
        assert sorted(one["rank"] for one in second.values()) == list(range(1, vocab + 1))
        if choice is not text:
            assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == vocab
    named = text["logprobs"]["top_logprobs"][0]
    assert len(named) > vocab / 2  # some tokens share a text


async def test_prompt_logprobs_of_no_other_tokens_may_be_streamed(server: ScriptedServer) -> None:
    chunks = await server.events("/v1/completions", prompt="stop me", prompt_logprobs=0)
    assert chunks[-1]["choices"][0]["finish_reason"]


async def test_what_a_token_request_cannot_have(server: ScriptedServer) -> None:
    for wrong, param in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ):
        refused = await server.post(TOKENS, **wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    media = await server.post(TOKENS, token_ids=[1], features={"mm_hashes": {}})
    assert media.status_code == 501 and media.json()["error"]["param"] == "features"


async def test_load_counts_what_runs(server: ScriptedServer) -> None:
    async def load() -> int:
        return int((await server.client.get("/load")).json()["server_load"])

    assert await load() == 0
    body = {"prompt": "forever", "max_tokens": 2000, "ignore_eos": True}
    running = asyncio.create_task(server.post("/v1/completions", **body))
    async with asyncio.timeout(30):
        while await load() != 1:
            await asyncio.sleep(0)
        await running
    assert await load() == 0
