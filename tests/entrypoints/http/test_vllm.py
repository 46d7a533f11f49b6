"""vLLM's routes: compared with OpenAI's, which compute the same."""

from __future__ import annotations

from tests.fakes.http_server import ScriptedServer


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
