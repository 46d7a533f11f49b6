"""Encoders of quantized checkpoints: transformers would need other packages to read them, or take
the stored numbers for the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")
from radixlm.arch.hf import describe
from radixlm.arch.names import is_ignorable
from radixlm.models.encoders.transformers_encoder import TransformersEncoder
from tests.multimodal.test_published_as_code import sarashina
from tests.multimodal.tiny import FAMILIES, save

Parts = dict[str, Tensor]


def _fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    value = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": value, "weight_scale": scale}, value.float() * scale


def _int8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    value = (weight / scale).round().to(torch.int8)
    return {"weight": value, "weight_scale": scale}, value * scale


def _compressed(kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save(FAMILIES["qwen2_5_vl"](), folder)
    return folder


def _weights(folder: Path) -> Parts:
    encoder = TransformersEncoder(folder, torch.device("cpu"), torch.bfloat16)
    return dict(encoder._model.named_parameters())


@pytest.mark.parametrize("part", ["visual.", "model.layers."])
@pytest.mark.parametrize(
    ("quantize", "stated"),
    [
        (_fp8, {"quant_method": "fp8"}),
        (_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
        (_fp8, {"quant_method": "fp8", "in": "text_config"}),
        (_fp8, _compressed("float")),
        (_int8, _compressed("int")),
    ],
)
def test_quantized_weights(
    quantize: Callable[[Tensor], tuple[Parts, Tensor]],
    stated: dict[str, Any],
    part: str,
    saved: Path,
    tmp_path: Path,
) -> None:
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    for folder in (narrow, wide):
        shutil.copytree(saved, folder)
    small = load_file(saved / "model.safetensors")
    large = dict(small)
    for name in [n for n, t in large.items() if part in n and "proj.w" in n and t.ndim == 2]:
        parts, large[name] = quantize(small.pop(name).float())
        small |= {name.removesuffix("weight") + kind: value for kind, value in parts.items()}
    assert len(small) > len(large)
    save_file(small, narrow / "model.safetensors")
    save_file(large, wide / "model.safetensors")
    config = json.loads((narrow / "config.json").read_text())
    where = config["text_config"] if "in" in stated else config
    where["quantization_config"] = stated
    (narrow / "config.json").write_text(json.dumps(config))
    got, want = _weights(narrow), _weights(wide)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_norm_beside_the_decoder(tmp_path: Path) -> None:
    """Of Sarashina2-Vision, whose rules name it: other models' are not taken for an encoder's."""
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    for folder in (narrow, wide):
        folder.mkdir()
        sarashina(folder)
    small = load_file(wide / "model.safetensors")
    large = dict(small)
    for name in [n for n, t in large.items() if "visual" in n and t.ndim == 2]:
        parts, large[name] = _fp8(small.pop(name).float())
        small |= {name.removesuffix("weight") + kind: value for kind, value in parts.items()}
    save_file(small, narrow / "model.safetensors")
    save_file(large, wide / "model.safetensors")
    raw = json.loads((narrow / "config.json").read_text())
    stated = raw | {"quantization_config": _compressed("float")}
    (narrow / "config.json").write_text(json.dumps(stated))
    got, want = _weights(narrow), _weights(wide)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert is_ignorable("norm.weight", describe(narrow))
    assert not is_ignorable(
        "norm.weight", describe({**raw["text_config"], "architectures": ["LlamaForCausalLM"]})
    )
