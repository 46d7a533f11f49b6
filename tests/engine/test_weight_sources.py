"""Engines whose model is a URL: they answer as from the folder; and --delete-ckpt-after-loading."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixlm import Engine
from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.downloaded import check_deletable, delete_checkpoint
from radixlm.engine.model_info import find_model
from tests.engine.test_live_weights import GREEDY, OPTIONS, PROMPTS
from tests.fakes.perturbed import perturbed
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.weights.remote.file_server import FileServer, file_server

FILE = "model.safetensors"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("RADIXLM_REMOTE_CACHE", str(tmp_path / "cache"))
    with file_server(copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")) as running:
        yield running


def answers(**options: Any) -> list[Any]:
    with Engine(**OPTIONS, **options) as engine:
        found = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    return [one["output_ids"] for one in found]


def test_an_engine_streams_its_model_from_a_url(server: FileServer, tmp_path: Path) -> None:
    assert answers(model_path=server.url) == answers(model_path=str(server.folder))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_an_update_from_a_url(server: FileServer, tmp_path: Path) -> None:
    base = cached_tiny("Qwen3ForCausalLM")
    new = perturbed(base, tmp_path / "new")
    shutil.copy(new / FILE, server.folder / FILE)
    with Engine(model_path=str(base), **OPTIONS) as engine:
        is_ok, message, _ = engine.update_weights_from_disk(server.url)
        assert is_ok, message
        found = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [one["output_ids"] for one in found] == answers(model_path=str(new))


def test_a_downloaded_checkpoint_is_deleted_and_the_engine_answers(
    server: FileServer, tmp_path: Path
) -> None:
    options = {"download_dir": str(tmp_path / "down"), "delete_ckpt_after_loading": True}
    assert answers(model_path=server.url, **options) == answers(model_path=str(server.folder))
    names = {path.name for path in (tmp_path / "down").rglob("*") if path.is_file()}
    assert "config.json" in names
    assert FILE not in names
    assert (server.folder / FILE).is_file()


def test_a_folder_of_the_users_is_never_deleted(server: FileServer) -> None:
    values = {"model_path": str(server.folder), "delete_ckpt_after_loading": True}
    with pytest.raises(ConfigError, match="never a folder of yours"):
        check_deletable(ServerConfig().with_values(values))
    with pytest.raises(ConfigError, match="--dp-size 1 --nnodes 1 works"):
        check_deletable(ServerConfig().with_values(values | {"dp_size": 2}))


def test_a_cache_that_others_share_is_never_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", "/shared")
    values = {"model_path": "org/name", "download_dir": "/shared/../shared/models"}
    config = ServerConfig().with_values(values | {"delete_ckpt_after_loading": True})
    with pytest.raises(ConfigError, match="is a hub's cache, which other programs share"):
        check_deletable(replace(config, located={"model_path": "/shared/models/org/name"}))


def test_links_are_followed_inside_the_folder_only(server: FileServer, tmp_path: Path) -> None:
    root = tmp_path / "down"
    place = root / "snapshot"
    place.mkdir(parents=True)
    shutil.copy(server.folder / FILE, root / "blob")
    (place / FILE).symlink_to(root / "blob")
    (place / "other.safetensors").symlink_to(server.folder / FILE)
    config = ServerConfig().with_values(
        {"model_path": "org/name", "download_dir": str(root), "delete_ckpt_after_loading": True}
    )
    config = replace(config, located={"model_path": str(place)})
    check_deletable(config)
    delete_checkpoint(config)
    assert not (root / "blob").exists()
    assert not (place / FILE).is_symlink()
    assert (server.folder / FILE).is_file()


def test_an_archive_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "model.tar.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"unpack it \(tar xf\) and give the folder"):
        find_model(str(tmp_path / "model.tar.gz"))
