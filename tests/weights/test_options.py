"""--model-loader-extra-config: keys by format, and the same weights whichever way they are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.fakes.sharded_state import save_sharded_state
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.weights.remote.conftest import packed
from tests.weights.test_load import empty_model

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.located import load_options
from radixlm.weights.folder import open_folder
from radixlm.weights.load import load_weights, open_reader
from radixlm.weights.options import DEFAULT, LoadOptions, read_options
from radixlm.weights.remote.source import RemoteSource
from radixlm.weights.safetensors_file import SafetensorsSource

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "load_format", "expected"),
    [
        ("{}", "auto", DEFAULT),
        (None, "gguf", DEFAULT),
        ('{"enable_multithread_load": true}', "auto", LoadOptions(8)),
        ('{"enable_multithread_load": true, "num_threads": 3}', "safetensors", LoadOptions(3)),
        ('{"num_threads": 3}', "auto", DEFAULT),  # as the reference: both keys are needed
        ("{}", "fastsafetensors", LoadOptions(8)),
        ('{"concurrency": 2, "memory_limit": 9}', "remote", LoadOptions(2, 9)),
        ('{"concurrency": 2, "distributed": true}', "remote", LoadOptions(2)),
        (
            '{"pattern": "r{rank}-{part}.st"}',
            "sharded_state",
            LoadOptions(pattern="r{rank}-{part}.st"),
        ),
    ],
)
def test_keys_are_those_of_the_format(
    text: str | None, load_format: str, expected: LoadOptions
) -> None:
    assert read_options(text, load_format) == expected


@pytest.mark.parametrize(
    ("text", "load_format", "message"),
    [
        (
            '{"num_thread": 3}',
            "auto",
            r"no key 'num_thread'; its keys: enable_multithread_load",
        ),
        ('{"concurrency": 3}', "auto", "no key 'concurrency'"),
        ('{"pattern": "x"}', "gguf", "--load-format gguf has no key 'pattern'; it has none"),
        ('{"num_threads": 0}', "auto", "num_threads: 0 is no fit; for example 8"),
        ('{"num_threads": true}', "auto", "num_threads: True is no fit"),
        ('{"enable_multithread_load": 1}', "auto", "1 is no fit; for example true"),
        ('{"pattern": "../{rank}{part}"}', "sharded_state", "is no fit; for example"),
        ("{", "auto", "expected a JSON object"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, load_format: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--model-loader-extra-config: .*{message}"):
        read_options(text, load_format)


def test_flags_become_options() -> None:
    config = ServerConfig().with_values({"weight_loader_disable_mmap": True})
    assert load_options(config) == LoadOptions(num_threads=1)


@pytest.mark.parametrize("options", [LoadOptions(1), LoadOptions(3, 1), LoadOptions(8)])
def test_threads_read_the_same_weights(folder: Path, options: LoadOptions) -> None:
    tensors = load_file(folder / FILE)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / FILE).unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    source = open_folder(folder, "auto", options=options)
    assert isinstance(source, RemoteSource)
    source.close()
    assert isinstance(open_folder(folder, "auto"), SafetensorsSource)
    assert packed(folder, "auto", options) == packed(folder, "auto")


@pytest.mark.parametrize("load_format", ["layered", "fastsafetensors"])
def test_other_names_of_the_same(folder: Path, load_format: str) -> None:
    options = read_options("{}", load_format)
    assert packed(folder, load_format, options) == packed(folder, "auto")


def test_a_file_that_shrinks_is_named(folder: Path) -> None:
    source = open_folder(folder, "auto", options=LoadOptions(2))
    name = max(source.sizes(), key=lambda name: source.sizes()[name])
    with (folder / FILE).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated: it ends at byte"):
        source.read(name)
    source.close()


def test_a_pattern_of_sharded_state(folder: Path, tmp_path: Path) -> None:
    model, target = empty_model(folder), tmp_path / "state"
    save_sharded_state(model, open_reader(model, folder, "auto"), target)
    shutil.copy(folder / "config.json", target)
    [file] = target.glob("*.safetensors")
    file.rename(target / "own-0-x.safetensors")
    options = LoadOptions(pattern="own-{rank}-{part}.safetensors")
    assert packed(target, "sharded_state", options) == packed(folder, "auto")
    with pytest.raises(CheckpointError, match=r"no model-rank-0-part-\*\.safetensors"):
        load_weights(empty_model(folder), target, "sharded_state", progress=False)
