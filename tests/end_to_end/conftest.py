"""One server of the bundled model for all client tests."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.end_to_end.server import RunningServer


@pytest.fixture(scope="session")
def client_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of the bundled model. Its log must not contain a traceback."""
    if not (ASSETS / DEFAULT_MODEL / "config.json").is_file():
        pytest.skip("the bundled model is not here")
    folder = tmp_path_factory.mktemp("clients")
    args = ("--max-total-tokens", "16384", "--file-storage-path", str(folder))
    with RunningServer(*args, "--enable-cache-report") as server:
        yield server.url
        log = "".join(server.log)
    assert "Traceback" not in log, log


@pytest.fixture(scope="session")
def vector_url() -> Iterator[str]:
    """Address of a server of the bundled embedding model."""
    model = Path(__file__).parents[2] / "zoo" / "models" / "radix-tiny-embed"
    if not (model / "config.json").is_file():
        pytest.skip("the model that gives vectors is not here")
    with RunningServer("--is-embedding", model=str(model)) as server:
        yield server.url


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Ignore connections that third-party frameworks leave open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            gc.collect()
