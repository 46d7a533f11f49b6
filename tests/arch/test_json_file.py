"""A JSON file of a checkpoint is read from disk once for each version of the file; damaged files
are named."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from radixlm.arch.json_file import object_or_empty, read_json, read_object
from radixlm.base.errors import CheckpointError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import DEFAULT_MODEL, find_model, resolved

_opened: list[str] = []
sys.addaudithook(lambda event, args: _opened.append(str(args[0])) if event == "open" else None)


def test_every_reader_gets_its_own_copy(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": {"b": [1]}}')
    first = read_object(file)
    first["a"]["b"].append(2)
    assert read_json(file) == {"a": {"b": [1]}}


def test_another_version_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for number in range(3):
        new = tmp_path / "new"
        new.write_text(f'{{"a": {number}}}')  # the same size
        os.utime(new, ns=(0, 0))
        new.replace(file)
        assert read_object(file) == {"a": number}
    file.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_object(file)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
    ],
)
def test_damage_is_named(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{told}"):
        read_object(file)
    assert object_or_empty(file) == {}
    assert object_or_empty(tmp_path / "none.json") == {}
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_object(tmp_path)


def test_a_start_reads_the_config_once(tmp_path: Path) -> None:
    for file in find_model(DEFAULT_MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file)
    given: dict[str, Any] = {"model_path": str(tmp_path)}
    _opened.clear()
    for _ in range(2):
        resolved(ServerConfig.from_kwargs(**given), frozenset(given))
    assert _opened.count(str(tmp_path / "config.json")) == 1


def test_infinities_as_transformers_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"limit": [0.0, {"__float__": "Infinity"}], "x": {"__float__": "-Infinity"}}')
    assert read_object(path) == {"limit": [0.0, math.inf], "x": -math.inf}
