"""fp8 checkpoints in every published layout of scales: the model computes with the stored
numbers."""

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
from torch import Tensor

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops import fp8
from radixlm.quant.checkpoint import checkpoint_quant, parse
from radixlm.quant.fp8 import Fp8Quant, PrequantizedFp8Scheme, is_fp8_exact
from radixlm.quant.integers import IntegerQuant
from radixlm.quant.load_time import make_scheme
from radixlm.weights.folder import open_folder
from radixlm.weights.fp8_source import dequantize

IDS = {0: list(range(5, 25)), 1: [9, 8, 7]}
KEPT = (
    "embed_tokens",
    "lm_head",
    "norm",
    "mlp.gate.",
    "block_sparse_moe.gate.",
    "layers.1.self_attn",
)


def compressed(strategy: str, **more: object) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "channel": compressed("channel"),
    "compressed block": compressed("block", block_structure=[128, 128]),
    "power of two": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}


def stored(weight: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(e4m3, scale) as the tools of the layout write them."""
    if layout == "tensor":
        scale = weight.float().abs().max() / 448
        return fp8.e4m3(weight.float() / scale), scale
    if layout == "channel":
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        return fp8.e4m3(weight.float() / scale), scale
    rows, cols = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, cols * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = padded.view(rows, 128, cols, 128).abs().amax((1, 3)) / 448
    if layout == "power of two":
        scale = torch.exp2(scale.log2().ceil())
    return fp8.e4m3(weight.float() / fp8.spread(scale, *weight.shape)), scale


def make(arch: str, layout: str, tmp_path: Path) -> tuple[Path, Path]:
    """(the fp8 checkpoint, a float32 checkpoint with the same numbers)."""
    source = cached_tiny(arch, dtype=torch.float32)
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    for folder in (narrow, wide):
        shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    small, large = dict(tensors), dict(tensors)
    suffix = ".weight_scale_inv" if "block" in str(CONFIGS[layout]) else ".weight_scale"
    for name, weight in tensors.items():
        if weight.ndim != 2 or any(part in name for part in KEPT):
            continue
        value, scale = stored(weight, layout)
        stem = name.removesuffix(".weight")
        small[name], small[stem + suffix] = value, scale
        small[stem + ".input_scale"] = torch.ones(())
        large[name] = dequantize(value, scale, (128, 128))
    save_file(small, narrow / "model.safetensors")
    save_file(large, wide / "model.safetensors")
    state(narrow, CONFIGS[layout])
    return narrow, wide


def state(folder: Path, quant: dict[str, Any]) -> None:
    """Give the checkpoint a quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quant
    (folder / "config.json").write_text(json.dumps(config))


def written(source: Path, folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """A copy of a checkpoint, with these tensors if there are any."""
    shutil.copytree(source, folder)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        ("Qwen3ForCausalLM", "tensor"),
        ("Qwen3ForCausalLM", "block"),
        ("LlamaForCausalLM", "channel"),
        ("MixtralForCausalLM", "compressed block"),
        ("Qwen3MoeForCausalLM", "power of two"),
    ],
)
def test_the_numbers_are_those_of_the_checkpoint(arch: str, layout: str, tmp_path: Path) -> None:
    narrow, wide = make(arch, layout, tmp_path)
    want = PagedRunner(load_model(wide)).prefill(IDS)
    quant = checkpoint_quant(narrow)
    assert quant is not None
    plain = PagedRunner(load_model(narrow)).prefill(IDS)
    scheme = make_scheme(None, "", quant)
    coarse = PagedRunner(load_model(narrow, scheme=scheme)).prefill(IDS)
    native = None
    if cpu.available:
        native = PagedRunner(load_model(narrow, bind("cpu"), scheme=scheme)).prefill(IDS)
    spread = float(want[0].std())
    for sequence in IDS:
        assert float((plain[sequence] - want[sequence]).abs().max()) < 1e-4 * spread
        if native is not None:  # exact weights; activations stay in 16 or 32 bits
            assert float((native[sequence] - want[sequence]).abs().max()) < 1e-3 * spread
        error_T = (coarse[sequence] - want[sequence]).pow(2).mean(1).sqrt()
        assert 1e-4 < float(error_T.median()) / spread < 0.15  # activations in 8 bits


@pytest.mark.parametrize(
    ("weight", "inputs"),
    [("weight_scale_inv", "activation_scale"), ("qscale_weight", "qscale_act"), ("scale", None)],
)
def test_other_names_of_scales(weight: str, inputs: str | None, tmp_path: Path) -> None:
    """Of Ministral 3, of Mistral's own files, of DeepSeek V4."""
    narrow, _ = make("Ministral3ForCausalLM", "tensor", tmp_path)
    want = PagedRunner(load_model(narrow)).prefill(IDS)
    named = {"weight_scale": weight, "input_scale": inputs}
    tensors = {}
    for name, tensor in load_file(narrow / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        if last := named.get(last, last):
            tensors[f"{stem}.{last}"] = tensor
    save_file(tensors, narrow / "model.safetensors")
    got = PagedRunner(load_model(narrow)).prefill(IDS)
    assert all(torch.equal(got[i], want[i]) for i in IDS)


def test_quantization_configs_are_read() -> None:
    assert parse({"quant_method": "fp8"}) == Fp8Quant("fp8", "fp8")
    block = parse({"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert block == Fp8Quant("fp8", "fp8-128")
    odd = parse({"quant_method": "fp8", "weight_block_size": [64, 32]})
    assert odd == Fp8Quant("fp8", "fp8", (64, 32))
    assert parse(compressed("channel")) == Fp8Quant("compressed-tensors", "fp8")
    for algorithm in ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"):
        assert parse({"quant_method": "modelopt", "quant_algo": algorithm}) is not None
    for stated in (
        {"quant_method": "mxfp8", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        compressed("group", group_size=32),
    ):
        quant = parse(stated)
        assert isinstance(quant, Fp8Quant) and (quant.fmt, quant.block) == ("fp8", (1, 32))
    for other in ({"quant_method": "eetq"}, {"quant_method": "modelopt", "quant_algo": "W4A8"}):
        assert parse(other) is None
    integers = compressed("channel")
    integers["config_groups"]["group_0"]["weights"]["type"] = "int"
    assert isinstance(parse(integers), IntegerQuant)
    with pytest.raises(ConfigError, match="by attn_head"):
        parse(compressed("attn_head"))
    with pytest.raises(ConfigError, match="two sizes"):
        parse({"quant_method": "fp8", "weight_block_size": [128]})


@pytest.mark.parametrize("size", [[128], 128, "128", [0, 128], [128, -1], [1.5, 2], [True], {}])
def test_a_bad_block_size_names_its_file(size: object, tmp_path: Path) -> None:
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config: a block size"):
        checkpoint_quant(tmp_path)


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        ({"quant_method": "eetq"}, "eetq"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "modelopt"),
        ({"quant_method": "fp8"}, ""),
        ({}, ""),
    ],
)
def test_an_unsupported_layout_is_named_once(
    stated: object, word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    for _ in range(3):
        checkpoint_quant(tmp_path)
    assert [word in record.message for record in caplog.records] == [True] * bool(word)


def test_options_with_a_quantized_checkpoint() -> None:
    quant = Fp8Quant("fp8", "fp8-128")
    assert make_scheme("unquant").fmt(256) == ""
    for name in (None, "unquant", "fp8", "compressed-tensors"):
        scheme = make_scheme(name, "", quant)
        assert isinstance(scheme, PrequantizedFp8Scheme) and scheme.head_fmt == ""
        assert (scheme.fmt(256), scheme.fmt(200)) == ("fp8-128", "fp8")
    assert make_scheme("int8wo", "", quant).fmt(256) == "int8wo"
    assert (
        make_scheme("mxfp8").fmt(256) == "fp8" and make_scheme("quark_mxfp4").fmt(256) == "fp4-32"
    )
    assert make_scheme("fp8").fmt(256) == make_scheme(None, "fp8dq-per_row").fmt(256) == "fp8"
    with pytest.raises(
        ConfigError, match="is not quantized with fp8 or fbgemm_fp8 or mxfp8 or modelopt"
    ):
        make_scheme("compressed-tensors")


def test_unquantized_layers_are_recognised() -> None:
    torch.manual_seed(4)
    weight = torch.randn(300, 256).bfloat16()
    for fmt in fp8.FORMATS:
        assert not is_fp8_exact(weight, fmt)
        assert is_fp8_exact(fp8.fake_quantize_weight(weight, fmt), fmt)
    assert is_fp8_exact(torch.zeros(8, 8), "fp8")
    scheme, experts = PrequantizedFp8Scheme("fp8-128"), weight.view(1, 300, 256)
    narrow = fp8.fake_quantize_weight(weight, "fp8-128")[None]
    assert scheme.expert_fmt(narrow) == scheme.expert_fmt(narrow[:0]) == "fp8-128"
    assert scheme.expert_fmt(torch.cat((narrow, experts))) == scheme.expert_fmt(experts) == ""


@pytest.mark.parametrize(
    ("value", "scale"),
    [((4, 6), ()), ((4, 6), (4,)), ((4, 6), (4, 1)), ((3, 4, 6), (3,)), ((3, 4, 6), (3, 1, 1)),
     ((3, 130, 140), (3, 2, 2)), ((130, 140), (2, 1, 2, 1)),
     ((3, 4, 6), (3, 1, 6)), ((3, 4, 6), (3, 6, 1))],
)  # fmt: skip
def test_every_layout_of_scales(value: tuple[int, ...], scale: tuple[int, ...]) -> None:
    ones = torch.ones(value).to(torch.float8_e4m3fn)
    scales = torch.rand(scale) + 0.5
    got = dequantize(ones, scales, (128, 128))
    first = scales.reshape(scales.shape[0], -1)[0, 0] if scale else scales
    assert got.shape == value and float(got.flatten()[0]) == float(first)
    last = scales.flatten()[-1]
    assert float(got.flatten()[-1]) == float(last)


def test_scales_that_do_not_fit_are_named() -> None:
    value = torch.ones(130, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"\[3, 1\] do not fit"):
        dequantize(value, torch.ones(3, 1), (128, 128))


def test_scales_in_bytes_are_powers_of_two_of_32_inputs(tmp_path: Path) -> None:
    """MXFP8, whatever the config says about blocks."""
    value = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.arange(120, 136, dtype=torch.uint8).view(8, 2)
    save_file({"a.weight": value, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    got = open_folder(tmp_path, "auto", torch.bfloat16).read("a.weight")
    factors = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert got.dtype == torch.bfloat16 and torch.equal(got.double(), value.double() * factors)


def test_stacked_experts_of_modelopt(tmp_path: Path) -> None:
    """Llama 4: one scale of each tensor, named after it."""
    saved = cached_tiny("Llama4ForCausalLM", dtype=torch.float32)
    tensors = load_file(saved / "model.safetensors")
    narrow, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            narrow[name], scale = stored(weight, "tensor")
            narrow |= {f"{name}_weight_scale": scale, f"{name}_input_scale": torch.ones(())}
            wide[name] = narrow[name].float() * scale
    want, got = (written(saved, tmp_path / n, t) for n, t in (("wide", wide), ("narrow", narrow)))
    state(got, {"quant_method": "modelopt", "quant_algo": "FP8"})
    ours, theirs = (PagedRunner(load_model(folder)).prefill(IDS) for folder in (got, want))
    assert all(torch.equal(ours[i], theirs[i]) for i in IDS)


def test_experts_that_are_not_quantized_stay_floats(tmp_path: Path) -> None:
    folder = written(cached_tiny("Qwen3MoeForCausalLM", dtype=torch.float32), tmp_path / "floats")
    state(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    scheme = make_scheme(None, "", checkpoint_quant(folder))
    ours = PagedRunner(load_model(folder, scheme=scheme)).prefill(IDS)
    theirs = PagedRunner(load_model(folder)).prefill(IDS)
    assert all(torch.equal(ours[i], theirs[i]) for i in IDS)
