"""One scripted server for each test; its start is cheap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.entrypoints.http.openai import generate
from radixlm.intake.records import GenerateRequest

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SCRIPT = {
    "sum please": f"I will add. {CALL}",
    "two calls": f"{CALL}\n{CALL}",
    "think about": "It is simple.\n</think>\n\nThe answer is 42.",
    "stop me": "one two STOP three",
    "grüße": "Grüße 😀 aus Köln",
    "forever": "la ",
}


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest_asyncio.fixture
async def server(toy_folder: Path) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(toy_folder, SCRIPT) as made:
        yield made


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """What intake is asked for."""
    seen: list[GenerateRequest] = []
    collect = generate.collect

    async def spy(state: Any, requests: Any) -> Any:
        seen.extend(requests)
        return await collect(state, requests)

    monkeypatch.setattr(generate, "collect", spy)
    return seen
