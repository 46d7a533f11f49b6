"""Integers in the order of GPU kernels come back in the order in which published packers took
them. The packers here follow the kernels' own repositories, number by number."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from radixlm.quant.checkpoint import parse
from radixlm.weights.folder import open_folder
from radixlm.weights.permuted_source import (
    unpack_gemv_fast,
    unpack_marlin,
    unpack_qoq,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def values(num_out: int, num_in: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_out + num_in)
    return torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)


def test_marlin() -> None:
    """A thread of 32 has, of each of 4 tiles, rows 2t, 2t + 1, 2t + 8, 2t + 9 of columns c, c + 8
    (IST-DASLab/marlin: _get_perms)."""
    want = values(256, 128)
    tiles = want.t().reshape(8, 16, 16, 16).transpose(1, 2).reshape(8, 16 * 256)
    places = [
        16 * row + lane // 4 + 8 * block + 256 * tile
        for lane in range(32)
        for tile in range(4)
        for block in (0, 1)
        for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1)
    ]
    order = [places[8 * i + j] for i in range(128) for j in ORDER]
    permuted = tiles.reshape(-1, 1024)[:, order].reshape(8, -1, 8).long()
    words = sum(permuted[..., i] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    assert torch.equal(unpack_marlin(words.to(torch.int32)), want)


def test_gemv_fast() -> None:
    """AutoAWQ's pack_intweight(interleave=4, kstride=64)."""
    want = values(8, 128)
    rows = want.reshape(8, 4, 4, 4, 2).transpose(2, 3).reshape(8, 4, 4, 8)
    rows = rows.reshape(8, 4, 4, 4, 2).transpose(3, 4).reshape(8, 128)
    rows = rows.reshape(2, 4, 2, 64).transpose(1, 2).reshape(2, 2, 64, 4).int()
    words = sum(rows[..., i] << (4 * i) for i in range(4))
    assert isinstance(words, Tensor)
    assert torch.equal(unpack_gemv_fast(words.reshape(2, 128).to(torch.int16)), want)


def pack_qoq(weight: Tensor) -> Tensor:
    """omniserve's W4A8OF16LinearDynamicInputScale.from_linear."""
    num_out, num_in = weight.shape
    tiles = weight.reshape(num_out // 32, 2, 2, 8, num_in // 32, 2, 4, 4)
    tiles = tiles.permute(0, 4, 3, 6, 1, 5, 2, 7).permute(0, 1, 2, 3, 5, 6, 7, 4)
    return ((tiles[..., 1] << 4) + tiles[..., 0]).reshape(num_out, num_in // 2).view(torch.int8)


def test_qoq() -> None:
    want = values(64, 96)
    assert torch.equal(unpack_qoq(pack_qoq(want)), want)


def qoq(num_groups: int) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors, the weight that QServe's kernels multiply)."""
    stored, first = values(64, 256), torch.rand(64).half()
    parts = {"qweight": pack_qoq(stored), "s1_scales": first}
    if not num_groups:
        zeros = torch.rand(64).half()
        return {**parts, "s1_szeros": zeros}, stored * first.float()[:, None] - zeros[:, None]
    second = torch.randint(1, 9, (num_groups, 64), dtype=torch.int8)
    zeros = torch.randint(0, 16, (num_groups, 64), dtype=torch.int8)

    def permuted(by_group: Tensor) -> Tensor:
        return by_group.reshape(num_groups, 2, 4, 8).transpose(-2, -1).reshape(num_groups, 64)

    integers = (stored.view(64, num_groups, -1).int() - zeros.t()[..., None]) * second.t()[
        ..., None
    ]
    parts |= {"s2_scales": permuted(second), "s2_zeros": -permuted(zeros) * permuted(second)}
    return parts, integers.flatten(1) * first.float()[:, None]


def marlin(num_groups: int) -> tuple[dict[str, Tensor], Tensor]:
    """Words that hold the value 3 everywhere; scales as the packer permutes them."""
    scales = torch.rand(num_groups, 256).half()
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = [i + 8 * j for i in range(8) for j in range(8)] if num_groups > 1 else single
    permuted = scales.reshape(-1, len(order))[:, order].reshape(num_groups, 256)
    words = torch.full((256 // 16, 2 * 256), 0x33333333, dtype=torch.int32)
    wide = -5 * scales.float().t().repeat_interleave(256 // num_groups, 1)
    return {"B": words, "s": permuted}, wide


def gemv(num_groups: int) -> tuple[dict[str, Tensor], Tensor]:
    """AutoAWQ's WQLinear_GEMV: zero points and scales are padded to whole words."""
    stored, zeros, scales = values(8, 256), values(8, num_groups), torch.rand(8, num_groups).half()

    def words(numbers: Tensor) -> Tensor:
        shifted = numbers.view(8, -1, 8).int() << (4 * torch.arange(8, dtype=torch.int32))
        return shifted.sum(-1).to(torch.int32)

    def padded(numbers: Tensor) -> Tensor:
        return torch.nn.functional.pad(numbers, (0, 8 - num_groups))

    parts = {"qweight": words(stored), "qzeros": words(padded(zeros)), "scales": padded(scales)}
    signed = stored.view(8, num_groups, -1).float() - zeros[..., None]
    return parts, (signed * scales[..., None].float()).flatten(1)


def gemv_fast(num_groups: int) -> tuple[dict[str, Tensor], Tensor]:
    """Words of the value 7; scales and scaled zeros are padded."""
    scales, zeros = torch.rand(8, num_groups).half(), -torch.rand(8, num_groups).half()
    words = torch.full((2, 256), 0x7777, dtype=torch.int16)
    pads = {"scales": scales, "qzeros": zeros}
    parts = {k: torch.nn.functional.pad(v, (0, 8 - num_groups)).t() for k, v in pads.items()}
    wide = 7 * scales.float() + zeros.float()
    return {"qweight": words, **parts}, wide.repeat_interleave(256 // num_groups, 1)


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4}
CASES: dict[str, tuple[dict[str, Any], tuple[dict[str, Tensor], Tensor]]] = {
    "qoq rows": ({"quant_method": "qoq", "wbits": 4, "group_size": -1}, qoq(0)),
    "qoq groups": ({"quant_method": "qoq", "wbits": 4, "group_size": 128}, qoq(2)),
    "marlin rows": (GPTQ | {"group_size": -1}, marlin(1)),
    "marlin groups": (GPTQ | {"group_size": 128}, marlin(2)),
    "old marlin": ({"quant_method": "marlin", "group_size": 128}, marlin(2)),
    "gemv": (AWQ | {"version": "gemv", "group_size": 64}, gemv(4)),
    "gemv_fast": (AWQ | {"version": "gemv_fast", "group_size": 128}, gemv_fast(2)),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_kernels(case: str, tmp_path: Any) -> None:
    config, (parts, want) = CASES[case]
    quant = parse(config)
    assert quant is not None
    stored = {f"layer.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    source = open_folder(tmp_path, "auto", torch.float32)
    torch.testing.assert_close(source.read("layer.weight"), want, rtol=1e-6, atol=1e-6)
    kept = source.read_quantized("layer.weight")
    assert kept is not None and kept.quantizes_inputs == case.startswith("qoq")
    torch.testing.assert_close(kept.dequantize(), want, rtol=1e-5, atol=1e-5)


def test_words_that_make_no_tiles_are_named(tmp_path: Any) -> None:
    words = torch.zeros(3, 5, dtype=torch.int32)
    save_file({"layer.B": words, "layer.s": torch.ones(1, 5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    with pytest.raises(ValueError, match=r"^layer\.B: shape"):
        open_folder(tmp_path, "auto", torch.float32).read("layer.weight")
