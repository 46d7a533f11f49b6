"""`radixlm profile`: its requests, what it waits for, and the traces that it joins."""

from __future__ import annotations

import io
import json
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from radixlm.base.errors import ConfigError
from radixlm.entrypoints import profile
from radixlm.entrypoints.cli import main

HELLO = {"now_s": 100.0, "unix_s": 1000.0}
STEPS = {
    "replica": 0,
    "index": [7, 8],
    "columns": {
        "start_s": [101.0, 101.5], "plan_ms": [1.0, 1.0], "prepare_ms": [2.0, 0.0],
        "model_ms": [3.0, 4.0], "sample_ms": [0.5, 0.5], "commit_ms": [0.25, 0.25],
        "wait_ms": [0.0, 9.0], "decodes": [0, 2], "prefill_tokens": [5, 0],
    },
}  # fmt: skip


class Server:
    """Answers as a server does; its ranks write files at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, written: int = 2) -> None:
        self.ranks, self.written, self.seen = ranks, written, list[tuple[str, Any]]()
        monkeypatch.setattr(urllib.request, "urlopen", self)

    def __call__(self, request: urllib.request.Request, timeout: float) -> io.BytesIO:
        return io.BytesIO(self._answer(request).encode())

    def _answer(self, request: urllib.request.Request) -> str:
        assert request.data is None or isinstance(request.data, bytes)
        body, path = json.loads(request.data or b"{}"), urlsplit(request.full_url).path
        self.seen.append((path, body))
        if path == "/get_server_info":
            return json.dumps({"tp_size": self.ranks, "dp_size": 1})
        if path == "/live/events":
            parts = (("hello", HELLO), ("steps", STEPS), ("steps", STEPS))
            return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in parts)
        if path == "/start_profile" and body["num_steps"] > 100:
            said = io.BytesIO(b"num_steps: too many")
            raise HTTPError(request.full_url, 400, "Bad Request", Message(), said)
        if path == "/start_profile":
            for rank in range(self.written):
                event = {"name": "op", "pid": 9, "tid": 1, "ph": "X", "ts": 5.0, "dur": 1.0}
                flow = {"name": "ac2g", "pid": 9, "ph": "s", "ts": 5.0, "id": 3}
                trace = {"traceEvents": [event, flow], "baseTimeNanoseconds": 1000 * rank}
                file = Path(body["output_dir"]) / f"1.0-TP-{rank}.trace.json.gz"
                profile.write(file, trace)
        return "ok"


def test_traces_of_ranks_and_the_hosts_steps_become_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch)
    args = ["--output-dir", str(tmp_path), "--profile-name", "a", "--num-steps", "3", "--no-gpu"]
    assert main(["profile", *args, "--mem"]) == 0
    path, body = server.seen[1]
    assert path == "/start_profile" and body["activities"] == ["CPU", "MEM"]
    assert (body["num_steps"], body["profile_by_stage"]) == (3, False)
    folder = Path(body["output_dir"])
    assert folder.parent == tmp_path / "a"
    assert json.loads((folder / "server_args.json").read_text())["tp_size"] == 2
    joined = profile.read(folder / "merged.trace.json.gz")
    assert str(folder / "merged.trace.json.gz") in capsys.readouterr().out
    ops = [event for event in joined["traceEvents"] if event["name"] == "op"]
    assert [op["ts"] for op in ops] == [5.0, 6.0] and ops[0]["pid"] != ops[1]["pid"]
    assert len({event["id"] for event in joined["traceEvents"] if "id" in event}) == 2
    names = {e["pid"]: e["args"]["name"] for e in joined["traceEvents"] if e["ph"] == "M"}
    assert names[ops[1]["pid"]] == "1.0-TP-1: 9" and profile.HOST in str(names)


def test_a_step_is_a_slice_with_its_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(monkeypatch)
    assert main(["profile", "--output-dir", str(tmp_path), "--steps-only"]) == 0
    assert [path for path, _ in server.seen] == ["/live/events"]
    (path,) = tmp_path.glob("*/steps.trace.json.gz")
    events = profile.read(path)["traceEvents"]
    whole = next(event for event in events if event["name"] == "step 7")
    assert whole["ts"] == 1001e6 and whole["dur"] == 6750.0 and whole["args"]["prefill_tokens"] == 5
    inner = [e for e in events if e["ph"] == "X" and e is not whole][:6]
    assert [e["name"] for e in inner] == ["plan", "prepare", "model", "sample", "commit", "wait"]
    assert inner[2]["ts"] == 1001e6 + 3000 and inner[2]["dur"] == 3000
    assert inner[-1]["ts"] + inner[-1]["dur"] == whole["ts"] + whole["dur"]


def test_what_does_not_come_and_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch, written=1)
    assert main(["profile", "--output-dir", str(tmp_path), "--timeout", "0"]) == 1
    assert "only 1 of 2 traces" in capsys.readouterr().out
    assert server.seen[-1][0] == "/stop_profile"
    for args, message in (
        (["--rpd"], "AMD"),
        (["--num-steps", "200", "--output-dir", str(tmp_path)], "400 num_steps: too many"),
        (["--url", "localhost:30000"], "--url localhost:30000"),
    ):
        with pytest.raises(ConfigError, match=message):
            profile.main(args)


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--url", "http://127.0.0.1:1"]) == 2
    assert "--url http://127.0.0.1:1" in capsys.readouterr().err
