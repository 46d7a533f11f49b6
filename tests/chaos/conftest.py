from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.http_server import ScriptedServer, scripted_server


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest_asyncio.fixture
async def server(toy_folder: Path) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(toy_folder, {}) as made:
        yield made
