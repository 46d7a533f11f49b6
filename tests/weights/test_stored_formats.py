"""Checkpoints of quantization libraries: every number is the library's own, bit for bit, and a
model computes with it. The fixtures hold what ``scripts/make_quant_fixtures.py`` had the libraries
write."""

from __future__ import annotations

import json
import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from torch import Tensor

from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.linear import GatherLinear
from radixlm.layers.linear import Linear
from radixlm.models.build import Model
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.weights.folder import open_folder

FIXTURES = Path(__file__).parent / "fixtures"
IDS = {0: list(range(5, 25)), 1: [9, 8, 7]}
QUANTIZED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
HQQ, AO = {"quant_method": "hqq"}, {"quant_method": "torchao"}
BNB: dict[str, Any] = {"quant_method": "bitsandbytes"}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors"}
E2M1 = {"type": "float", "num_bits": 4}
# "library/case" -> (quantization_config, format of the packed layer; "": floats)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes/nf4": (BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ""),
    "bitsandbytes/nf4-nested": (BNB | {"load_in_4bit": True}, ""),
    "bitsandbytes/fp4": (BNB | {"load_in_4bit": True}, ""),
    "bitsandbytes/int8": (BNB | {"load_in_8bit": True}, "int8wo"),
    "modelopt/nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4-16"),
    "compressed/nvfp4": (PACKED | {"config_groups": {"a": {"weights": E2M1}}}, "fp4-16"),
    "compressed/mxfp4": (PACKED | {"config_groups": {"a": {"weights": E2M1}}}, "fp4-32"),
    "compressed/sparse24": (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ""),
    "hqq/8-64-1": (HQQ, "gather w4a8-64"),
    "hqq/4-64-1": (HQQ, "w4a8-64"),
    "hqq/3-64-1": (HQQ, "w4a8-64"),
    "hqq/2-32-1": (HQQ, "w4a8-32"),
    "hqq/1-32-1": (HQQ, "w4a8-32"),
    "hqq/4-None-1": (HQQ, "w4a8-128"),
    "hqq/4-64-0": (HQQ, ""),
    "torchao/int8wo": (AO, "int8wo"),
    "torchao/int8dq": (AO, "w8a8"),
    "torchao/fp8wo": (AO, ""),
    "torchao/int4": (AO, "w4a8-32"),
    "torchao/int2": (AO, "w4a8-64"),
    "torchao/int6": (AO, "gather w4a8-64"),
}


@cache
def stored(case: str) -> tuple[dict[str, Tensor], Tensor]:
    """(the library's tensors by their last names, the numbers that it makes of them)."""
    library, _, name = case.partition("/")
    tensors = {
        part.removeprefix(f"{name}/"): tensor
        for part, tensor in load_file(FIXTURES / f"{library}.safetensors").items()
        if part.startswith(f"{name}/")
    }
    tensors.pop("original", None)
    return tensors, tensors.pop("expected")


def metadata_of(case: str) -> str | None:
    """What torchao says of the tensor in the file's metadata."""
    with safe_open(FIXTURES / f"{case.partition('/')[0]}.safetensors", "pt") as file:
        return (file.metadata() or {}).get(case)


def model_shape(num_rows: int) -> dict[str, int]:
    """q, k, v, gate and up are [num_rows, 128], as the fixtures are; o and down [128, num_rows]."""
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), num_rows // 8)
    rest = {"intermediate_size": num_rows, "num_hidden_layers": 2}
    return {"hidden_size": 128, "head_dim": 8, **heads, **rest}


def write(case: str, folder: Path) -> tuple[Path, Path]:
    """(a checkpoint with the stored tensors, one with the library's numbers) under ``folder``."""
    parts, expected = stored(case)
    described = metadata_of(case)
    metadata: dict[str, str] = {}
    narrow, wide = folder / "narrow", folder / "wide"
    source = cached_tiny("LlamaForCausalLM", dtype=torch.bfloat16, **model_shape(len(expected)))
    for target in (narrow, wide):
        shutil.copytree(source, target)
    small = load_file(source / "model.safetensors")
    large = dict(small)
    for name in list(small):
        if any(part in name for part in QUANTIZED):
            stem = name.removesuffix(".weight")
            del small[name]
            small |= {f"{stem}.{part}": tensor.clone() for part, tensor in parts.items()}
            large[name] = expected.clone()
            if described:
                metadata[name] = described
    save_file(small, narrow / "model.safetensors", metadata)
    save_file(large, wide / "model.safetensors")
    config = json.loads((narrow / "config.json").read_text())
    config["quantization_config"] = CASES[case][0]
    (narrow / "config.json").write_text(json.dumps(config))
    return narrow, wide


def formats(model: Model) -> set[str]:
    """Of the layers with 128 inputs inside blocks: "" for floats."""
    packs: list[Any] = [
        layer.packed
        for path, layer in model.layers()
        if isinstance(layer, Linear) and path.startswith("blocks.") and layer.in_features == 128
    ]
    names = (
        f"gather {p.inner.packed.fmt}" if isinstance(p, GatherLinear) else p.packed.fmt
        for p in packs
    )
    return {"" if name == "bf16" else name for name in names}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_librarys_own(case: str, tmp_path: Path) -> None:
    narrow, wide = write(case, tmp_path)
    expected = stored(case)[1]
    source = open_folder(narrow, "auto")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(source.read(name), expected)
    want = PagedRunner(load_model(wide)).prefill(IDS)
    got = PagedRunner(load_model(narrow)).prefill(IDS)
    for sequence in IDS:
        torch.testing.assert_close(got[sequence], want[sequence], rtol=0.0, atol=0.0)
    # what a layer keeps is the same but for the order of two products
    kept = source.read_quantized(name)
    assert (kept is None) == (not CASES[case][1])
    if kept is not None:
        torch.testing.assert_close(kept.dequantize().bfloat16(), expected, rtol=0.01, atol=0.0)


@pytest.mark.skipif(not cpu.available, reason=cpu.reason)
@pytest.mark.parametrize("case", CASES)
def test_layers_keep_what_kernels_multiply(case: str, tmp_path: Path) -> None:
    narrow, wide = write(case, tmp_path)
    scheme = make_scheme(None, "", checkpoint_quant(narrow))
    model = load_model(narrow, bind("cpu"), scheme=scheme)
    assert formats(model) == {CASES[case][1]}
    want = PagedRunner(load_model(wide)).prefill(IDS)
    got = PagedRunner(model).prefill(IDS)
    # the library's numbers are rounded to bfloat16, kept ones are not; scales of 8 bit floats are
    # found again; w4a8 and w8a8 round activations, and so do products of pairs of bfloat16
    rounds = "fp8" in case or cpu.isa in ("amx", "avx512bf16")
    near = {"": 1e-2 if rounds else 1e-3, "int8wo": 2e-2}.get(CASES[case][1], 0.1)
    for sequence in IDS:
        assert float((got[sequence] - want[sequence]).abs().max() / want[0].abs().max()) < near


def test_experts_that_torchao_left_alone_stay_floats(tmp_path: Path) -> None:
    """Stacked experts of gpt-oss beside linear layers in int8."""
    narrow, wide = write("torchao/int8wo", tmp_path)
    source = cached_tiny("GptOssForCausalLM", dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.o_proj"
    for target in (narrow, wide):
        tensors = load_file(source / "model.safetensors")
        weight = torch.ones_like(tensors[f"{name}.weight"])
        metadata = {}
        if target == narrow:
            del tensors[f"{name}.weight"]
            tensors[f"{name}._weight_qdata"] = weight.to(torch.int8)
            tensors[f"{name}._weight_scale"] = torch.full((len(weight), 1), 0.5)
            block = [1, weight.shape[1]]
            tensor = {"_type": "Int8Tensor", "_data": {"block_size": block}}
            metadata[f"{name}.weight"] = json.dumps(tensor)
        else:
            tensors[f"{name}.weight"] = weight / 2
        save_file(tensors, target / "model.safetensors", metadata)
        config = json.loads((source / "config.json").read_text())
        more = {"quantization_config": AO} if target == narrow else {}
        (target / "config.json").write_text(json.dumps(config | more))
    want = PagedRunner(load_model(wide)).prefill(IDS)
    kept = load_model(narrow, scheme=make_scheme(None, "", checkpoint_quant(narrow)))
    for sequence, got in PagedRunner(kept).prefill(IDS).items():
        assert float((got - want[sequence]).norm()) < 0.02 * float(want[sequence].norm())


def test_the_log_says_what_is_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    narrow, _ = write("bitsandbytes/nf4", tmp_path)
    with caplog.at_level(logging.INFO):
        open_folder(narrow, "auto")
    assert "0 weights of 8 bits; 10 of 4 bits, dequantized to bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight.absmax", None, r"up_proj.weight.absmax is missing"),
        ("weight.absmax", torch.ones(3), "3 blocks of 64, which do not make"),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([65]).byte(), "nf4 says b'A'"),
        ("weight.quant_state.bitsandbytes__nf4", None, "bitsandbytes__nf4 or fp4 is missing"),
        ("weight", torch.zeros(7, 1).byte(), "has 7 bytes"),
    ],
)
def test_damaged_parts_are_named(
    part: str, value: Tensor | None, said: str, tmp_path: Path
) -> None:
    narrow, _ = write("bitsandbytes/nf4", tmp_path)
    tensors = load_file(narrow / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, narrow / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        open_folder(narrow, "auto").read("model.layers.0.mlp.up_proj.weight")
