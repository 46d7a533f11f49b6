"""The crash dump recorder: what it keeps, for how long, what it writes, and where it refuses."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from radixlm.config.server_config import ServerConfig
from radixlm.engine import crash_dump
from radixlm.engine.crash_dump import Recorder
from radixlm.intake.request_state import RequestState
from radixlm.wire.replies import Finish
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams

CONFIG = ServerConfig.from_kwargs(model_path="m", api_key="sesame")


class Case:
    """A recorder with a fake clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.requests: dict[str, RequestState] = {}
        self.recorder = Recorder(folder, CONFIG, lambda: self.requests.values(), lambda: self.now_s)

    def begin(self, rid: str, prompt: list[int], output: list[int]) -> RequestState:
        sampling = SamplingParams(max_new_tokens=9, sampling_seed=7)
        state = RequestState(TokenizedRequest(rid, pack_ids(prompt), sampling), 0, None, None)
        state.arrival_s, state.output_ids = self.now_s, output
        self.requests[rid] = state
        return state

    def end(self, rid: str) -> None:
        self.recorder.ended(self.requests.pop(rid), Finish("length"))

    def rids(self) -> list[str]:
        return [entry.wire.rid for entry in self.recorder.entries()]


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_dump_holds_header_ended_and_running(tmp_path: Path) -> None:
    case = Case(tmp_path / "dumps")
    case.begin("a", [1, 2], [3])
    case.now_s += 1
    case.begin("b", [4], [5, 6])
    case.end("b")
    path = case.recorder.write("why", case.recorder.entries())
    header, a, b = _lines(path)
    assert (header["radixlm_requests"], header["reason"], header["num_requests"]) == (1, "why", 2)
    assert "sesame" not in path.read_text()
    assert (a["rid"], a["input_ids"], a["output_ids"]) == ("a", [1, 2], [3])
    assert a["finish_reason"] is None and b["finish_reason"]["kind"] == "length"  # type: ignore[index]
    assert a["sampling_params"] == {"max_new_tokens": 9, "sampling_seed": 7}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_requests_that_ended_five_minutes_ago_are_dropped(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for rid in "ab":
        case.begin(rid, [1], [2])
    case.end("a")
    case.now_s += 299
    assert case.rids() == ["a", "b"]
    case.now_s += 2
    assert case.rids() == ["b"], "what runs is never forgotten"


def test_memory_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_dump, "MAX_BYTES", 10_000)
    monkeypatch.setattr(crash_dump, "MAX_FILES", 3)
    case = Case(tmp_path)
    for i in range(100):
        case.begin(f"r{i}", [1] * 100, [2] * 50)
        case.end(f"r{i}")
    assert case.rids() == [f"r{i}" for i in range(100 - 10_000 // (400 + 400 + 512), 100)]
    for _ in range(5):
        last = case.recorder.write("again", case.recorder.entries())
    assert len(list(tmp_path.iterdir())) == 3 and last.exists()


def test_a_lost_engine_writes_in_the_background(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.begin("a", [1], [])
    case.recorder.engine_lost("the engine died")
    case.recorder.wait()
    (path,) = tmp_path.iterdir()
    assert _lines(path)[0]["reason"] == "the engine died"


def test_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(tmp_path)
    case.begin("a", [1], [])

    def full(record: object, began: float) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crash_dump, "as_record", full)
    case.recorder.engine_lost("the engine died")
    case.recorder.wait()
    assert "No space left" in caplog.text and not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        case.recorder.write("asked", case.recorder.entries())
