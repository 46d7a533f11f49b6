"""``prompt_embeds`` of /v1/completions: vectors in the place of a prompt, in files as of vLLM."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from tests.fakes.http_server import EMBED_DIM, ScriptedServer

from radixlm.intake.records import GenerateRequest

PATH = "/v1/completions"
ROWS = torch.arange(3 * EMBED_DIM).reshape(3, EMBED_DIM) / 8


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def by_torch(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return coded(buffer.getvalue())


def by_numpy(value: Any) -> str:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return coded(buffer.getvalue())


async def test_files_of_three_kinds_are_read(
    server: ScriptedServer, asked_for: list[GenerateRequest]
) -> None:
    files = [by_torch(ROWS), by_torch(ROWS[None].bfloat16()), by_numpy(ROWS.numpy()),
             coded(save({"x": ROWS.half()}))]  # fmt: skip
    got = await server.post(PATH, prompt=None, prompt_embeds=files, max_tokens=2)
    assert got.status_code == 200, got.text
    assert [one["index"] for one in got.json()["choices"]] == [0, 1, 2, 3]
    assert got.json()["usage"]["prompt_tokens"] == 12
    for request in asked_for:
        assert request.num_embeds == 3 and request.embeds is not None
        rows = np.frombuffer(request.embeds, "<f4").reshape(3, EMBED_DIM)
        np.testing.assert_array_equal(rows, ROWS.numpy())


async def test_vectors_come_before_texts_and_may_be_streamed(
    server: ScriptedServer, asked_for: list[GenerateRequest]
) -> None:
    file = by_torch(ROWS)
    both = await server.post(PATH, prompt="stop me", prompt_embeds=file, max_tokens=3)
    assert both.status_code == 200 and len(both.json()["choices"]) == 2
    assert asked_for[0].num_embeds == 3 and asked_for[1].input_ids
    alone = await server.post(PATH, prompt_embeds=file, max_tokens=3)
    chunks = await server.events(PATH, prompt_embeds=file, max_tokens=3)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == alone.json()["choices"][0]["text"] == both.json()["choices"][0]["text"]
    none = await server.post(PATH, prompt="stop me", prompt_embeds=[], max_tokens=3)
    assert none.json()["choices"][0]["text"] == both.json()["choices"][1]["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt_embeds": "no base64"}, "prompt_embeds"),
        ({"prompt_embeds": coded(b"text")}, "prompt_embeds"),
        ({"prompt_embeds": [by_torch(ROWS), by_torch({"x": ROWS})]}, "prompt_embeds[1]"),
        ({"prompt_embeds": by_torch(ROWS[0])}, "prompt_embeds"),
        ({"prompt_embeds": by_torch(ROWS.long())}, "prompt_embeds"),
        ({"prompt_embeds": by_torch(ROWS * float("nan"))}, "prompt_embeds"),
        ({"prompt_embeds": by_torch(ROWS[:, 1:].clone())}, "prompt_embeds"),
        ({"prompt_embeds": by_torch(ROWS), "echo": True}, "echo"),
        ({"prompt_embeds": by_torch(ROWS), "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_is_refused(server: ScriptedServer, fields: dict[str, Any], param: str) -> None:
    got = await server.post(PATH, **fields)
    assert got.status_code == 400 and got.json()["error"]["param"] == param, got.text
