"""Profiles: start, step counts, stop, and what cannot be profiled."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm.base.errors import InvalidRequest
from radixlm.engine.profile import Profiler


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_PROFILER_DIR", str(tmp_path))


@pytest.fixture
def profiler() -> Profiler:
    return Profiler(torch.device("cpu"))


def _names(path: str) -> set[str]:
    with gzip.open(path) as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def _step(profiler: Profiler, size: int) -> None:
    profiler.count()
    torch.ones(size).cumsum(0)


def test_a_trace_holds_what_ran_between_start_and_stop(profiler: Profiler, tmp_path: Path) -> None:
    profiler.start({"output_dir": str(tmp_path / "new"), "profile_id": "x"})
    _step(profiler, 3)
    (file,) = profiler.stop({})["files"]
    assert Path(file).name == "x-TP-0.trace.json.gz"
    assert "aten::cumsum" in _names(file)


def test_replicas_have_files_of_their_own(tmp_path: Path) -> None:
    second = Profiler(torch.device("cpu"), 1, replica=2)
    second.start({"output_dir": str(tmp_path), "profile_id": "x"})
    (file,) = second.stop({})["files"]
    assert Path(file).name == "x-DP-2-TP-1.trace.json.gz"


def test_steps_are_counted(profiler: Profiler, tmp_path: Path) -> None:
    _step(profiler, 1)
    profiler.start({"output_dir": str(tmp_path), "start_step": 3, "num_steps": 2})
    for size in range(2, 7):
        _step(profiler, size)
    (file,) = tmp_path.iterdir()
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    # steps 3 and 4 of the engine; the trace ended by itself
    assert sum(event.get("name") == "aten::cumsum" for event in events) == 2
    with pytest.raises(InvalidRequest, match="no profile"):
        profiler.stop({})


def test_one_at_a_time(profiler: Profiler, tmp_path: Path) -> None:
    profiler.start({"output_dir": str(tmp_path), "num_steps": 1})
    with pytest.raises(InvalidRequest, match="being taken"):
        profiler.start({"output_dir": str(tmp_path)})
    # stopped before its first step, so nothing was traced
    assert profiler.stop({})["files"] == []


def test_names_do_not_leave_the_folder(profiler: Profiler, tmp_path: Path) -> None:
    profiler.start({"output_dir": str(tmp_path), "profile_prefix": "../../a", "profile_id": "/b"})
    (file,) = profiler.stop({})["files"]
    assert Path(file) == tmp_path / "a-b-TP-0.trace.json.gz"


@pytest.mark.parametrize("asked", ["..", "a/../..", "link/x", "/", "a\0b"])
def test_folders_outside_of_the_configured_one_are_refused(
    profiler: Profiler, tmp_path: Path, asked: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path.parent)
    with pytest.raises(InvalidRequest, match="output_dir"):
        profiler.start({"output_dir": str(tmp_path / asked)})
    assert not (tmp_path.parent / "x").exists()


@pytest.mark.parametrize(
    "args",
    [
        {"activities": ["RPD"]},
        {"activities": ["GPU"]},
        {"profile_stages": ["idle"]},
        {"output_dir": "/dev/null/x"},
    ],
)
def test_unsupported_activities_are_refused(profiler: Profiler, args: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        profiler.start(args)
    with pytest.raises(InvalidRequest, match="no profile"):
        profiler.stop({})


def test_graph_captures_are_traced_on_request_only(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXLM_PROFILER_DIR", str(tmp_path))
    with profiler.of_graphs(False):
        torch.ones(2).cumsum(0)
    assert not list(tmp_path.iterdir())
    with profiler.of_graphs(True):
        torch.ones(2).cumsum(0)
    assert len(list(tmp_path.glob("graphs-*.trace.json.gz"))) == 1


def test_each_stage_has_a_trace(profiler: Profiler, tmp_path: Path) -> None:
    profiler.start({"output_dir": str(tmp_path), "profile_by_stage": True, "num_steps": 2})
    # a prompt; decodes; a prompt again, which is not traced any more; more decodes
    for size, is_decode in enumerate([False, True, True, True, False, True], 2):
        profiler.count(is_decode)
        torch.ones(size).cumsum(0)
        if size == 6:
            assert len(list(tmp_path.iterdir())) == 2
    counts = {}
    for path in tmp_path.iterdir():
        with gzip.open(path) as stream:
            events = json.load(stream)["traceEvents"]
        stage = path.name.rpartition("-")[2]
        counts[stage] = sum(event.get("name") == "aten::cumsum" for event in events)
    assert counts == {"EXTEND.trace.json.gz": 1, "DECODE.trace.json.gz": 2}
    with pytest.raises(InvalidRequest, match="no profile"):
        profiler.stop({})


def test_memory_is_part_of_a_trace_without_a_gpu(profiler: Profiler, tmp_path: Path) -> None:
    profiler.start({"output_dir": str(tmp_path), "activities": ["MEM"]})
    _step(profiler, 30)
    (file,) = profiler.stop({})["files"]
    assert {"aten::cumsum", "[memory]"} <= _names(file)


def test_a_folder_that_cannot_be_written_fails_no_step(
    profiler: Profiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    profiler.start({"output_dir": str(folder), "num_steps": 1})
    _step(profiler, 1)
    folder.rmdir()
    _step(profiler, 2)  # the trace would be written here
    assert "the profile is lost" in caplog.text and str(folder) in caplog.text
    profiler.start({"output_dir": str(folder)})
    folder.rmdir()
    with pytest.raises(InvalidRequest, match=r"output_dir: .*gone: No such file"):
        profiler.stop({})
    folder.write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"output_dir: .*gone: File exists"):
        profiler.start({"output_dir": str(folder)})
    folder.unlink()
    profiler.start({"output_dir": str(folder)})
    assert profiler.stop({})["files"]
