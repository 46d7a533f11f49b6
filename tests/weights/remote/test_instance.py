"""Weights from a running server: the files that it serves from, with its key, while it answers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from safetensors.torch import load_file, save_file
from tests.weights.remote.conftest import packed

from radixlm.base.errors import CheckpointError, ConfigError, RadixError
from radixlm.config.serve import ServeConfig
from radixlm.config.server_config import ServerConfig
from radixlm.engine.located import locate_all
from radixlm.entrypoints.http.admin import weight_files
from radixlm.entrypoints.http.errors import error_response
from radixlm.entrypoints.http.middleware import RequestMiddleware
from radixlm.weights.remote.instance import InstanceReader
from radixlm.weights.remote.place import read_place
from radixlm.wire.weights import WeightsSource

FILE = "model.safetensors"
KEY = "seed-key"


class Seed:
    """The routes of a server of ``folder``, on a port of their own."""

    def __init__(self, folder: Path) -> None:
        weights = SimpleNamespace(source=None)
        self.state = SimpleNamespace(
            config=ServerConfig(),
            info=SimpleNamespace(folder=folder),
            intake=SimpleNamespace(weights=weights),
            weight_version="v7",
            started_s=time.time() + 60,
        )
        app = FastAPI()
        app.include_router(weight_files.router)
        app.state.server = self.state
        app.add_exception_handler(
            RadixError, lambda request, error: error_response(error, request.url.path)
        )
        guarded = RequestMiddleware(app, ServeConfig(admin_api_key=KEY))
        self.server = uvicorn.Server(
            uvicorn.Config(guarded, port=0, log_level="error", lifespan="off")
        )
        self.thread = threading.Thread(target=asyncio.run, args=(self.server.serve(),), daemon=True)
        self.thread.start()
        end_s = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url, self.port = f"instance://127.0.0.1:{port}", port

    def get(self, path: str, **headers: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=60)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture
def seed(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seed]:
    monkeypatch.setenv("RADIXLM_WEIGHTS_KEY", KEY)
    made = Seed(folder)
    yield made
    made.close()


def located(seed: Seed, **values: Any) -> tuple[Path, str]:
    flags = {
        "load_format": "remote_instance",
        "remote_instance_weight_loader_seed_instance_ip": "127.0.0.1",
        "remote_instance_weight_loader_seed_instance_service_port": seed.port,
    }
    config = locate_all(ServerConfig().with_values(flags | values))
    return Path(config.located["model_path"]), config.model.load_format


def test_weights_come_from_a_running_instance(seed: Seed, folder: Path) -> None:
    place, load_format = located(seed)
    assert load_format == "remote_instance"
    assert packed(place, load_format) == packed(folder, "auto")
    assert not list(place.glob("*.safetensors"))
    assert (place / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    config = locate_all(ServerConfig().with_values({"model_path": seed.url}))
    assert config.model.load_format == "remote"
    assert packed(Path(config.located["model_path"]), "remote") == packed(folder, "auto")


def test_a_download_dir_has_the_seeds_files(seed: Seed, folder: Path, tmp_path: Path) -> None:
    place, _ = located(seed, download_dir=str(tmp_path / "down"))
    assert (place / FILE).read_bytes() == (folder / FILE).read_bytes()


def test_updates_of_the_seed_come_too(seed: Seed, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    delta = tmp_path / "delta"
    delta.mkdir()
    save_file({name: tensors[name] + 1}, delta / "part.safetensors")
    source = WeightsSource(str(folder), "auto", (str(delta),))
    seed.state.intake.weights.source = source
    place, load_format = located(seed)
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    save_file({**tensors, name: tensors[name] + 1}, whole / FILE)
    assert packed(place, load_format) == packed(whole, "auto") != packed(folder, "auto")


def test_damaged_bytes_are_found_by_the_seeds_digest(
    seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, load_format = located(seed)
    wrong: Future[str] = Future()
    wrong.set_result("0" * 64)
    monkeypatch.setattr(weight_files, "_digest", lambda path, tag: wrong)
    with pytest.raises(CheckpointError, match=rf"{FILE}: SHA-256 is .*, the store says 0000"):
        packed(place, load_format)


def test_a_connection_that_drops_is_resumed(
    seed: Seed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, load_format = located(seed)
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 10_000)
    real, left = os.pread, [3]

    def pread(descriptor: int, count: int, at: int) -> bytes:
        if at > 100_000 and left[0]:
            left[0] -= 1
            raise OSError("pulled out")
        return real(descriptor, count, at)

    monkeypatch.setattr("radixlm.weights.remote.reader.time.sleep", lambda seconds: None)
    monkeypatch.setattr(weight_files.os, "pread", pread)
    assert packed(place, load_format) == packed(folder, "auto")
    assert left == [0]


def test_a_wrong_key_is_refused_with_a_hint(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_WEIGHTS_KEY", "wrong")
    with pytest.raises(CheckpointError, match=r"401.*RADIXLM_WEIGHTS_KEY"):
        located(seed)


def test_the_flags_of_the_seed_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"needs the seed: --remote-instance-weight-loader-seed"):
        locate_all(ServerConfig().with_values({"load_format": "remote_instance"}))


def test_what_lies_in_no_files_here_is_not_given(
    seed: Seed, folder: Path, opened: Callable[..., Any], cache: Path
) -> None:
    place, _ = located(seed)
    url = read_place(place).url
    seed.state.info.folder = place
    answer = seed.get("/weights_files")
    assert (answer.status_code, url in answer.text) == (501, True)
    seed.state.info.folder = folder
    seed.state.config = ServerConfig().with_values({"load_format": "dummy"})
    assert "no checkpoint to give" in seed.get("/weights_files").text
    seed.state.config = ServerConfig()
    seed.state.started_s = 0.0
    assert "was written after this server read it" in seed.get("/weights_files").text
    with pytest.raises(CheckpointError, match="501"):
        opened(InstanceReader, seed.url).files()


def test_ranges(seed: Seed, folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    path = f"/weights_files?name={FILE}"
    answer = seed.get(path, Range="bytes=5-9")
    assert (answer.status_code, answer.content) == (206, data[5:10])
    assert answer.headers["content-range"] == f"bytes 5-9/{len(data)}"
    assert seed.get(path, Range="bytes=5-").content == data[5:]
    assert seed.get(path).content == data
    assert seed.get(path, Range=f"bytes={len(data)}-").status_code == 416
    for bad in ("bytes=-5", "bytes=5", f"bytes={'9' * 5000}-"):
        assert seed.get(path, Range=bad).status_code == 400
    assert seed.get(path, **{"If-Match": '"other"'}).status_code == 412
    assert seed.get("/weights_files?name=../config.json").status_code == 404
    digest = hashlib.sha256(data).hexdigest()
    assert seed.get(f"/weights_files?digest_of={FILE}").text == digest
    info = seed.get("/remote_instance_transfer_engine_info").json()
    assert (info["route"], info["weight_version"]) == ("/weights_files", "v7")


def test_hashing_holds_up_no_other_work(
    seed: Seed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More files than the event loop has threads, none of which is hashed before the end."""
    for number in range(40):
        save_file({}, folder / f"extra-{number}.safetensors")
    release, real = threading.Event(), hashlib.file_digest

    def hashed(*args: Any) -> Any:
        assert release.wait(60)
        return real(*args)

    monkeypatch.setattr(hashlib, "file_digest", hashed)
    assert len(seed.get("/weights_files").json()) > 40
    assert seed.get(f"/weights_files?name={FILE}").content == (folder / FILE).read_bytes()
    release.set()
    digest = hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
    assert seed.get(f"/weights_files?digest_of={FILE}").text == digest


def test_deleted_files_are_said(seed: Seed, folder: Path) -> None:
    (folder / FILE).unlink()
    answer = seed.get("/weights_files")
    assert (answer.status_code, "are gone: it has no weights" in answer.text) == (404, True)
