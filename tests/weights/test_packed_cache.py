"""The packed cache: a model that is mapped has the bits of one that was loaded; whatever is wrong
with a file is noticed."""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.integer_checkpoint import Layout, write_integers
from tests.fakes.mechanisms import each_mechanism
from tests.fakes.paged_runner import PagedRunner
from tests.fakes.thread_groups import thread_ranks
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny

from radixlm.arch.hf import describe
from radixlm.distributed.topology import Topology
from radixlm.kernels import cpu
from radixlm.kernels.cpu import linear
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import bind
from radixlm.models.build import Model, build_model
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.weights import packed_file
from radixlm.weights.load import load_weights
from radixlm.weights.packed_cache import ModelRecorder, load_packed
from radixlm.weights.packed_file import FileWriter, PackedFile, PackedFileError
from radixlm.weights.size import reachable

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)
SCHEMES = ("", "mxfp4", "int4wo-128", "int4wo-32", "int8wo", "w8a8_int8", "fp8", "w8a8_fp8")


def empty(folder: Path, quantization: str = "", **build: Any) -> Model:
    scheme = make_scheme(quantization or None, "", checkpoint_quant(folder))
    device = torch.device("cpu")
    return build_model(describe(folder), device, torch.float32, bind("cpu"), scheme=scheme, **build)


def written(folder: Path, path: Path, *args: Any, **build: Any) -> Model:
    """A loaded model whose packed weights are in a file."""
    model, recorder = empty(folder, *args, **build), ModelRecorder()
    load_weights(model, folder, progress=False, recorder=recorder)
    recorder.write(FileWriter(path), {}, bool)
    return model


def mapped(folder: Path, path: Path, *args: Any, **build: Any) -> Model:
    model, file = empty(folder, *args, **build), PackedFile(path)
    file.check()
    load_packed(model, file)
    return model


def memory_of(model: Model) -> list[bytes]:
    """The bytes of all tensors and all packed memory, in the order of the model's tree."""
    found = []
    for item in reachable(model):
        if isinstance(item, torch.Tensor):
            found.append(item.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.append(ctypes.string_at(item.address, item.num_bytes))
    return found


def same(one: Model, other: Model) -> bool:
    pairs = zip(memory_of(one), memory_of(other), strict=True)
    return all(a[: len(b)] == b[: len(a)] for a, b in pairs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_is_mapped_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM", hidden_size=128, intermediate_size=256)
    loaded = written(folder, tmp_path / "w", scheme)
    assert same(loaded, mapped(folder, tmp_path / "w", scheme))


@pytest.mark.parametrize("arch", each_mechanism(ARCHITECTURES))
def test_each_family_is_mapped_bit_for_bit(arch: str, tmp_path: Path) -> None:
    folder = cached_tiny(arch)
    assert same(written(folder, tmp_path / "w"), mapped(folder, tmp_path / "w"))


LAYOUTS = {
    "awq": Layout("awq", group=32),
    "gptq": Layout("gptq", bits=8, group=32, order=True),
    "packed": Layout("packed", group=0, sym=True),
    "int8": Layout("int8", bits=8, group=0, sym=True),
    "int8 blocks": Layout("blocks", bits=8, group=32),
}


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoints_integers_are_mapped_bit_for_bit(
    arch: str, layout: str, tmp_path: Path
) -> None:
    folder, _ = write_integers(cached_tiny(arch), tmp_path / "m", LAYOUTS[layout])
    assert same(written(folder, tmp_path / "w"), mapped(folder, tmp_path / "w"))


def test_each_rank_has_its_own_part(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3MoeForCausalLM")
    for number, ranks in enumerate(thread_ranks(Topology(tp=2))):
        path = tmp_path / str(number)
        loaded = written(folder, path, "int8wo", ranks=ranks)
        assert same(loaded, mapped(folder, path, "int8wo", ranks=ranks))


def test_a_mapped_model_computes_the_same(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3MoeForCausalLM")
    models = written(folder, tmp_path / "w", "int8wo"), mapped(folder, tmp_path / "w", "int8wo")
    ids = {0: [5, 6, 7, 8], 1: [9, 10]}
    one, other = (PagedRunner(model, "cpu", page_size=16).prefill(ids) for model in models)
    assert all(torch.equal(one[sequence], other[sequence]) for sequence in ids)


@pytest.mark.parametrize("damage", ["bit", "short", "long", "foreign", "version", "table"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    folder, path = cached_tiny("Qwen3ForCausalLM"), tmp_path / "w"
    written(folder, path, "int8wo")
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[len(data) // 3] ^= 16
    elif damage == "short":
        del data[-1:]
    elif damage == "long":
        data += b"\0"
    elif damage == "foreign":
        data[:8] = b"GGUF\3\0\0\0"
    elif damage == "version":
        data[8] += 1
    else:
        data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackedFileError):
        PackedFile(path).check()


def test_the_file_of_another_model_is_refused(tmp_path: Path) -> None:
    written(cached_tiny("Qwen3ForCausalLM"), tmp_path / "w")
    with pytest.raises(PackedFileError, match=r"lacks|other parameters|cannot be made"):
        mapped(cached_tiny("Qwen3MoeForCausalLM"), tmp_path / "w")


def test_an_unfinished_file_has_another_name(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "w")
    writer.add(torch.ones(3 << 20))
    assert [path.name for path in tmp_path.iterdir()] == [f"w.{os.getpid()}.part"]
    writer.close()
    assert not list(tmp_path.iterdir())


def pack_all() -> str:
    """The version, and a digest of records and of weights packed in every format."""
    digest = hashlib.sha256()
    for kind in ("Place", "Pack", "Note", "LayerEntry", "Table"):
        digest.update(repr((kind, getattr(packed_file, kind).__struct_fields__)).encode())
    weight = (torch.arange(40 * 160).reshape(40, 160) * 7919 % 1000 - 500) / 256
    for fmt in ("fp32", "bf16", "fp16", "int8wo", "w8a8", "int4-32", "w4a8-32"):
        for is_paired in (False, True):
            packed = linear.pack(weight, torch.arange(40.0), fmt, is_paired)
            for tensor in packed.tensors():
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"{packed_file.VERSION} {digest.hexdigest()[:16]}"


# instruction set -> what the present version packs
GOLDEN = {
    "x86_64_v3": "1 79ac543ecbd5203f",
    "avx512": "1 79ac543ecbd5203f",
    "avxvnni": "1 c58242e69aeccf53",
    "avx512vnni": "1 c58242e69aeccf53",
    "avx512bf16": "1 fecc2d392e7b21b8",
}


@pytest.mark.parametrize("isa", GOLDEN)
def test_what_is_packed_has_not_changed_without_a_new_version(isa: str) -> None:
    if isa not in native().supported_isas():
        pytest.skip(f"this processor has no {isa}")
    before = native().isa()
    native().select_isa(isa)
    try:
        assert pack_all() == GOLDEN[isa], (
            "packed weights or their records have changed: raise VERSION in weights/packed_file.py "
            "and write what this gives here"
        )
    finally:
        native().select_isa(before)
