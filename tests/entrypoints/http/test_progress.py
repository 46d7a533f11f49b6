"""Comments about long prompts in a stream, for clients that ask for them."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from tests.fakes.http_server import ScriptedServer

from radixlm.entrypoints.http import progress
from radixlm.live_feed.rows import RequestRows

ASKED = {"X-Prefill-Progress": "yes"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "stop me"}]},
    "/generate": {"text": "stop me", "sampling_params": {"temperature": 0}},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_rest_is_what_others_get(
    server: ScriptedServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0)
    body = BODIES[path] | {"stream": True}
    plain, told = [
        (await server.client.post(path, json=body, headers=headers)).text for headers in ({}, ASKED)
    ]
    comments = re.findall(r"^: (.*)\n\n", told, re.MULTILINE)
    assert all(re.fullmatch(r"queued|prefill \d+ of \d+", one) for one in comments)
    assert ": " not in {line[:2] for line in plain.splitlines()}
    assert _said(told) == _said(plain) != ""


def _said(stream: str) -> str:
    """The text of a stream, however it is cut."""
    said = ""
    for line in stream.splitlines():
        if line.startswith("data: {"):
            data = orjson.loads(line[6:])
            said = data["text"] if "text" in data else said + _delta(data)
    return said


def _delta(data: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in data["choices"])


async def test_a_comment_comes_until_the_first_event(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0)
    first = asyncio.get_running_loop().create_future()
    told = progress.comments(first, server.state)
    assert [await anext(told), await anext(told)] == [b": queued\n\n"] * 2
    first.set_result(b"")
    assert [one async for one in told] == []


async def test_an_error_comes_in_the_stream(server: ScriptedServer) -> None:
    body = {"text": "x", "sampling_params": {"temperature": -1}, "stream": True}
    answer = await server.client.post("/generate", json=body, headers=ASKED)
    assert "temperature" in answer.text and answer.status_code in (200, 400)


def test_the_prompt_counts_what_is_computed() -> None:
    rows = RequestRows()
    wire = SimpleNamespace(input_ids=[1] * 90, adapter=None, priority=0, tenant=None)
    state: Any = SimpleNamespace(
        rid="a", wire=wire, arrival_s=1.0, prompt_tokens=90, output_ids=[], finished_s=0.0
    )
    rows.submitted(state)
    row = rows.rows["a"]
    done = []
    for moment in (
        ("a", "prefill", 2.0, 3.0, 32, 16),  # 16 were cached
        ("a", "prefill", 3.0, 0.0, 32, 48),  # announced
        ("a", "prefill", 3.0, 4.0, 32, 48),
        ("a", "retracted", 5.0, 0.0, 0, 0),
        ("a", "prefill", 6.0, 7.0, 90, 0),
    ):
        rows.scheduled(state, moment)
        done.append(row.prefilled)
    assert done == [48, 48, 80, 0, 90]
