"""Models of ModelScope, by its HTTP API on loopback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.entrypoints.cli import main
from radixlm.hub import fetch
from radixlm.hub.locate import Wanted, locate_model
from tests.fakes.hub import FakeHub, Fault, folder_files, running_hub
from tests.hub.conftest import TINY


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: Any) -> Iterator[FakeHub]:
    with running_hub(is_modelscope=True) as running:
        running.add("org/radix-tiny1.5", folder_files(TINY), "master")
        monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
        monkeypatch.setenv("MODELSCOPE_DOMAIN", running.url)
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "scope"))
        monkeypatch.setattr(fetch, "PAUSES_S", (0.0,))
        yield running


def test_a_model_is_downloaded_once(scope: FakeHub, tmp_path: Path) -> None:
    scope.faults["model.safetensors"] = Fault(cut=0.7)
    folder = locate_model("org/radix-tiny1.5")
    assert folder == tmp_path / "scope" / "models" / "org" / "radix-tiny1___5"
    for path in TINY.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert scope.sent["model.safetensors"] == (TINY / "model.safetensors").stat().st_size
    asked = len(scope.requests)
    assert locate_model("org/radix-tiny1.5") == folder and len(scope.requests) == asked


def test_damaged_bytes_are_fetched_anew(scope: FakeHub) -> None:
    scope.faults["tokenizer.json"] = Fault(flip=True)
    folder = locate_model("org/radix-tiny1.5")
    assert (folder / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


def test_a_revision_has_a_folder_of_its_own(scope: FakeHub) -> None:
    files = folder_files(TINY) | {"generation_config.json": b"{}"}
    scope.add("org/radix-tiny1.5", files, "v1")
    old = locate_model("org/radix-tiny1.5", Wanted(revision="v1"))
    assert (old / "generation_config.json").read_bytes() == b"{}"
    assert (locate_model("org/radix-tiny1.5") / "generation_config.json").read_bytes() != b"{}"


def test_pull_replaces_what_has_changed(scope: FakeHub, capsys: Any) -> None:
    folder = locate_model("org/radix-tiny1.5")
    scope.add("org/radix-tiny1.5", folder_files(TINY) | {"config.json": b"{ }"}, "master")
    assert main(["pull", "org/radix-tiny1.5"]) == 0
    assert (folder / "config.json").read_bytes() == b"{ }"
    assert scope.sent["model.safetensors"] == (TINY / "model.safetensors").stat().st_size


def test_tokens_and_wrong_names(scope: FakeHub, monkeypatch: Any) -> None:
    scope.repos["org/radix-tiny1.5"].token = "secret"
    with pytest.raises(ConfigError, match="MODELSCOPE_API_TOKEN"):
        locate_model("org/radix-tiny1.5")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    assert locate_model("org/radix-tiny1.5").is_dir()
    with pytest.raises(ConfigError, match="no such repository or revision 'master'"):
        locate_model("org/nothing")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"not in the cache .* HF_HUB_OFFLINE is set"):
        locate_model("org/nothing")


def test_the_list_shows_it_under_its_name(scope: FakeHub, hub: FakeHub, capsys: Any) -> None:
    folder = locate_model("org/radix-tiny1.5")
    assert main(["models"]) == 0
    assert "modelscope://org/radix-tiny1.5" in capsys.readouterr().out
    own = folder.parents[1] / "notes" / "letters"
    own.mkdir(parents=True)
    for name in ("modelscope", "modelscope://notes/letters"):
        assert main(["models", "rm", name]) == 2
    assert own.is_dir() and folder.is_dir()
    assert main(["models", "rm", "modelscope://org/radix-tiny1.5"]) == 0
    assert not folder.exists()
