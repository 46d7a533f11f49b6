"""The bundled vision-language model through a real server and every API."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from tests.end_to_end.server import RunningServer

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "zoo"))
images = pytest.importorskip("images")
sys.path.pop(0)

COLOURS = ("red", "green", "blue", "yellow")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("--enable-cache-report", model="radix-tiny-vl") as running:
        yield running


def image(colour: str, shape: str = "circle", seed: int = 1) -> str:
    """A PNG of one shape, base64."""
    drawn = images.shapes(Random(seed), [(shape, colour)])
    data = io.BytesIO()
    Image.fromarray(drawn.pixels).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def turn(*parts: dict[str, Any] | str) -> dict[str, Any]:
    made = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": made}


def url(colour: str, **kind: Any) -> dict[str, Any]:
    data = f"data:image/png;base64,{image(colour, **kind)}"
    return {"type": "image_url", "image_url": {"url": data}}


def chat(server: RunningServer, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 20}
    answer = server.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_colours_are_named(server: RunningServer) -> None:
    seen = {
        colour: text_of(chat(server, [turn(url(colour), "What colour is the shape?")]))
        for colour in COLOURS
    }
    assert sum(colour == answer for colour, answer in seen.items()) >= 3, seen


def test_a_second_turn_reuses_the_image(server: RunningServer) -> None:
    first = turn(url("red", seed=7), "What colour is the shape?")
    answer = chat(server, [first])
    again = [
        first,
        {"role": "assistant", "content": text_of(answer)},
        {"role": "user", "content": "How many shapes are there?"},
    ]
    assert chat(server, again)["usage"]["prompt_tokens_details"]["cached_tokens"] > 64


def test_images_that_differ_share_nothing(server: RunningServer) -> None:
    ask = "Which shape is it?"
    chat(server, [turn(url("blue", seed=8), ask)])
    other = chat(server, [turn(url("green", seed=8), ask)])
    details = other["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    assert details["cached_tokens"] < 64


def test_the_openai_client_streams_the_answer(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: Any = [turn(url("yellow", seed=3), "What colour is the shape?")]
    stream = client.chat.completions.create(
        model="radix-tiny-vl", messages=messages, temperature=0, max_tokens=8, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == text_of(chat(server, messages))


def test_every_api_reads_the_same(server: RunningServer) -> None:
    ask, data = "What colour is the shape?", image("red", seed=5)
    want = text_of(chat(server, [turn(url("red", seed=5), ask)]))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    claude = server.post(
        "/v1/messages",
        model="radix-tiny-vl",
        max_tokens=20,
        temperature=0,
        messages=[turn({"type": "image", "source": source}, ask)],
    )
    assert claude.json()["content"][0]["text"] == want
    llama = server.post(
        "/api/chat",
        model="radix-tiny-vl",
        stream=False,
        options={"temperature": 0},
        messages=[{"role": "user", "content": ask, "images": [data]}],
    )
    assert llama.json()["message"]["content"] == want
    item = {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
            {"type": "input_text", "text": ask},
        ],
    }
    answer = server.post("/v1/responses", input=[item], temperature=0, max_output_tokens=20)
    assert answer.json()["output"][-1]["content"][0]["text"] == want
    prompt = (
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{ask}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    native = server.post(
        "/generate",
        text=prompt,
        image_data=data,
        sampling_params={"temperature": 0, "max_new_tokens": 20},
    )
    assert native.json()["text"] == want


@pytest.mark.parametrize(
    "source",
    ["http://127.0.0.1:1/x.png", "file:///etc/passwd", "/etc/passwd", "not base64!", "AAAA", ""],
)
def test_what_is_no_image_is_refused_by_name(server: RunningServer, source: str) -> None:
    part = {"type": "image_url", "image_url": {"url": source}}
    answer = server.post("/v1/chat/completions", messages=[turn(part, "What is it?")])
    assert answer.status_code == 400, answer.text
    assert "messages[0].content[0]" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--tp-size", "2"), ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")],
    ids=["ranks", "attention groups"],
)
def test_ranks_see_what_one_sees(server: RunningServer, flags: tuple[str, ...]) -> None:
    """Tokens and log-probabilities, of images alone and with a prefix hit."""

    def answers(running: RunningServer) -> list[Any]:
        asks = ("What colour is the shape?", "Which shape is it?")
        bodies = [
            {"messages": [turn(url(colour, seed=9), ask)], "temperature": 0, "logprobs": True}
            for colour in COLOURS[:2]
            for ask in asks
        ]
        return [running.post("/v1/chat/completions", **body).json()["choices"] for body in bodies]

    with RunningServer(*flags, "--cpu-threads", "1", model="radix-tiny-vl") as ranks:
        assert answers(ranks) == answers(server)
