"""Quantization at load time: names, formats that fit the shapes, and models whose logits stay
near."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.arch.quant_methods import ONLINE_FORMATS
from radixlm.base.errors import ConfigError
from radixlm.config.parser import parse
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.fp8 import is_fp8
from radixlm.quant.load_time import make_scheme
from radixlm.quant.rounded import RoundedScheme, nf4
from radixlm.quant.scheme import OnlineQuantScheme, Scheme

IDS = {0: list(range(5, 25)), 1: [9, 8, 7]}


@pytest.mark.parametrize(
    ("asked", "inputs", "expected"),
    [
        ("int4-128", 1024, "int4-128"),
        ("int4-128", 192, "int4-64"),
        ("int4-64", 1024, "int4-64"),
        ("int4-128", 96, "int4-32"),
        ("int4-32", 100, "int8wo"),
        ("w4a8-128", 96, "w4a8-32"),
        ("w4a8-32", 100, "w8a8"),
        ("fp4-16", 48, "fp4-16"),
        ("fp4-32", 48, "fp4-16"),
        ("w8a8", 100, "w8a8"),
    ],
)
def test_the_nearest_format_that_fits(asked: str, inputs: int, expected: str) -> None:
    assert OnlineQuantScheme(asked).fmt(inputs) == expected


def test_options() -> None:
    assert type(make_scheme(None)) is Scheme
    assert make_scheme("w8a8_int8").fmt(64) == "w8a8"
    assert make_scheme(None, "int4wo-64").fmt(64) == "w4a8-64"
    assert make_scheme("int8wo", "int8wo").fmt(64) == "int8wo"
    with pytest.raises(ConfigError, match="contradict"):
        make_scheme("int8wo", "int4wo-128")
    assert make_scheme(None, "int4wo-256").fmt(256) == "w4a8-128"
    with pytest.raises(ConfigError, match=r"--torchao-config gemlite-4-64 .* choose one of: w8a8"):
        make_scheme(None, "gemlite-4-64")
    assert isinstance(make_scheme(None, "", None, "bitsandbytes"), RoundedScheme)
    with pytest.raises(ConfigError, match=r"--quantization awq contradict .* --load-format auto"):
        make_scheme("awq", "", None, "bitsandbytes")
    for name in ONLINE_FORMATS:
        assert parse(["--quantization", name])[0].model.quantization == name


def test_nf4_is_that_of_bitsandbytes() -> None:
    """As ``scripts/make_quant_fixtures.py`` had it quantize and dequantize the same weight."""
    tensors = load_file(Path(__file__).parents[1] / "weights/fixtures/bitsandbytes.safetensors")
    assert torch.equal(nf4(tensors["nf4/original"]), tensors["nf4/expected"])


# Relative to the spread of the logits; unrelated logits would differ by 1.4.
BOUNDS = {"int8wo": 0.05, "w8a8_int8": 0.1, "int4wo-32": 0.5, "mxfp4": 0.5, "fp8": 0.15}
BOUNDS |= {"bitsandbytes": 0.5, "nvfp4_online": 0.5}


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("name", BOUNDS)
def test_logits_stay_near(arch: str, name: str) -> None:
    folder = cached_tiny(arch, dtype=torch.bfloat16, tie_word_embeddings=arch.startswith("Qwen2"))
    plain = PagedRunner(load_model(folder)).prefill(IDS)
    coarse = PagedRunner(load_model(folder, scheme=make_scheme(name))).prefill(IDS)
    spread = float(plain[0].std())
    for sequence in IDS:
        error_T = (coarse[sequence] - plain[sequence]).pow(2).mean(1).sqrt()
        error = float(error_T.median()) / spread  # a token may be routed to other experts
        assert 1e-4 < error < BOUNDS[name]


@pytest.mark.skipif(not cpu.available, reason=cpu.reason)
@pytest.mark.parametrize(
    "name", [n for n, f in ONLINE_FORMATS.items() if n in ("fp8", "fp8wo") or not is_fp8(f)]
)
def test_kernels_agree_with_the_reference_and_are_invariant(name: str) -> None:
    folder = cached_tiny("Qwen3ForCausalLM", dtype=torch.bfloat16)
    model = load_model(folder, bind("cpu"), scheme=make_scheme(name))
    want = PagedRunner(load_model(folder, scheme=make_scheme(name))).prefill(IDS)
    together = PagedRunner(model, "cpu", 16).prefill(IDS, 3)
    alone = PagedRunner(model, "cpu", 16, seed=1)
    stepped = torch.cat([alone.step({0: [token]})[0] for token in IDS[0]])
    assert torch.equal(stepped, together[0])
    # Activations may round to the other side if their last bits differ.
    # fp8: the kernels round weights only, the reference rounds activations too.
    name = name.removeprefix("quark_")
    bound = {"int8wo": 1e-3, "fp8": 0.15, "mxfp4": 5e-2, "nvfp4_online": 5e-2}.get(name, 3e-2)
    assert float((together[0] - want[0]).abs().max() / want[0].abs().max()) < bound
