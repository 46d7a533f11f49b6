"""What the tests of remote weights share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.weights.remote.file_server import FileServer, file_server

from radixlm.arch.hf import describe
from radixlm.kernels.dispatch import bind
from radixlm.models.build import build_model
from radixlm.weights.load import load_weights
from radixlm.weights.options import DEFAULT, LoadOptions
from radixlm.weights.remote.source import RemoteSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")


@pytest.fixture
def server(folder: Path) -> Iterator[FileServer]:
    with file_server(folder) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of small files."""
    monkeypatch.setenv("RADIXLM_REMOTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Makes readers that do not wait between attempts; closed at the end."""
    readers: list[Any] = []

    def make(kind: Any, url: str, **options: Any) -> Any:
        readers.append(kind(url, **{"pause": lambda seconds: None, **options}))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def read_all(source: RemoteSource) -> dict[str, torch.Tensor]:
    """All tensors, as the loader reads them: announced, read, released."""
    names = sorted(source.sizes())
    source.expect([source.origins(name)[0] for name in names])
    found = {}
    for name in names:
        found[name] = source.read(name).clone()
        source.release(name)
    source.finish()
    source.close()
    return found


def assert_same(found: dict[str, torch.Tensor], folder: Path) -> None:
    stored = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def packed(folder: Path, load_format: str, options: LoadOptions = DEFAULT) -> str:
    """A hash of the model's weights as the layers have packed them."""
    kernels = bind("cpu", {"all": "reference"})
    model = build_model(describe(folder), torch.device("cpu"), torch.float32, kernels)
    load_weights(model, folder, load_format, progress=False, options=options)
    hasher = hashlib.sha256()
    for block in model.blocks:
        for part in (block.mixer.qkv, block.mixer.o, block.ffn.up, block.ffn.down):
            hasher.update(part.packed.unpack().numpy().tobytes())
        hasher.update(block.norm1.weight_D.numpy().tobytes())
    hasher.update(model.embed.unpack().numpy().tobytes())
    return hasher.hexdigest()
