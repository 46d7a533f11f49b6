"""--warmups: named functions and functions of the operator, before the server is ready."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.base.errors import ConfigError
from radixlm.config.parser import parse
from radixlm.config.states import check_states
from radixlm.entrypoints.http.warmups import run_warm_ups, warm_ups

MODULE = """
called = []

async def good(intake):
    called.append(intake)

async def bad(intake):
    raise RuntimeError("no luck")

def plain(intake):
    pass
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_warm_ups.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_warm_ups", raising=False)
    return "own_warm_ups"


def test_names_that_are_not_known_do_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    check_states(parse(["--warmups", "voice_chat,gone"])[0])
    assert [name for name, _ in warm_ups("voice_chat, gone,")] == ["voice_chat"]
    assert "no function 'gone'; there are voice_chat" in caplog.text


def test_paths_that_cannot_be_imported_do(own_module: str) -> None:
    for path, reason in (
        ("no_such_module_x:f", "ModuleNotFoundError"),
        (f"{own_module}:gone", "AttributeError"),
        (f"{own_module}:plain", "write an async function"),
    ):
        with pytest.raises(ConfigError, match=f"--warmups {path}: .*{reason}"):
            warm_ups(path)


async def test_warm_ups_send_requests_and_may_fail(
    toy_folder: Path, own_module: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_server(toy_folder, {}) as server:
        intake = server.engine.intake
        sizes: list[int] = []
        collect = intake.collect

        async def counted(request, *args):  # type: ignore[no-untyped-def]
            sizes.append(len(request.input_ids))
            return await collect(request, *args)

        intake.collect = counted  # type: ignore[method-assign]
        functions = warm_ups(f"{own_module}:bad,voice_chat,{own_module}:good")
        await run_warm_ups(functions, intake)
        assert sys.modules[own_module].called == [intake]
        assert sizes == list(range(4, intake.facts.context_len - 29, 4))
        assert "no luck" in caplog.text


async def test_the_server_is_not_ready_while_it_warms_up(server: ScriptedServer) -> None:
    server.state.is_warm = False
    for path in ("/ready", "/health"):
        got = await server.client.get(path)
        assert got.status_code == 503 and "warm-ups" in got.text
    server.state.is_warm = True
    for path in ("/ready", "/health"):
        assert (await server.client.get(path)).status_code == 200
