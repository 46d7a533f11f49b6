"""A full disk: files, batches, responses and dumps fail with an honest status, generation goes on,
and waiting work resumes with free space. The disk is a small tmpfs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixlm.engine.features.inflight_log import InflightLog, read_inflight_rid
from radixlm.entrypoints.http.batches import runner
from tests.fakes.http_server import ScriptedServer, scripted_server

CHAT = "/v1/chat/completions"
HONEST = (503, 507)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk; returns the file to delete to make room again."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            return path
    raise AssertionError("the disk has no end")


async def _answers(server: ScriptedServer) -> bool:
    got = await server.post("/generate", text="hi", sampling_params={"max_new_tokens": 3})
    return got.status_code == 200


async def _upload(server: ScriptedServer, content: bytes) -> Any:
    files = {"file": ("in.jsonl", content)}
    return await server.client.post("/v1/files", files=files, data={"purpose": "batch"})


async def _responses_until_full(server: ScriptedServer) -> Any:
    """Post responses until the store's own pages are full too."""
    for _ in range(100):
        answer = await server.post("/v1/responses", input="hi" * 900)
        if answer.status_code != 200:
            return answer
    raise AssertionError("the store has no end")


def _line(name: str) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body})


async def test_files_dumps_and_responses_report_a_full_disk(toy_folder: Path, disk: Path) -> None:
    options = {"file_storage_path": str(disk / "files"), "crash_dump_folder": str(disk / "dumps")}
    async with scripted_server(toy_folder, {}, **options) as server:
        assert (await _upload(server, b"x")).status_code == 200
        assert (await server.post("/v1/responses", input="hi")).status_code == 200
        assert (await server.post("/dump_requests")).status_code == 200
        filler = fill(disk)
        for answer in (
            await _upload(server, b"x" * 50_000),
            await server.post("/dump_requests"),
            await _responses_until_full(server),
        ):
            assert answer.status_code in HONEST, answer.text
            assert "error" in answer.json()
            assert await _answers(server)
        filler.unlink()
        assert (await _upload(server, b"x")).status_code == 200
        assert (await server.post("/v1/responses", input="hi")).status_code == 200
        made = (await server.post("/dump_requests")).json()
        lines = Path(made["path"]).read_text().splitlines()
        assert len(lines) == 1 + made["num_requests"]
        assert not list((disk / "dumps").glob("*.part"))


async def test_a_batch_waits_for_room_and_loses_no_line(
    toy_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FULL_DISK_S", 0.0)
    full_times: list[bool] = []
    run = runner.Batches._run_unless_disk_fails

    async def watched(batches: Any, server_state: Any, record: Any) -> bool:
        has_ended = await run(batches, server_state, record)
        full_times.append(not has_ended)
        return has_ended

    monkeypatch.setattr(runner.Batches, "_run_unless_disk_fails", watched)
    # most lines are open after the first answer
    monkeypatch.setattr("tests.fakes.http_server.SLOW_S", 0.05)
    async with scripted_server(toy_folder, {}, file_storage_path=str(disk)) as server:
        names = [f"line-{i}" for i in range(30)]
        text = "\n".join(map(_line, names)).encode()
        file_id = (await _upload(server, text)).json()["id"]
        server.engine.executor.is_slow = True
        order = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await server.post("/v1/batches", **order)).json()

        async def state() -> Any:
            return (await server.client.get(f"/v1/batches/{batch['id']}")).json()

        async with asyncio.timeout(120):
            while not (await state())["request_counts"]["completed"]:
                await asyncio.sleep(0.002)
            filler = fill(disk)
            server.engine.executor.is_slow = False
            while len(full_times) < 3:  # what was open is answered while the disk is full
                await asyncio.sleep(0)
            assert all(full_times)
            assert (await state())["status"] == "in_progress" and await _answers(server)
            filler.unlink()
            while (await state())["status"] != "completed":
                await asyncio.sleep(0.005)
        found = await state()
        assert found["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        content = await server.client.get(f"/v1/files/{found['output_file_id']}/content")
        rows = [json.loads(line) for line in content.text.splitlines()]
        assert sorted(row["custom_id"] for row in rows) == sorted(names)


def test_the_inflight_log_works_without_its_file(disk: Path) -> None:
    """A sparse file would be written much later and kill the engine with SIGBUS."""
    fill(disk)
    flight = InflightLog(disk / "flight")
    flight._write("r")
    assert flight.current == "r" and read_inflight_rid(disk / "flight") is None


def test_the_inflight_log_works_without_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flight = InflightLog(tmp_path / "gone" / "flight")
    flight._write("r")
    assert flight.current == "r" and "No such file" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_on_a_full_disk_raises_nothing() -> None:
    program = (
        "import logging\nfrom radixlm.base.log import set_up_logging\nset_up_logging('test')\n"
        "logging.getLogger('radixlm.test').info('x' * 100_000)\nprint('goes on')\n"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full)
    assert done.stdout == b"goes on\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_server_whose_log_is_on_a_full_disk(unused_tcp_port: int) -> None:
    script = f"""
import subprocess, sys, time, urllib.request, json, signal
command = [sys.executable, "-m", "radixlm", "serve", "--port", "{unused_tcp_port}",
           "--max-total-tokens", "4096", "--cpu-threads", "1", "--log-requests"]
server = subprocess.Popen(command, stderr=open("/dev/full", "w"))
body = json.dumps({{"text": "a", "sampling_params": {{"max_new_tokens": 2}}}}).encode()
for _ in range(600):
    time.sleep(0.2)
    try:
        urllib.request.urlopen("http://127.0.0.1:{unused_tcp_port}/ready", timeout=5)
        break
    except OSError:
        assert server.poll() is None, server.poll()
answer = urllib.request.urlopen(urllib.request.Request(
    "http://127.0.0.1:{unused_tcp_port}/generate", body), timeout=60)
assert answer.status == 200
server.send_signal(signal.SIGTERM)
print("left with", server.wait(60))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert "left with 0" in done.stdout, done.stdout + done.stderr
