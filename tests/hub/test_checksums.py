"""--model-checksum: which files are hashed, and what is said of those that differ."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.entrypoints.offline import Engine
from radixlm.hub.checksums import check_files
from tests.fakes.hub import FakeHub
from tests.fakes.tiny_checkpoint import copy_tiny
from tests.hub.conftest import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tiny(TINY, tmp_path / "model")


def _sums(folder: Path) -> dict[str, str]:
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write(path: Path, sums: object) -> str:
    path.write_text(json.dumps({"checksums": sums}))
    return str(path)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_file_of_checksums(folder: Path, tmp_path: Path) -> None:
    sums = _sums(folder)
    source = _write(tmp_path / "sums.json", sums)
    assert check_files(folder, source, str(folder)) == len(sums)
    _flip(folder / "model.safetensors")
    (folder / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"config\.json is missing, model.safetensors differs"
    ):
        check_files(folder, source, str(folder))


def test_one_file_is_looked_up_in_its_folder(folder: Path, tmp_path: Path) -> None:
    name = "model.safetensors"
    source = _write(tmp_path / "sums.json", {name: _sums(folder)[name]})
    assert check_files(folder / name, source, "") == 1


@pytest.mark.parametrize(
    "listed",
    [None, [], {}, {"a": "short"}, {"../a": "0" * 64}, {"/etc/hosts": "0" * 64}, {"a": 3}],
)
def test_what_is_no_list_of_checksums(listed: object, folder: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "sums.json", listed)
    with pytest.raises(ConfigError, match=r"--model-checksum .*write"):
        check_files(folder, source, "")
    Path(source).write_text("no JSON")
    with pytest.raises(ConfigError, match="--model-checksum"):
        check_files(folder, source, "")


@pytest.mark.parametrize("source", ["org/radix-tiny", ""])
def test_those_of_a_repository(source: str, hub: FakeHub, folder: Path) -> None:
    (folder / "notes.txt").write_text("not in the repository")
    num = check_files(folder, source, "org/radix-tiny")
    assert num == len(_sums(TINY).keys() - {"LICENSE", "README.md"})
    for name in ("config.json", "model.safetensors"):  # hashed by git, and as LFS
        _flip(folder / name)
        with pytest.raises(CheckpointError, match=re.escape(f"{name} differs")):
            check_files(folder, source, "org/radix-tiny")
    with pytest.raises(CheckpointError, match="none of its files"):
        check_files(folder.parent / "empty", source, "org/radix-tiny")


def test_a_name_that_is_no_repository(folder: Path) -> None:
    with pytest.raises(ConfigError, match="neither a JSON file"):
        check_files(folder, "", str(folder))


def test_an_engine_does_not_load_what_differs(folder: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "sums.json", _sums(folder))
    with Engine(model_path=str(folder), device="cpu", model_checksum=source) as engine:
        assert engine.generate("The sea", {"max_new_tokens": 2})["text"]
    _flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors differs"):
        Engine(model_path=str(folder), device="cpu", model_checksum=source)
