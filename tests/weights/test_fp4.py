"""Checkpoints in floats of 4 bits: gpt-oss as transformers reads it, mixtures, damage. Files of
ModelOpt and compressed-tensors: test_stored_formats.py."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from radixlm.base.errors import CheckpointError
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.quantized import fp4_values
from radixlm.layers.moe import MoeLayer
from radixlm.models.build import Model
from radixlm.quant.checkpoint import checkpoint_quant, parse
from radixlm.quant.fp4 import Fp4Quant, MixedQuant
from radixlm.quant.load_time import make_scheme
from radixlm.weights.folder import open_folder

IDS = {0: list(range(5, 25)), 1: [9, 8, 7]}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def _packed(shape: torch.Size, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of stacked weights [experts, in, out]."""
    generator = torch.Generator().manual_seed(seed)
    experts, num_in, num_out = shape
    blocks = (experts, num_out, num_in // 32, 16)
    return (
        torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator),
        torch.randint(118, 124, blocks[:3], dtype=torch.uint8, generator=generator),
    )


def _gpt_oss(folder: Path, quant: dict[str, Any] = MXFP4) -> tuple[Path, Path]:
    """(a checkpoint in MXFP4, one with the numbers that transformers makes of it)."""
    narrow, wide = folder / "narrow", folder / "wide"
    source = cached_tiny("GptOssForCausalLM", dtype=torch.bfloat16, **SIZES)
    for target in (narrow, wide):
        shutil.copytree(source, target)
    small = load_file(source / "model.safetensors")
    large = dict(small)
    for seed, name in enumerate(sorted(small)):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = _packed(small.pop(name).shape, seed)
            small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            large[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(small, narrow / "model.safetensors")
    save_file(large, wide / "model.safetensors")
    _state(narrow, quant)
    return narrow, wide


def _state(folder: Path, quant: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quant
    (folder / "config.json").write_text(json.dumps(config))


def _llama4(folder: Path) -> tuple[Path, Path]:
    """(a checkpoint in ModelOpt's NVFP4 with stacked experts, one with the same numbers)."""
    source, generator = cached_tiny("Llama4ForCausalLM"), torch.Generator().manual_seed(1)
    narrow, wide = folder / "narrow", folder / "wide"
    for target in (narrow, wide):
        shutil.copytree(source, target)
    small = load_file(source / "model.safetensors")
    large = dict(small)
    for name in sorted(small):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, num_in, num_out = small[name].shape
            codes = torch.randint(0, 16, (experts, num_in, num_out), generator=generator)
            scale = torch.rand(experts, num_in // 16, num_out, generator=generator) + 0.5
            scale = scale.to(torch.float8_e4m3fn)
            small[name] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
            small |= {f"{name}_weight_scale": scale, f"{name}_weight_scale_2": torch.tensor(0.02)}
            small[f"{name}_input_scale"] = torch.tensor(1.0)
            factors = scale.float().repeat_interleave(16, 1) * 0.02
            large[name] = fp4_values(codes.to(torch.uint8)) * factors
    save_file(small, narrow / "model.safetensors")
    save_file(large, wide / "model.safetensors")
    _state(narrow, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    return narrow, wide


def test_stacked_experts_of_llama4(tmp_path: Path) -> None:
    """Outputs are last there, of codes and of scales; four bits stay four bits."""
    narrow, wide = _llama4(tmp_path)
    want = PagedRunner(load_model(wide)).prefill(IDS)
    got = PagedRunner(load_model(narrow)).prefill(IDS)
    assert all(torch.equal(got[i], want[i]) for i in IDS)
    name = "model.layers.1.feed_forward.experts.down_proj"
    source, floats = open_folder(narrow, "auto"), load_file(wide / "model.safetensors")[name]
    weight = source.read_quantized(name)
    assert weight is not None and weight.is_fp4
    assert torch.equal(weight.dequantize(), floats.transpose(1, 2))
    kept = load_model(narrow, bind("cpu"), scheme=make_scheme(None, "", checkpoint_quant(narrow)))
    near = PagedRunner(kept).prefill(IDS)
    assert all((near[i] - want[i]).norm() < 0.1 * want[i].norm() for i in IDS)
    packs = [pack for one in _experts(kept) for side in one._weights for pack in side]
    assert not cpu.available or all(one.num_bytes < one.num_out * one.num_in for one in packs)


def _experts(model: Model) -> list[Any]:
    return [layer.experts for _, layer in model.layers() if isinstance(layer, MoeLayer)]


def test_gpt_oss_has_the_numbers_of_transformers(tmp_path: Path) -> None:
    narrow, wide = _gpt_oss(tmp_path)
    source, converted = open_folder(narrow, "auto"), load_file(wide / "model.safetensors")
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{part}"
        assert torch.equal(source.read(f"{name}_blocks"), converted[name].transpose(1, 2))
        kept = source.read_quantized(f"{name}_blocks")
        assert kept is not None and kept.group_size == 32
        assert torch.equal(kept.dequantize().bfloat16(), converted[name].transpose(1, 2))
    want = PagedRunner(load_model(wide)).prefill(IDS)
    got = PagedRunner(load_model(narrow)).prefill(IDS)
    for sequence in IDS:
        assert torch.equal(got[sequence], want[sequence])


@pytest.mark.parametrize("name", ["", "reference"])
def test_experts_stay_in_four_bits(name: str, tmp_path: Path) -> None:
    narrow, wide = _gpt_oss(tmp_path)
    kernels = bind("cpu", {"all": name} if name else None)
    scheme = make_scheme("mxfp4", "", checkpoint_quant(narrow))
    kept, floats = load_model(narrow, kernels, scheme=scheme), load_model(wide)
    if not name and cpu.available:
        packs = [one for experts in _experts(kept) for side in experts._weights for one in side]
        assert {one.fmt for one in packs} == {"fp4-32"}
        assert all(one.num_bytes < one.num_out * one.num_in for one in packs)
    want, got = PagedRunner(floats).prefill(IDS), PagedRunner(kept).prefill(IDS)
    for sequence in IDS:
        error = (got[sequence] - want[sequence]).norm() / want[sequence].norm()
        assert float(error) < 0.1
    x, weights = torch.randn(3, 64, generator=torch.Generator().manual_seed(5)), torch.ones(3, 1)
    for ours, theirs in zip(_experts(kept), _experts(floats), strict=True):
        for expert in range(ours.num_experts):
            ids = torch.full((3, 1), expert)
            exact = theirs.run(x, weights, ids)
            error = (ours.run(x, weights, ids) - exact).norm() / exact.norm()
            assert float(error) < 0.03  # activations in 8 bits


def test_experts_of_quark_stay_in_four_bits(tmp_path: Path) -> None:
    """gpt-oss by Quark: each expert's gate and up are one matrix, row by row in turn."""
    narrow, _ = _gpt_oss(tmp_path)
    other = tmp_path / "quark"
    shutil.copytree(narrow, other)
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(narrow / "model.safetensors").items():
        at, _, part = name.partition(".experts.")
        stem, _, kind = part.rpartition("_")
        last = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}.get(kind, "")
        for expert, one in enumerate(value if part else ()):
            rows = one.flatten(-2) if kind == "blocks" else one
            tensors[f"{at}.experts.{expert}.{stem}.{last}"] = rows.clone()
        if not part:
            tensors[name] = value
    save_file(tensors, other / "model.safetensors")
    fp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
    _state(other, {"quant_method": "quark", "global_quant_config": {"weight": fp4}})
    ours, theirs = (
        PagedRunner(load_model(at, scheme=make_scheme(None, "", checkpoint_quant(at)))).prefill(IDS)
        for at in (other, narrow)
    )
    assert all(torch.equal(ours[i], theirs[i]) for i in IDS)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("down_proj_scales", None, "down_proj_scales is missing"),
        ("down_proj_scales", torch.zeros(4, 64, 3), "not powers of two in bytes"),
        ("down_proj_scales", torch.zeros(4, 64, 2).byte(), r"has scales \[4, 64, 2\]"),
        ("gate_up_proj_blocks", torch.zeros(4, 192, 2, 16), "not of bytes with two numbers each"),
        ("gate_up_proj_scales", torch.full((4, 192, 2), 255).byte(), "holds infinity"),
    ],
)
def test_damage_is_named(part: str, value: Tensor | None, said: str, tmp_path: Path) -> None:
    narrow, _ = _gpt_oss(tmp_path)
    tensors = load_file(narrow / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{part}"
    del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, narrow / "model.safetensors")
    scheme = make_scheme(None, "", checkpoint_quant(narrow))
    with pytest.raises(CheckpointError, match=said):
        load_model(narrow, scheme=scheme)


def test_a_mixture_keeps_each_kind_of_numbers(tmp_path: Path) -> None:
    """4 bit floats, 4 bit integers and 8 bit floats in one checkpoint of compressed-tensors."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    source = cached_tiny("LlamaForCausalLM", dtype=torch.bfloat16, **sizes)
    folder = tmp_path / "mixed"
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    want: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stem, shape = name.removesuffix(".weight"), tensors.pop(name).shape
        codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
        scale = torch.rand(shape[0], shape[1] // 32, generator=generator) * 0.01 + 1e-3
        wide = scale.repeat_interleave(32, 1)
        if "self_attn" in name:
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            powers = (scale * 1e4).byte() % 4 + 118
            tensors[f"{stem}.weight_packed"] = codes[:, 0::2] | codes[:, 1::2] << 4
            tensors[f"{stem}.weight_scale"] = powers
            numbers = torch.cat((table, -table))[codes.long()]
            want[name] = numbers * torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
        elif "down" in name:
            eight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            tensors |= {name: eight, f"{stem}.weight_scale": scale[:, :1].contiguous()}
            want[name] = eight.float() * scale[:, :1]
        else:
            words = codes.view(shape[0], -1, 8).int() << torch.arange(0, 32, 4, dtype=torch.int32)
            tensors[f"{stem}.weight_packed"] = words.sum(-1, dtype=torch.int32)
            tensors[f"{stem}.weight_scale"] = scale
            tensors[f"{stem}.weight_shape"] = torch.tensor(shape)
            want[name] = (codes.float() - 8) * wide
    save_file(tensors, folder / "model.safetensors")
    kinds = [
        {"type": "float", "num_bits": 4},
        {"type": "float", "num_bits": 8, "strategy": "channel"},
    ]
    kinds.append({"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group"})
    groups = {f"group_{i}": {"weights": kind} for i, kind in enumerate(kinds)}
    groups["group_2"]["format"] = "pack-quantized"  # type: ignore[assignment]
    stated = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    _state(folder, stated | {"config_groups": groups})
    quant = checkpoint_quant(folder)
    assert isinstance(quant, MixedQuant) and len(quant.parts) == 3
    read = open_folder(folder, "auto", torch.float32)
    for name, numbers in want.items():
        assert torch.equal(read.read(name), numbers), name
        kept = read.read_quantized(name) if read.is_quantized(name) else None
        assert (kept is None) == ("down" in name), name
        assert kept is None or kept.is_fp4 == ("self_attn" in name)
    kept_model = load_model(folder, bind("cpu"), scheme=make_scheme(None, "", quant))
    got = PagedRunner(kept_model).prefill(IDS)
    floats = PagedRunner(load_model(folder, weight_dtype=torch.float32)).prefill(IDS)
    for sequence in IDS:
        error = (got[sequence] - floats[sequence]).norm() / floats[sequence].norm()
        assert float(error) < 0.03


def test_configs_of_modelopt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    assert checkpoint_quant(tmp_path) == Fp4Quant("modelopt")
    for name in ("modelopt_fp4", "nvfp4", "petit_nvfp4"):
        quant = parse({"quant_method": name})
        assert quant == Fp4Quant("modelopt") and quant.matches_flag(name)
    mixed = parse({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    assert isinstance(mixed, MixedQuant)
    for name, method in (("W4A16_NVFP4", Fp4Quant), ("W4A16_AWQ", type(None))):
        assert isinstance(parse({"quant_method": "modelopt", "quant_algo": name}), method)
    for name in ("modelopt_fp8", "modelopt_mixed"):
        quant = parse({"quant_method": name})
        assert quant is not None and quant.matches_flag(name)


def _v4(folder: Path) -> tuple[Path, Path]:
    """(a checkpoint as DeepSeek V4 is published, one with its numbers): 8 bit floats in blocks,
    experts in 4 bits, scales that are powers of two."""
    source = cached_tiny("DeepseekV4ForCausalLM", dtype=torch.bfloat16)
    narrow, wide = folder / "narrow", folder / "wide"
    for target in (narrow, wide):
        shutil.copytree(source, target)
    small = load_file(source / "model.safetensors")
    large = dict(small)
    generator = torch.Generator().manual_seed(0)
    for name in sorted(small):
        if not re.search(r"attn\.w[qko]\w+\.weight|experts\.\w+(\.w\d)?\.weight", name):
            continue
        num_out, num_in = small[name].shape
        group = (1, 32) if re.search(r"experts\.\d", name) else (128, 128)
        sizes = (-(-num_out // group[0]), -(-num_in // group[1]))
        scale = torch.randint(118, 124, sizes, dtype=torch.uint8, generator=generator)
        if group[0] == 1:
            codes = torch.randint(0, 256, (num_out, num_in // 2), generator=generator).byte()
            small[name] = codes.view(torch.int8)
            value = fp4_values(torch.stack((codes & 15, codes >> 4), -1).flatten(1))
        else:
            small[name] = small[name].to(torch.float8_e4m3fn)
            value = small[name].float()
        small[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
        factors = torch.exp2(scale.float() - 127)
        spread = factors.repeat_interleave(group[0], 0).repeat_interleave(group[1], 1)
        large[name] = (value * spread[:num_out, :num_in]).bfloat16()
    save_file(small, narrow / "model.safetensors")
    save_file(large, wide / "model.safetensors")
    _state(narrow, {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"})
    config = json.loads((narrow / "config.json").read_text()) | {"expert_dtype": "fp4"}
    (narrow / "config.json").write_text(json.dumps(config))
    return narrow, wide


def test_deepseek_v4_as_it_is_published(tmp_path: Path) -> None:
    narrow, wide = _v4(tmp_path)
    stored = load_file(narrow / "model.safetensors")
    assert any(name.endswith("experts.1.w2.scale") for name in stored)
    want, got = (PagedRunner(load_model(at)).prefill(IDS) for at in (wide, narrow))
    assert all(torch.equal(got[i], want[i]) for i in IDS)
    if cpu.available:
        scheme = make_scheme(None, "", checkpoint_quant(narrow))
        kept = _experts(load_model(narrow, bind("cpu"), scheme=scheme))
        packs = [pack for one in kept for side in one._weights for pack in side]
        assert {pack.fmt for pack in packs} == {"fp4-32"}


def test_inputs_that_were_scaled_before(tmp_path: Path) -> None:
    """NVFP4_AWQ of ModelOpt."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randint(0, 256, (8, 16), generator=generator).byte(),
        "a.weight_scale": torch.rand(8, 2, generator=generator).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.tensor(0.5),
    }
    _state_of(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    plain = open_folder(tmp_path, "auto", torch.float32).read("a.weight")
    tensors["a.pre_quant_scale"] = torch.rand(32, generator=generator)
    _state_of(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    source = open_folder(tmp_path, "auto", torch.float32)
    assert torch.equal(source.read("a.weight"), plain * tensors["a.pre_quant_scale"])
    assert source.read_quantized("a.weight") is None and not source.sizes()["a.pre_quant_scale"]
    tensors["a.pre_quant_scale"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"pre_quant_scale \[3\]: inputs are 32"):
        open_folder(tmp_path, "auto", torch.float32).read("a.weight")


def _state_of(folder: Path, tensors: dict[str, Tensor], quant: dict[str, Any]) -> None:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    _state(folder, quant)
