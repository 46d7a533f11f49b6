"""A hub on loopback with the bundled model as org/radix-tiny, and an empty cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from radixlm.engine.model_info import ASSETS
from radixlm.hub import fetch, hf_remote
from tests.fakes.hub import FakeHub, folder_files, running_hub

TINY = ASSETS / "radix-tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Any) -> Iterator[FakeHub]:
    with running_hub() as running:
        running.add("org/radix-tiny", folder_files(TINY))
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(fetch, "PAUSES_S", (0.0,))
        monkeypatch.setattr(hf_remote, "PAUSES_S", (0.0,) * 3)
        yield running
