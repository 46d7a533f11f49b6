"""Damaged checkpoints: the error names the file that the tensor was read from, and the tensor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.sharded_state import save_sharded_state
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from radixlm.kernels.dispatch import bind
from radixlm.models.build import build_model
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.weights.load import load_weights, open_reader
from radixlm.weights.npcache import open_npcache

CPU = torch.device("cpu")
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.norm.weight"
EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors, str], object]


def sharded(folder: Path) -> dict[str, str]:
    """The weights in three files; the file of each tensor."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    homes = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = sorted(tensors)[number::3]
        save_file({name: tensors[name] for name in part}, folder / file)
        homes |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return homes


def edited(file: Path, name: str, edit: Edit) -> None:
    tensors = load_file(file)
    edit(tensors, name)
    save_file(tensors, file)


def error_of(folder: Path, load_format: str = "auto") -> str:
    scheme = make_scheme(None, "", checkpoint_quant(folder))
    kernels = bind("cpu", {"all": "reference"})
    model = build_model(describe(folder), CPU, torch.float32, kernels, scheme=scheme)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, folder, load_format, progress=False)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def _last(value: float) -> Edit:
    return lambda tensors, name: tensors[name].view(-1)[-1:].fill_(value)


def _put(make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda tensors, name: tensors.update({name: make(tensors[name])})


DAMAGE: dict[str, Edit] = {
    "NaN": _last(torch.nan),
    "infinity": _last(-torch.inf),
    "shape": _put(lambda t: torch.ones(7, *t.shape[1:-1], 5)),
    "a row less": _put(lambda t: t[:-1].clone()),
    "no rows": _put(lambda t: t[:0].clone()),
    "a number": _put(lambda t: torch.tensor(1.0)),
    "an axis more": _put(lambda t: t[None].clone()),
    "int32": _put(lambda t: t.to(torch.int32)),
    "int8": _put(lambda t: t.to(torch.int8)),
    "bool": _put(lambda t: t > 0),
    "float8_e4m3fn": _put(lambda t: t.to(torch.float8_e4m3fn)),
    "missing": lambda tensors, name: tensors.pop(name),
    "unknown": lambda tensors, name: tensors.update({name + ".mystery": torch.ones(2)}),
}


@pytest.mark.parametrize("tensor", [Q, GATE, NORM, EXPERT])
@pytest.mark.parametrize("kind", DAMAGE)
def test_the_shard_and_the_tensor_are_named(kind: str, tensor: str, tmp_path: Path) -> None:
    arch = "Qwen3MoeForCausalLM" if tensor == EXPERT else "Qwen3ForCausalLM"
    folder = copy_tiny(cached_tiny(arch), tmp_path / "model")
    home = sharded(folder)[tensor]
    edited(folder / home, tensor, DAMAGE[kind])
    message = error_of(folder)
    assert any(home in part and tensor in part for part in re.split("[;(]", message))
    if kind in ("NaN", "infinity"):  # of the fused parts, the damaged one alone
        assert f"holds {kind}" in message and message.endswith(f"({home}: {tensor})")
    if kind in ("int32", "int8", "bool"):
        assert f"torch.{kind}" in message
    assert "\n" not in message


def test_many_problems_are_a_line_each(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    homes = sharded(folder)
    for tensor in (GATE, NORM):
        edited(folder / homes[tensor], tensor, DAMAGE["NaN"])
    title, *lines = error_of(folder).splitlines()
    assert title.endswith("do not fit the model:")
    for line, tensor in zip(lines, (GATE, NORM), strict=True):
        assert line.endswith(f"({homes[tensor]}: {tensor})")


def test_a_tensor_that_no_file_has(tmp_path: Path) -> None:
    """The message names the index and the files that were searched."""
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    home = sharded(folder)[GATE]
    edited(folder / home, GATE, DAMAGE["missing"])
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][GATE]
    (folder / INDEX).write_text(json.dumps(index))
    where = "model-00001-of-00003.safetensors to model-00003-of-00003.safetensors"
    assert error_of(folder).endswith(f"missing from {INDEX} and {where}: {GATE}")
    (folder / INDEX).unlink()
    assert error_of(folder).endswith(f"missing from {where}: {GATE}")


def narrow(folder: Path, edit: Edit) -> dict[str, str]:
    """All matrices of layers in fp8, then `edit` of GATE."""
    tensors: Tensors = {}
    for name, value in load_file(folder / FILE).items():
        tensors[name] = value
        if "_proj" in name:
            scale = value.abs().amax() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[name + "_scale"] = scale.reshape(1)
    edit(tensors, GATE)
    save_file(tensors, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    return sharded(folder)


SCALE = GATE + "_scale"
NARROW: dict[str, tuple[Edit, str, str]] = {
    "NaN": (lambda t, n: t[SCALE].fill_(torch.nan), SCALE, rf"\(FILE: {SCALE}\)$"),
    "shape": (lambda t, n: t.update({SCALE: torch.ones(5)}), SCALE, rf"FILE: [^;]*{SCALE} \[5\]"),
    "int32": (
        lambda t, n: t.update({SCALE: torch.ones(1, dtype=torch.int32)}),
        SCALE,
        rf"{SCALE} is of torch\.int32 .*FILE: [^;]*{SCALE}",
    ),
    "missing": (lambda t, n: t.pop(SCALE), GATE, rf"{SCALE} is missing .*FILE: {GATE} "),
    "weight": (
        lambda t, n: t[GATE].view(torch.uint8).view(-1)[-1:].fill_(0x7F),
        GATE,
        rf"holds NaN.*\(FILE: {GATE}\)$",
    ),
}


@pytest.mark.parametrize("kind", NARROW)
def test_fp8_scales_are_named(kind: str, tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    edit, culprit, pattern = NARROW[kind]
    home = narrow(folder, edit)[culprit]
    assert re.search(pattern.replace("FILE", re.escape(home)), error_of(folder))


def _pickles(folder: Path, edit: Edit) -> tuple[str, str, str]:
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    edit(tensors, GATE)
    first = {name: value for name, value in tensors.items() if name != GATE}
    torch.save(first, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({GATE: tensors[GATE]}, folder / "pytorch_model-00002-of-00002.bin")
    return "pt", "pytorch_model-00002-of-00002.bin", GATE


def _npcache(folder: Path, edit: Edit) -> tuple[str, str, str]:
    _pickles(folder, edit)
    open_npcache(folder, sorted(folder.glob("*.bin")))
    return "npcache", f"np/{GATE}.npy", GATE


def _state(folder: Path, edit: Edit) -> tuple[str, str, str]:
    model = build_model(describe(folder), CPU, torch.float32, bind("cpu", {"all": "reference"}))
    save_sharded_state(model, open_reader(model, folder, "auto"), folder)
    (folder / FILE).unlink()
    file, name = "model-rank-0-part-0.safetensors", "blocks.1.ffn.up.weight"
    edited(folder / file, name, edit)
    return "sharded_state", file, name


def _adapter(folder: Path, edit: Edit) -> tuple[str, str, str]:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"has_lora_adapter": True}))
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    num_out, num_in = load_file(folder / FILE)[GATE].shape
    stem = f"base_model.model.{GATE.removesuffix('.weight')}.lora_"
    halves = {f"{stem}A.weight": torch.ones(2, num_in), f"{stem}B.weight": torch.ones(num_out, 2)}
    edit(halves, f"{stem}B.weight")
    save_file(halves, folder / "adapter_model.safetensors")
    return "auto", "adapter_model.safetensors", f"{stem}B.weight"


@pytest.mark.parametrize("store", [_pickles, _npcache, _state, _adapter])
@pytest.mark.parametrize("kind", ["NaN", "shape"])
def test_other_stores_are_named_too(kind: str, store: Any, tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    load_format, file, name = store(folder, DAMAGE[kind])
    message = error_of(folder, load_format)
    assert re.search(rf"[(; ]{re.escape(file)}: [^;]*{re.escape(name)}", message)


def test_missing_or_truncated_npcache_files(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    _npcache(folder, lambda tensors, name: None)
    file = folder / "np" / f"{GATE}.npy"
    file.write_bytes(file.read_bytes()[:200])
    assert f"{file}: {GATE} is damaged" in error_of(folder, "npcache")
    file.unlink()
    assert f"{file}: missing" in error_of(folder, "npcache")


def test_one_tensor_in_two_pickles(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    _pickles(folder, lambda tensors, name: None)
    torch.save({GATE: torch.ones(1)}, folder / "other.bin")
    message = error_of(folder, "pt")
    assert f"{GATE} is also in another file" in message and "other.bin" in message


def test_nan_is_found_anywhere(tmp_path: Path) -> None:
    """A single NaN among many values, in every dtype and position."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        folder = copy_tiny(cached_tiny("Qwen3ForCausalLM", dtype=dtype), tmp_path / str(dtype))
        whole = load_file(folder / FILE)
        count = whole[GATE].numel()
        for at in (0, 1, count // 2, count - 1):
            tensors = {name: value.clone() for name, value in whole.items()}
            tensors[GATE].view(-1)[at] = torch.nan
            save_file(tensors, folder / FILE)
            assert f"({FILE}: {GATE})" in error_of(folder)


def test_the_command_ends_with_2_and_one_line(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    homes = sharded(folder)
    edited(folder / homes[GATE], GATE, DAMAGE["NaN"])
    command = [sys.executable, "-m", "radixlm", "serve", "--model-path", str(folder)]
    options = ["--port", "0", "--log-level", "error", "--max-total-tokens", "512"]
    ended = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("radixlm: ")]
    assert len(said) == 1 and f"({homes[GATE]}: {GATE})" in said[0]
    assert "Traceback" not in ended.stderr
