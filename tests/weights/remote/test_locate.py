"""From a URL to a folder: what is fetched, what is streamed, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.weights.remote.conftest import packed
from tests.weights.remote.file_server import FileServer

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.located import locate_all
from radixlm.hub import fetch
from radixlm.hub.locate import Wanted, locate_model

FILE = "model.safetensors"


def test_a_url_is_a_model_whose_weights_are_streamed(
    server: FileServer, folder: Path, cache: Path
) -> None:
    config = locate_all(ServerConfig().with_values({"model_path": server.url}))
    assert config.model.load_format == "remote"
    place = Path(config.located["model_path"])
    assert packed(place, "remote") == packed(folder, "auto")
    assert place.parent == cache
    assert cache.stat().st_mode & 0o077 == 0


def test_a_draft_in_a_folder_stays_there(server: FileServer, folder: Path, cache: Path) -> None:
    values = {"model_path": server.url, "speculative_draft_model_path": str(folder)}
    config = locate_all(ServerConfig().with_values(values | {"speculative_algorithm": "EAGLE"}))
    assert config.speculate.speculative_draft_load_format == "auto"


def test_a_download_dir_takes_the_weights_too(
    server: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says_sha256 = True
    monkeypatch.setattr("radixlm.weights.remote.http.HttpReader.download_bytes", 50_000)
    values = {"model_path": server.url, "download_dir": str(tmp_path / "down")}
    cut = iter([True])
    server.fault = lambda handler, name, span: (
        name == FILE and span[0] > 100_000 and next(cut, False) and handler.refuse(404)
    )
    with pytest.raises(CheckpointError, match="changed while"):
        locate_all(ServerConfig().with_values(values))
    [partial] = tmp_path.glob("down/*/*.incomplete")
    have = partial.stat().st_size
    assert have == 150_000
    server.requests.clear()
    config = locate_all(ServerConfig().with_values(values))
    place = Path(config.located["model_path"])
    assert config.model.load_format == "auto"
    assert (place / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert server.asked(FILE) == (folder / FILE).stat().st_size - have
    assert packed(place, "auto") == packed(folder, "auto")


def test_a_server_without_ranges_is_downloaded_from(
    server: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one answer; where a download broke off, what is there is read over."""
    server.has_ranges = False
    monkeypatch.setattr("radixlm.weights.remote.reader.COPY_BYTES", 10_000)
    data, wanted = (folder / FILE).read_bytes(), Wanted(folder=str(tmp_path / "down"))
    assert len(data) > 40_000
    place = locate_model(server.url, wanted)
    assert (place / FILE).read_bytes() == data
    (place / ".complete").unlink()
    (place / FILE).unlink()
    (place / f"{FILE}.incomplete").write_bytes(data[:40_000])
    assert locate_model(server.url, wanted) == place
    assert (place / FILE).read_bytes() == data


def test_a_download_with_a_wrong_hash_is_refused(
    server: FileServer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says_sha256 = True
    wanted = Wanted(folder=str(tmp_path / "down"))
    monkeypatch.setattr(
        "radixlm.weights.remote.reader.RangeReader.copy",
        lambda self, file, start, end, write: write(memoryview(bytes(end - start))),
    )
    with pytest.raises(CheckpointError, match="the store says"):
        locate_model(server.url, wanted)
    assert not list(tmp_path.glob("down/*/config.json"))


def test_no_space_is_said(server: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ConfigError, match=r"No space left.*--download-dir or RADIXLM_REMOTE_CACHE"):
        locate_model(server.url)


def test_other_formats_need_a_folder(server: FileServer, folder: Path, cache: Path) -> None:
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "files.json").write_text(json.dumps([f.name for f in folder.iterdir()]))
    with pytest.raises(CheckpointError, match="only safetensors are streamed, --download-dir"):
        locate_all(ServerConfig().with_values({"model_path": server.url, "load_format": "remote"}))


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a\\b.json"])
def test_names_stay_below_the_url(server: FileServer, folder: Path, cache: Path, name: str) -> None:
    (folder / "files.json").write_text(json.dumps([{"name": name, "size": 1}]))
    with pytest.raises(CheckpointError, match="is not the name of a file below it"):
        locate_model(server.url)


def test_an_index_with_a_lost_shard_is_refused(
    server: FileServer, folder: Path, cache: Path
) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "lost.safetensors"}}))
    (folder / "files.txt").write_text("config.json model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"names lost.safetensors, which is not there"):
        locate_model(server.url)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is no weight index"):
        locate_model(server.url)


def test_an_archive_is_refused(server: FileServer, cache: Path) -> None:
    for name in ("model.tar", "model.tar.gz", "model.zip"):
        with pytest.raises(ConfigError, match=r"unpack it \(tar xf\)"):
            locate_model(server.url + name)


def test_a_server_without_tags_is_sampled(
    server: FileServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.has_tags = False
    place = locate_model(server.url)
    assert packed(place, "remote") == packed(folder, "auto")
    data = bytearray((folder / FILE).read_bytes())
    data[-1] ^= 1
    (folder / FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        packed(place, "remote")
    assert locate_model(server.url) != place


def test_only_folders_of_the_cache_stand_for_remote_models(
    server: FileServer, folder: Path, cache: Path, tmp_path: Path
) -> None:
    place = locate_model(server.url)
    assert packed(place, "auto") == packed(folder, "auto")
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    with pytest.raises(CheckpointError, match="holds no weights"):
        packed(copy, "auto")


def test_two_starts_at_once_fetch_each_file_once(
    server: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, first, release = Wanted(folder=str(tmp_path / "down")), Event(), Event()
    waits = logging.Handler()
    monkeypatch.setattr(waits, "emit", lambda record: release.set())
    monkeypatch.setattr(fetch.log, "handlers", [waits])
    monkeypatch.setattr(fetch.log, "level", logging.INFO)

    def hold(handler: Any, name: str, span: tuple[int, int]) -> bool:
        if name == FILE:
            first.set()
            assert release.wait(20)
        return False

    server.fault = hold
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(locate_model, server.url, wanted)]
        assert first.wait(60)
        starts.append(pool.submit(locate_model, server.url, wanted))  # it says that it waits
        (place,) = {start.result(60) for start in starts}
    assert (place / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert server.asked(FILE) < 2 * (folder / FILE).stat().st_size
