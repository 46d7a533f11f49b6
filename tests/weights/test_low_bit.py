"""Quark, w4afp8 and bitnet: the numbers are those of each format's definition."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.weights.test_permuted_integers import values
from torch import Tensor

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops import fp8
from radixlm.quant.checkpoint import checkpoint_quant, parse
from radixlm.quant.fp4 import Fp4Quant, MixedQuant
from radixlm.quant.fp8 import Fp8Quant
from radixlm.quant.load_time import make_scheme
from radixlm.weights.folder import open_folder
from radixlm.weights.source import TensorSource

NAME = "model.layers.0.mlp.up_proj"


def opened(folder: Path, config: dict[str, Any], parts: dict[str, Tensor]) -> TensorSource:
    stored = {f"{NAME}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_folder(folder, "auto", torch.float32)


def check(source: TensorSource, want: Tensor) -> None:
    name = f"{NAME}.weight"
    assert torch.equal(source.read(name), want)
    kept = source.read_quantized(name)
    assert kept is not None
    torch.testing.assert_close(kept.dequantize(), want, rtol=1e-6, atol=1e-6)


def quark(dtype: str, qscheme: str, **more: object) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": qscheme, "group_size": 32, "ch_axis": 0}
    spec = {"global_quant_config": {"weight": weight}, "quant_method": "quark"}
    return spec | {"export": {"pack_method": "reorder"}, **more}


def words(numbers: Tensor, order: tuple[int, ...]) -> Tensor:
    """Quark's Pack_4_bits: eight numbers of a row in a word."""
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    chosen = (numbers.reshape(-1, numbers.shape[-1] // 8, 8)[..., list(order)] & 15).int()
    return (chosen << shifts).sum(-1).to(torch.int32)


ORDERS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": tuple(range(8))}


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("qscheme", ["per_group", "per_channel", "per_tensor"])
def test_quark_integers(dtype: str, qscheme: str, method: str, tmp_path: Path) -> None:
    """Quark 0.13: pack.py and the shapes of _infer_scale_zero_point_shape."""
    bits, is_signed = int(dtype.strip("uint")), dtype.startswith("i")
    half = 1 << (bits - 1)
    stored = (values(16, 64).int() << (bits - 4)) - (half if is_signed else 0)
    shape = {"per_group": (16, 2), "per_channel": (16, 1), "per_tensor": (1, 1)}[qscheme]
    scale = torch.rand(shape).half()
    zero = torch.randint(-3, 3, shape) + (0 if is_signed else half)
    if qscheme == "per_tensor":
        zero = zero * 0 + (0 if is_signed else half)  # of unsigned ones, the middle
    each = 64 // shape[1]
    wide = (stored - zero.repeat_interleave(each, 1)) * scale.float().repeat_interleave(each, 1)

    def packed(numbers: Tensor) -> Tensor:
        by_column = numbers.t() if qscheme == "per_group" else numbers
        if bits == 4:
            return words(by_column, ORDERS[method])
        return by_column.to(torch.int8 if is_signed else torch.uint8)

    parts = {
        "weight": packed(stored),
        "weight_scale": scale.t() if qscheme == "per_group" else scale,
    }
    if qscheme == "per_channel":
        parts["weight_scale"] = scale[:, 0]
        parts["weight_zero_point"] = packed(zero[:, 0][None])[0]
    elif qscheme == "per_group":
        parts["weight_scale"] = scale.t()
        parts["weight_zero_point"] = packed(zero)
    config = quark(dtype, qscheme, export={"pack_method": method})
    source = opened(tmp_path, config, parts)
    check(source, wide)


def test_quark_floats_are_read_by_the_sources_of_floats() -> None:
    assert parse(quark("fp8_e4m3", "per_tensor")) == Fp8Quant("quark")
    assert parse(quark("fp4", "per_group")) == Fp4Quant("quark")
    both = quark(
        "fp4", "per_group", layer_quant_config={"*down*": {"weight": {"dtype": "fp8_e4m3"}}}
    )
    assert parse(both) == MixedQuant("quark", (Fp8Quant("quark"), Fp4Quant("quark")))
    assert Fp8Quant("quark").matches_flag("quark")
    assert parse({"quant_method": "quark"}) is None
    with pytest.raises(ConfigError, match="quark in int3 cannot be loaded; known dtype: int4"):
        parse(quark("int3", "per_group"))


def test_quark_integers_beside_floats_of_4_bits(tmp_path: Path) -> None:
    """Bytes of two floats are no integers, whichever config.json names first."""
    whole, codes = values(8, 64).to(torch.int8) - 8, values(8, 64)
    other = NAME.replace("up", "down")
    powers = torch.full((8, 2), 125, dtype=torch.uint8)
    parts = {"weight": whole, "weight_scale": torch.full((8,), 0.5)}
    stored = {f"{NAME}.{name}": tensor for name, tensor in parts.items()}
    stored[f"{other}.weight"] = codes[:, 0::2] | codes[:, 1::2] << 4
    save_file(stored | {f"{other}.weight_scale": powers}, tmp_path / "model.safetensors")
    config = quark(
        "int8", "per_channel", layer_quant_config={"*down*": {"weight": {"dtype": "fp4"}}}
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    source = open_folder(tmp_path, "auto", torch.float32)
    assert torch.equal(source.read(f"{NAME}.weight"), whole * 0.5)
    floats = source.read_quantized(f"{other}.weight")
    assert floats is not None and floats.is_fp4 and source.is_quantized(f"{other}.weight")
    assert torch.equal(floats.values_OI, codes) and bool((floats.scale_OG == 0.25).all())
    assert torch.equal(source.read(f"{other}.weight"), floats.dequantize())


def test_w4afp8(tmp_path: Path) -> None:
    """As SGLang's test_cutlass_w4a8_moe packs: the first of two numbers in the lower half."""
    signed = values(8, 256).to(torch.int8) - 8
    scale = torch.rand(8, 2).bfloat16()
    parts = {
        "weight": (signed[:, 1::2] << 4) | (signed[:, ::2] & 15),
        "weight_scale_inv": scale,
        "input_scale": torch.ones(1),
    }
    source = opened(tmp_path, {"quant_method": "w4afp8"}, parts)
    check(source, signed * scale.float().repeat_interleave(128, 1))


def test_w4afp8_reads_fp8_beside_it(tmp_path: Path) -> None:
    numbers, scale = fp8.quantize_blocks(torch.randn(256, 128))
    source = opened(
        tmp_path, {"quant_method": "w4afp8"}, {"weight": numbers, "weight_scale_inv": scale}
    )
    want = numbers.float() * fp8.spread(scale, 256, 128)
    assert torch.equal(source.read(f"{NAME}.weight"), want)


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet(kind: str, tmp_path: Path) -> None:
    """As transformers packs and unpacks ternary weights."""
    from transformers.integrations.bitnet import pack_weights, unpack_weights  # takes a second

    ternary = torch.randint(-1, 2, (16, 64)).float()
    scale = torch.tensor([1.7])
    packed = pack_weights(ternary.clone())  # it changes its argument
    with torch.compiler.set_stance("force_eager"):  # compiling it takes ten seconds
        assert torch.equal(unpack_weights(packed, torch.float32), ternary)
    config = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    source = opened(tmp_path, config, {"weight": packed, "weight_scale": scale})
    check(source, ternary * (1 / scale if kind == "bitlinear" else scale))


def test_bitnet_online_is_that_of_transformers(tmp_path: Path) -> None:
    weight = torch.randn(16, 64)
    config = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    source = opened(tmp_path, config | {"quantization_mode": "online"}, {"weight": weight})
    scale = 1 / weight.abs().mean().clamp(min=1e-5)
    check(source, (weight * scale).round().clamp(-1, 1) / scale)


def torchao(folder: Path, kind: str, parts: dict[str, Tensor]) -> TensorSource:
    names = {f"{NAME}._weight_{part}": tensor.contiguous() for part, tensor in parts.items()}
    record = {"_type": kind, "_data": {"block_size": [1, 32]}, "_tensor_data_names": list(parts)}
    save_file(names, folder / "model.safetensors", {f"{NAME}.weight": json.dumps(record)})
    config = {"quantization_config": {"quant_method": "torchao"}}
    (folder / "config.json").write_text(json.dumps(config))
    return open_folder(folder, "auto", torch.float32)


def test_torchaos_int4_tensor(tmp_path: Path) -> None:
    """fbgemm's int4_row_quantize_zp: weight = value * scale + zero, values -8..7."""
    signed = values(8, 64).to(torch.int8) - 8
    scale, zero = torch.rand(2, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    packed = (signed[:, 1::2] << 4) | (signed[:, ::2] & 15)
    parts = {"qdata": packed, "scale": scale, "zero_point": zero}
    wide, each = torchao(tmp_path, "Int4Tensor", parts), 32
    want = signed * scale.float().t().repeat_interleave(each, 1)
    want += zero.float().t().repeat_interleave(each, 1)
    got = wide.read(f"{NAME}.weight")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert wide.read_quantized(f"{NAME}.weight") is not None


def test_torchaos_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"up_proj.weight is a Int4Packed; known: Int8Tensor"):
        torchao(tmp_path, "Int4Packed", {"qdata": torch.zeros(1)})


def w4afp8_parts(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(stored tensors, numbers): experts in 4 bits, all else in 8 bit floats."""
    if ".experts." not in name:
        numbers, scale = fp8.quantize_blocks(weight)
        wide = numbers.float() * fp8.spread(scale, *weight.shape)
        return {"weight": numbers, "weight_scale_inv": scale}, wide
    scale = weight.view(len(weight), -1, 128).abs().amax(-1) / 7
    signed = (weight / scale.repeat_interleave(128, 1)).round().to(torch.int8)
    packed = (signed[:, 1::2] << 4) | (signed[:, ::2] & 15)
    wide = signed * scale.repeat_interleave(128, 1)
    return {"weight": packed, "weight_scale_inv": scale}, wide


def quark_parts(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.view(len(weight), -1, 32).abs().amax(-1) / 7
    signed = (weight / scale.repeat_interleave(32, 1)).round().to(torch.int8)
    parts = {"weight": words(signed.t(), ORDERS["reorder"]), "weight_scale": scale.t()}
    return parts, signed * scale.repeat_interleave(32, 1)


def bitnet_parts(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    from transformers.integrations.bitnet import pack_weights

    ternary, scale = (weight / 0.1).round().clamp(-1, 1), torch.tensor([10.0])
    return {"weight": pack_weights(ternary.clone()), "weight_scale": scale}, ternary / scale


MODELS = {
    "w4afp8": ("Qwen3MoeForCausalLM", {"quant_method": "w4afp8"}, w4afp8_parts),
    "quark": ("LlamaForCausalLM", quark("int4", "per_group"), quark_parts),
    "bitnet": ("LlamaForCausalLM", {"quant_method": "bitnet"}, bitnet_parts),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_computes_with_the_numbers(case: str, tmp_path: Path) -> None:
    arch, config, make = MODELS[case]
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"moe_intermediate_size": 128} if "Moe" in arch else {}
    source = cached_tiny(arch, dtype=torch.float32, **shape)
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    for folder in (narrow, wide):
        shutil.copytree(source, folder)
    small = load_file(source / "model.safetensors")
    large = dict(small)
    for name, weight in large.items():
        if "_proj." in name:
            del small[name]
            parts, numbers = make(name, weight)
            stem = name.removesuffix(".weight")
            small |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            large[name] = numbers.contiguous()
    save_file(small, narrow / "model.safetensors")
    save_file(large, wide / "model.safetensors")
    stated = json.loads((narrow / "config.json").read_text()) | {"quantization_config": config}
    (narrow / "config.json").write_text(json.dumps(stated))
    ids = {0: list(range(5, 25)), 1: [9, 8, 7]}
    want = PagedRunner(load_model(wide)).prefill(ids)
    plain = PagedRunner(load_model(narrow)).prefill(ids)
    scheme = make_scheme(None, "", checkpoint_quant(narrow))
    kernels = bind("cpu", None if cpu.available else {"all": "reference"})
    kept = PagedRunner(load_model(narrow, kernels, scheme=scheme)).prefill(ids)
    for sequence in ids:
        torch.testing.assert_close(plain[sequence], want[sequence], rtol=1e-4, atol=1e-4)
        error_T = (kept[sequence] - want[sequence]).pow(2).mean(1).sqrt()
        assert float(error_T.median()) < 0.1 * float(want[0].std())  # activations in 8 bits


def test_pickles_of_libraries_are_refused_with_a_hint(tmp_path: Path) -> None:
    """HQQ's qmodel.pt, and a class of a library in a .bin."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
    torch.save({"layer": {"W_q": torch.zeros(2)}}, tmp_path / "qmodel.pt")
    with pytest.raises(
        CheckpointError, match=r"'layer' is a dict, not a tensor; save .* HQQ by tr"
    ):
        open_folder(tmp_path, "auto")
    torch.save({"layer": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"as safetensors \(GLOBAL pathlib\.\w+\)$"):
        open_folder(tmp_path, "auto")
