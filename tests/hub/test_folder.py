"""Folders that are no models are named for what they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.launch import intake_tokenizer
from radixlm.engine.model_info import find_model, resolved
from tests.fakes.hub import FakeHub
from tests.fakes.tiny_checkpoint import copy_tiny
from tests.hub.conftest import TINY

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer(tmp_path: Path, name: str) -> None:
    folder = copy_tiny(TINY, tmp_path / "model")
    (folder / name).unlink()
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        find_model(str(folder))


def test_an_adapter(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"LoRA adapter.*--model-path org/base --lora-paths"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model_index.json", "diffusion pipeline"),
        ("params.json", "their maker's own format"),
        ("checkpoint-9/config.json", "folders in it have one: checkpoint-9"),
        ("model.safetensors", "weights only"),
    ],
)
def test_other_folders(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=told):
        find_model(str(tmp_path))


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    folder = copy_tiny(TINY, tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    config, info = resolved(ServerConfig.from_kwargs(model_path=str(folder)), frozenset())
    with pytest.raises(CheckpointError, match=r"no tokenizer is .* --tokenizer-path or --skip-tok"):
        intake_tokenizer(config, info)


def test_a_wrong_name_gets_a_near_one(hub: FakeHub, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "cache" / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    for wrong in ("qwen3-0.6b", "qwen/qwen3-0.6"):
        with pytest.raises(ConfigError, match=r"did you mean 'Qwen/Qwen3-0\.6B'"):
            resolved(ServerConfig.from_kwargs(model_path=wrong), frozenset())
