"""Blocks of GGUF, those of one to three bits among them, against the package gguf (0.19)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes import gguf_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.arch.gguf import TYPES
from radixlm.engine.gguf import unpacked
from radixlm.weights import gguf_blocks, gguf_iquants
from radixlm.weights.gguf_file import GgufSource

gguf = pytest.importorskip("gguf", reason="the package gguf is no dependency of the engine")
SIZES = {name: (block, size) for name, block, size in TYPES.values()}
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}


def _logits(folder: Path) -> torch.Tensor:
    ids = torch.randint(3, 380, (21,), generator=torch.Generator().manual_seed(3)).tolist()
    return PagedRunner(load_model(folder, weight_dtype=torch.float32)).prefill({0: ids})[0]


@pytest.mark.parametrize("kind", gguf_blocks.DEQUANTIZE)
def test_random_blocks_are_those_of_the_package(kind: str) -> None:
    """Every bit, with scales of zero, infinity and NaN among them."""
    block, size = SIZES[kind]
    number = gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[number] == (block, size)
    raw = np.random.default_rng(number).integers(0, 256, (2048, size), np.uint8)
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.dequantize(raw, number)).reshape(2048, block)
    ours = gguf_blocks.dequantize(kind, torch.from_numpy(raw), block, torch.float32)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)


def test_grids_are_those_of_the_package() -> None:
    grids = gguf_iquants._grids()
    assert len(grids) == 6
    for kind, grid in grids.items():
        table = getattr(gguf.quants, kind)
        table.init_grid()
        assert np.array_equal(grid.numpy(), table.grid.reshape(table.grid_shape))


@pytest.mark.parametrize("kind", [*gguf_file.RANDOM, "BF16", "F64"])
def test_a_file_is_read_as_the_package_reads_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of its tensors, then the logits of a checkpoint that holds them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_tiny("Qwen3ForCausalLM", **WIDE)
    file = gguf_file.convert(folder, tmp_path / "m.gguf", "qwen3", kind, {})
    source = GgufSource(file)
    theirs: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        is_double = tensor.tensor_type == gguf.GGMLQuantizationType.F64
        numbers = tensor.data if is_double else gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        theirs[tensor.name] = torch.tensor(numbers.astype(np.float32)).reshape(shape)
    kinds = [tensor.kind for tensor in source._tensors.values()]
    assert kinds.count(kind) >= 21
    checkpoint = load_file(folder / "model.safetensors")
    for name, piece in source._pieces.items():
        assert torch.equal(source.read(name).float(), theirs[piece.source]), name
        checkpoint[name] = theirs[piece.source]
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(checkpoint, twin / "model.safetensors")
    ours = _logits(unpacked(file))
    assert float(ours.std()) > 1e-3
    torch.testing.assert_close(ours, _logits(twin), rtol=1e-5, atol=1e-5)
