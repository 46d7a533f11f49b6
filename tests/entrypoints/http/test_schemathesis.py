"""Requests generated from our OpenAPI document: no 5xx, and every answer matches the document."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from tests.fakes.http_server import listening, scripted_server

schemathesis = pytest.importorskip("schemathesis")

# these would stop, pause or slow the server for later calls; the last one has no end
LEFT_OUT = frozenset(("/pause_generation", "/slow_down", "/configure_logging", "/live/events"))
NUM_SLOW = 2000


class Server:
    """A real HTTP server in a thread with its own event loop."""

    def __init__(self, folder: Path, storage: Path) -> None:
        self._folder, self._storage = folder, storage
        self._ready, self._done = threading.Event(), threading.Event()
        self.url = ""
        self.num_live = -1
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        script = {"": "Hello there."}
        options: Any = {"file_storage_path": str(self._storage)}
        async with (
            scripted_server(self._folder, script, **options) as server,
            listening(server) as port,
        ):
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await asyncio.to_thread(self._done.wait)
            self.num_live = len(server.engine.intake.requests)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join(120)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with Server(folder / "model", folder / "kept") as made:
        yield made
    assert made.num_live == 0, "every request has ended"


def checks() -> list[Any]:
    found = schemathesis.checks
    return [
        found.not_a_server_error,
        found.status_code_conformance,
        found.content_type_conformance,
        found.response_headers_conformance,
        found.response_schema_conformance,
        found.negative_data_rejection,
    ]


def send(server: Server, per_mode: int) -> int:
    """Generated calls of every operation, `per_mode` valid ones and as many invalid ones; their
    number."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    count, wanted = 0, checks()
    failures: list[str] = []
    for found in document.get_all_operations():
        operation = found.ok()
        if operation.path in LEFT_OUT:
            continue
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @settings(
                max_examples=per_mode,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case: Any) -> None:
                nonlocal count
                count += 1
                case.validate_response(case.call(timeout=120), checks=wanted)

            try:
                one()
            except Unsatisfiable:
                pass  # a request without parameters cannot be invalid
            except (AssertionError, BaseExceptionGroup) as error:
                failures.append(f"{mode} {operation.label}: {error}\n{_inner(error)}")
    assert not failures, "\n\n".join(failures)
    return count


def _inner(error: BaseException) -> str:
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return "\n".join(f"{type(e).__name__}: {e}" for e in inner)


def test_some_generated_calls(running: Server) -> None:
    assert send(running, 1) >= 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_generated_calls(running: Server) -> None:
    assert send(running, 20) >= NUM_SLOW
