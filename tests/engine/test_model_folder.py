"""What a model's folder may hold: nonsense in generation_config.json, pipes among the files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from radixlm.base.errors import CheckpointError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.launch import intake_tokenizer
from radixlm.engine.model_info import find_model, read_model
from radixlm.entrypoints.native.request import default_sampling
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny

NONSENSE = {"temperature": "x", "top_k": -7, "top_p": [1], "repetition_penalty": -1, "min_p": 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")


def config_of(folder: Path) -> ServerConfig:
    return ServerConfig.from_kwargs(model_path=str(folder))


def test_nonsense_of_generation_config_is_ignored_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(NONSENSE | {"eos_token_id": 3}))
    info, _ = read_model(config_of(folder))
    assert info.generation == {"eos_token_id": 3}
    assert default_sampling(info.generation) == default_sampling({})
    for name in NONSENSE:
        assert f"{file}: {name} is ignored" in caplog.text


def test_sense_of_generation_config_is_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert read_model(config_of(folder))[0].generation == values
    assert not caplog.text


@pytest.mark.parametrize("name", ["model-00002.safetensors", "tokenizer.json", "2_Dense/x.bin"])
def test_a_pipe_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}: not a regular file"):
        find_model(str(folder))


def test_a_folder_that_is_no_model_is_told_first(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"no config\.json in this folder"):
        find_model(str(tmp_path))


def test_a_pipe_as_the_whole_model_or_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "weights.gguf"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="not a regular file"):
        find_model(str(pipe))
    config = config_of(folder).with_values({"tokenizer_path": str(pipe)})
    with pytest.raises(CheckpointError, match="not a regular file"):
        intake_tokenizer(config, read_model(config)[0])
