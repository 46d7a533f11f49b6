"""Checkpoints that `radixlm quantize` writes, as we and compressed-tensors read them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.engine.model_info import ASSETS
from radixlm.quantize import run
from radixlm.quantize.calibration import Scales, _is_shifted, _is_whole, calibrate
from radixlm.quantize.cli import main
from radixlm.quantize.methods import METHODS, round_weight
from radixlm.weights.folder import open_folder

TINY = ASSETS / "radix-tiny"
TEXT = " ".join(
    f"The number after {n} is {n + 1}. Add {n} and {n * 7} and say it." for n in range(90)
)


def quantized(folder: Path, method: str, *options: str, model: Path = TINY) -> Path:
    """The bundled model, or another, by one method."""
    target = folder / method
    assert main([str(model), "--method", method, "-o", str(target), *options]) == 0
    return target


def linear_names(folder: Path) -> list[str]:
    errors = json.loads((folder / "quantize_report.json").read_text())["errors"]
    return list(errors)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "awq-like"])
def test_what_is_read_is_what_was_rounded(tmp_path: Path, method: str) -> None:
    folder = quantized(tmp_path, method)
    floats = open_folder(TINY, "auto", torch.float32)
    read = open_folder(folder, "auto", torch.float32)
    names = linear_names(folder)
    assert len(names) == 7 * len(describe(TINY).blocks)
    for name in names:
        whole = floats.read(name).float()
        fitting = METHODS[method].fitting(tuple(whole.shape))  # 704 inputs are 11 groups of 64
        assert fitting is not None
        rounded = round_weight(whole, fitting, torch.bfloat16)
        assert torch.equal(read.read(name).float(), rounded.weight())
        assert (rounded.weight() - whole).norm() < 0.15 * whole.norm()
    for name in floats.sizes().keys() - set(names):
        assert torch.equal(read.read(name), floats.read(name))


def test_no_scale_in_reach_is_better() -> None:
    torch.manual_seed(0)
    weight, method = torch.randn(4, 32), METHODS["int4wo-32"]
    importance = torch.rand(32) + 0.1

    def error(scale: Tensor) -> Tensor:
        values = (weight / scale).round().clamp(-8, 7)
        return ((values * scale - weight).square() * importance).sum(1)

    chosen = error(round_weight(weight, method, torch.float32, importance).scale_OG)
    whole = weight.abs().amax(1, keepdim=True) / 7.5
    for part in torch.linspace(0.55, 1.0, 50):
        assert (chosen <= error(whole * part) * 1.02).all()


def test_small_files_have_an_index(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "int8wo", "--max-shard-size-mb", "1")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and all(file.stat().st_size < 1.6 * 2**20 for file in files)
    assert set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
    (whole := tmp_path / "b").mkdir()
    other = open_folder(quantized(whole, "int8wo"), "auto")
    read = open_folder(folder, "auto")
    assert read.sizes() == other.sizes()
    assert all(torch.equal(read.read(name), other.read(name)) for name in read.sizes())


def test_scales_do_not_change_the_model(tmp_path: Path) -> None:
    """Before rounding, what is multiplied into a layer is divided out of what it reads."""
    from transformers import AutoModelForCausalLM

    scales = calibrate(TINY, TEXT, METHODS["awq-like"], 256, 128)
    assert len(scales.into) > 10
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    ids = torch.randint(0, 2000, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        before = model(ids).logits
        for name, param in model.named_parameters():
            module, _, part = name.rpartition(".")
            if scales.changes(module):
                param.copy_(scales.apply(module, part, param))
        after = model(ids).logits
    assert (after - before).abs().max() < 2e-4 * before.abs().max()


def test_other_methods_only_weigh_inputs(tmp_path: Path) -> None:
    scales = calibrate(TINY, TEXT, METHODS["int4wo-128"], 256, 128)
    assert scales.importance and not scales.into and not scales.out_of


def test_norms_beside_numbered_experts_stay() -> None:
    experts = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
    layer = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(8), "gate": torch.nn.Linear(8, 2)})
    modules = dict(torch.nn.ModuleDict({"0": layer}).named_modules())
    assert _is_whole(modules, "0.norm")
    layer["experts"] = experts
    assert not _is_whole(dict(torch.nn.ModuleDict({"0": layer}).named_modules()), "0.norm")


def test_layers_that_the_checkpoint_names_otherwise_are_refused() -> None:
    scales = Scales()
    scales.into["model.layers.0.attention.query"] = torch.ones(4)
    with pytest.raises(ConfigError, match=r"no model\.layers\.0\.attention\.query\.weight"):
        run.Quantizer(TINY, METHODS["awq-like"], scales)


def with_outliers(folder: Path) -> Path:
    """The bundled model with eight channels of every norm's output 16 times as large, and the
    weights that read them as much smaller: as large models are, with the same outputs."""
    made = shutil.copytree(TINY, folder / "outliers")
    tensors = load_file(TINY / "model.safetensors")
    channels = torch.arange(8) * 31
    for name, tensor in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensor[channels] *= 16
        elif re.search(r"\.(q|k|v|gate|up)_proj\.weight$", name):
            tensor[:, channels] /= 16
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def test_calibration_lowers_the_error_of_outputs(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    small = ("--calibration", str(text), "--calibration-tokens", "1024")
    source = with_outliers(tmp_path)
    scaled = quantized(tmp_path, "awq-like", *small, model=source)
    plain = quantized(tmp_path, "int4wo-128", model=source)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    other = " ".join(
        f"The number after {n} is {n + 1}. Add {n} and {n * 3}." for n in range(90, 130)
    )
    ids = AutoTokenizer.from_pretrained(TINY)(other, return_tensors="pt").input_ids

    def logits(folder: Path) -> Tensor:
        source = open_folder(folder, "auto", torch.float32)
        state = {name: source.read(name).float() for name in source.sizes() if source.sizes()[name]}
        model.load_state_dict(state, strict=False)
        with torch.inference_mode():
            return model(ids).logits

    right = logits(TINY)
    errors = [float((logits(folder) - right).square().mean()) for folder in (scaled, plain)]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_that_add_one_are_seen(offset: float) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(16))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.weight + offset)

    norm = Norm()
    assert _is_shifted(norm) == bool(offset)
    scales = Scales()
    scales.out_of["n"] = torch.rand(16) + 0.5
    scales.shifted = {"n"} if offset else set()
    with torch.inference_mode():
        want = norm(torch.ones(16)) / scales.out_of["n"]
        norm.weight.copy_(scales.apply("n", "weight", norm.weight))
        assert torch.allclose(norm(torch.ones(16)), want)


@pytest.mark.parametrize("method", ["int4wo-128", "int8wo", "fp8"])
def test_transformers_reads_the_same_weights(tmp_path: Path, method: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = quantized(tmp_path, method)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    source = open_folder(folder, "auto", torch.float32)
    plain.load_state_dict({n: source.read(n).float() for n in linear_names(folder)}, strict=False)
    ids = torch.randint(0, 2000, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        if method == "fp8":  # which rounds activations too
            assert (model(ids).logits - plain(ids).logits).abs().max() < 1.5
        else:
            assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "awq-like"], "--calibration FILE"),
        (["--calibration", "nowhere.txt"], "--calibration"),
        (["--max-shard-size-mb", "0"], "--max-shard-size-mb"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main([str(TINY), "-o", str(tmp_path / "new"), *options])
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is there already"):
        main([str(TINY), "-o", str(tmp_path)])
    assert os.listdir(tmp_path) == ["mine"]


def test_what_is_quantized_is_refused(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "int8wo")
    with pytest.raises(CheckpointError, match="already quantized"):
        main([str(folder), "-o", str(tmp_path / "again")])


@pytest.mark.parametrize("has_begun", [False, True])
def test_nothing_is_left_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if has_begun:
        monkeypatch.setattr(os, "fsync", fail)
    else:
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr(run.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="-o "):
        main([str(TINY), "-o", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
