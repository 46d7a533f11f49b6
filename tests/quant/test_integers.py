"""Quantization configs with integer weights, and the `--quantization` values that fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.integer_checkpoint import Layout, words

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.kernels import cpu
from radixlm.kernels.cpu import linear as cpu_linear
from radixlm.kernels.dispatch import bind
from radixlm.quant.checkpoint import checkpoint_quant, parse
from radixlm.quant.fp8 import Fp8Quant
from radixlm.quant.integers import IntegerQuant, PermutedQuant
from radixlm.quant.load_time import make_scheme
from radixlm.quant.prequantized import PrequantizedScheme, to_kernel_weight
from radixlm.quant.quantized_weight import QuantizedWeight, concat_rows, stack_experts
from radixlm.quant.scheme import OnlineQuantScheme
from radixlm.weights.packed_integers import Integers, find_group_size, unpack, unpack_awq

AWQ = Layout("awq", group=128).config()
GPTQ = Layout("gptq", group=64).config()
PACKED = Layout("packed", group=32).config()
INT8 = Layout("int8", bits=8, group=0, sym=True).config()


def with_weights(**changes: object) -> dict[str, Any]:
    weights = PACKED["config_groups"]["group_0"]["weights"] | changes
    return PACKED | {"config_groups": {"group_0": {"weights": weights}}}


def test_quantization_configs_are_read() -> None:
    assert parse(AWQ) == IntegerQuant("awq", "awq", 4, (128,))
    assert parse(AWQ | {"version": "GEMM", "group_size": -1}) == IntegerQuant("awq", "awq", 4)
    assert parse(GPTQ) == IntegerQuant("gptq", "gptq", 4, (64,), zero_shift=1)
    second = parse(GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8})
    assert second == IntegerQuant("gptq", "gptq", 8, (64,))
    by_layer = parse(GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}})
    assert by_layer is not None and by_layer.bits == 0 and 32 in by_layer.groups
    assert parse(PACKED) == IntegerQuant("compressed-tensors", "compressed", 4, (32,))
    w8a8 = parse(INT8)
    assert w8a8 == IntegerQuant("compressed-tensors", "compressed", 8, quantizes_inputs=True)
    marlin = parse(GPTQ | {"checkpoint_format": "marlin"})
    assert (
        marlin
        == parse(GPTQ | {"quant_method": "marlin"})
        == PermutedQuant("gptq", "gptq", 4, (64,))
    )
    rounded = {"quant_method": "intel/auto-round", "bits": 3, "group_size": 32}
    assert parse(rounded) == IntegerQuant("auto-round", "gptq", 3, (32,))
    shifted = parse(rounded | {"packing_format": "auto_round:auto_gptq", "extra_config": {"a": {}}})
    assert shifted is not None and (shifted.bits, shifted.zero_shift) == (0, 1)
    assert parse(rounded | {"bits": 4, "backend": "auto_round:auto_awq"}).layout == "awq"
    blocks = parse(Layout("blocks", bits=8, group=128).config())
    assert blocks is not None and (blocks.block_rows, blocks.groups) == (128, (128,))
    for other in (
        {},
        {"quant_method": "eetq"},
        with_weights(type="float", num_bits=6),
    ):
        assert parse(other) is None
    assert parse({"quant_method": "fp8"}) == Fp8Quant("fp8")


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (AWQ | {"bits": 3}, "awq of 3 bits cannot be loaded; known bits: 4"),
        (AWQ | {"bits": 8}, "awq of 8 bits"),
        (AWQ | {"bits": "4"}, "awq of '4' bits"),
        (AWQ | {"bits": True}, "awq of True bits"),
        (AWQ | {"group_size": 100}, "awq in groups of 100 cannot.*known group_size: -1, 16, 32"),
        (AWQ | {"group_size": 0}, "groups of 0"),
        (AWQ | {"group_size": None}, "groups of None"),
        (AWQ | {"version": "ggml"}, "awq in the layout 'ggml'.*known version: gemm"),
        (GPTQ | {"bits": 1}, "gptq of 1 bits cannot be loaded; known bits: 2, 3, 4, 5, 6, 7, 8"),
        (GPTQ | {"bits": 9}, "gptq of 9 bits"),
        (GPTQ | {"group_size": [64]}, r"groups of \[64\]"),
        (GPTQ | {"checkpoint_format": "bitblas"}, "gptq in the layout 'bitblas'.*gptq_v2, marlin"),
        (GPTQ | {"is_marlin_format": True, "bits": 8}, "layout marlin of 8 bits.*known bits: 4"),
        (with_weights(num_bits=1), "compressed-tensors of 1 bits"),
        (with_weights(group_size=7), "groups of 7"),
        (with_weights(strategy="token"), "scales by token.*known strategy: tensor, channel"),
        (PACKED | {"format": "marlin-24"}, "format 'marlin-24'"),
        (
            PACKED | {"sparsity_config": {"format": "marlin-24"}},
            "sparse.*known format: dense, sparse-b",
        ),
        (PACKED | {"transform_config": {"config_groups": {}}}, "rotations"),
        ({"quant_method": "aqlm"}, "aqlm .* cannot be loaded; take .*--quantization int4wo-64"),
        (
            {"quant_method": "auto-round", "packing_format": "x"},
            "known packing_format: auto_round",
        ),
        ({"quant_method": "qoq", "wbits": 8}, "qoq of 8 bits cannot be loaded; known bits: 4"),
        ({"quant_method": "blockwise_int8"}, "a block size has two sizes, not None"),
        ({"quant_method": "blockwise_int8", "weight_block_size": [128, 0]}, "two sizes"),
    ],
)
def test_unsupported_configs_are_refused_with_their_file(
    stated: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(stated)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    with pytest.raises(CheckpointError, match=f"config\\.json: quantization_config: .*{said}"):
        checkpoint_quant(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(
    st.sampled_from([AWQ, GPTQ, PACKED, INT8, {"quant_method": "blockwise_int8"}]),
    st.dictionaries(
        st.sampled_from(
            ["bits", "group_size", "version", "checkpoint_format", "dynamic", "config_groups",
             "format", "sparsity_config", "transform_config", "weight_block_size", "sym"]
        ),
        _JSON,
    ),
)  # fmt: skip
def test_inconsistent_configs_are_refused_or_read(
    stated: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        quant = parse(stated | changes)
    except ConfigError as error:
        assert "quantization_config: " in str(error)
    else:
        assert quant is None or all(size > 0 for size in quant.groups)


@pytest.mark.parametrize(
    ("stated", "fitting"),
    [
        (AWQ, {"awq", "awq_marlin", "moe_wna16"}),
        (GPTQ, {"gptq", "gptq_marlin", "marlin", "moe_wna16"}),
        (PACKED, {"compressed-tensors"}),
        (INT8, {"compressed-tensors", "w8a8_int8"}),
        ({"quant_method": "w8a8_int8"}, {"w8a8_int8"}),
    ],
)
def test_options_with_a_quantized_checkpoint(stated: dict[str, Any], fitting: set[str]) -> None:
    quant = parse(stated)
    assert quant is not None
    assert isinstance(make_scheme(None, "", quant), PrequantizedScheme)
    for name in ("awq", "awq_marlin", "gptq", "gptq_marlin", "moe_wna16", "compressed-tensors",
                 "blockwise_int8", "w8a8_int8"):  # fmt: skip
        if name in fitting:
            assert isinstance(make_scheme(name, "", quant), PrequantizedScheme)
        elif name == "w8a8_int8":  # repacks the weights of the checkpoint
            assert isinstance(make_scheme(name, "", quant), OnlineQuantScheme)
        else:
            said = f"--quantization {name}: .* with {quant.method}, which is read without --quant"
            with pytest.raises(ConfigError, match=said):
                make_scheme(name, "", quant)


def test_options_with_a_float_checkpoint() -> None:
    for name, method in (("awq", "awq"), ("gptq_marlin", "gptq"), ("moe_wna16", "awq or gptq")):
        with pytest.raises(
            ConfigError, match=f"is not quantized with {method}; .* choose one of: w8a8_int8, "
        ):
            make_scheme(name)
    with pytest.raises(
        ConfigError, match="is not quantized with awq but with fp8, which is read without"
    ):
        make_scheme("awq", "", Fp8Quant("fp8", "fp8"))


@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([4, 8]), st.integers(0, 1 << 30))
def test_unpacking_undoes_packing(rows: int, count: int, bits: int, seed: int) -> None:
    values = torch.randint(0, 1 << bits, (rows, count), generator=torch.manual_seed(seed))
    packed = torch.from_numpy(words(values.numpy(), bits))
    assert torch.equal(unpack(packed, bits)[:, :count].long(), values)
    if bits == 4:
        awq = torch.from_numpy(words(values.numpy(), 4, (0, 2, 4, 6, 1, 3, 5, 7)))
        assert torch.equal(unpack_awq(awq)[:count].t().long(), values)


@given(
    st.integers(1, 4), st.integers(1, 12), st.sampled_from([16, 32, 64, 128, 256]),
    st.sampled_from([4, 8]), st.booleans(), st.integers(0, 1 << 30),
)  # fmt: skip
def test_grids_are_the_same_numbers(
    rows: int, inputs: int, group: int, bits: int, has_order: bool, seed: int
) -> None:
    """Groups that are cut, permuted inputs, a last group that is short."""
    num_in, rng = 32 * inputs, torch.manual_seed(seed)
    num_groups = -(-num_in // group)
    index = torch.arange(num_in) // group
    index = index[torch.randperm(num_in, generator=rng)] if has_order else index
    values = torch.randint(0, 1 << bits, (rows, num_in), generator=rng).to(torch.uint8)
    scale = torch.rand(rows, num_groups, generator=rng)
    zero = torch.randint(0, 1 << bits, scale.shape, generator=rng).float()
    want = (values - zero[:, index]) * scale[:, index]
    whole = Integers(values, scale, zero, group, bits, index if has_order else None)
    torch.testing.assert_close(whole.dequantize(torch.float32), want)
    grid = whole.to_quantized(False)
    assert (grid is None) == (group < 32 and num_groups > 1)
    if grid is None:
        return
    near = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(grid.dequantize(), want, **near)
    scheme = PrequantizedScheme()
    params = scheme.params(rows, num_in, False, None)
    assert params["weight"].accepts_quantized
    params["weight"].quantized = grid
    x = torch.randn(3, num_in, generator=rng)
    packed = scheme.pack(bind("cpu", {"all": "reference"}), params)
    got, exact = packed.run(x), x @ want.T
    assert float((got - exact).norm()) <= 0.03 * float(x.norm() * want.norm())


def test_groups_of_a_weight() -> None:
    assert find_group_size(4096, 1, ()) == 4096 and find_group_size(4096, 32, (64, 128)) == 128
    assert find_group_size(320, 3, (128,)) == 128 and find_group_size(4096, 31, (128,)) == 0


def grid(rows: int, group: int, **more: Any) -> QuantizedWeight:
    shape = (rows, 256 // group)
    return QuantizedWeight(
        torch.ones(rows, 256).to(torch.uint8), torch.rand(shape), torch.rand(shape), **more
    )


def test_parts_of_one_layer() -> None:
    both = concat_rows([grid(2, 128), grid(3, 64)])
    assert both is not None and (both.group_size, both.values_OI.shape[0]) == (64, 5)
    order = torch.randperm(256)
    assert concat_rows([grid(2, 64, order_I=order), grid(2, 64, order_I=order.clone())]) is not None
    for other in (grid(2, 64), grid(2, 64, order_I=order.flip(0)), grid(2, 64, bits=8), None):
        assert concat_rows([grid(2, 64, order_I=order), other]) is None
    experts = stack_experts([[grid(2, 64), grid(2, 64)], [grid(2, 64), grid(2, 64)]])
    assert experts is not None and experts.values_OI.shape == (2, 4, 256)
    assert stack_experts([[grid(2, 64, order_I=order)]]) is None
    assert stack_experts([[grid(2, 64)], [grid(2, 32)]]) is None


def test_eight_bits_that_do_not_fit_int8() -> None:
    """Zero points far from the middle give a range beyond int8."""
    values = torch.tensor([[0, 255] * 16], dtype=torch.uint8)
    scale = torch.ones(1, 1)
    for zero, fmt in ((128, "int8wo"), (127, "w4a8-32"), (0, "w4a8-32")):
        whole = to_kernel_weight(QuantizedWeight(values, scale, -zero * scale, bits=8))
        assert whole.fmt == fmt
    near = QuantizedWeight(
        values.clamp(20, 220), scale, -100.0 * scale, bits=8, quantizes_inputs=True
    )
    whole = to_kernel_weight(near)
    assert whole.fmt == "w8a8" and whole.values.flatten().tolist()[:2] == [-80, 120]


@pytest.mark.skipif(not cpu.available, reason="the C++ kernels are not built")
def test_minus_128_with_signed_byte_products(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.full((32, 64), -128, dtype=torch.int8)
    x, scale = torch.full((2, 64), -1.0), torch.ones(32)
    here = cpu_linear.multiplies_minus_128()
    for is_exact, fmt in ((False, "int8wo"), (here, "w8a8" if here else "int8wo")):
        monkeypatch.setattr(cpu_linear, "multiplies_minus_128", lambda x=is_exact: x)
        packed = cpu_linear.pack_quantized(values, (scale, None), None, "w8a8")
        assert packed.fmt == fmt
        want = torch.full((2, 32), 64.0 * 128)
        torch.testing.assert_close(packed.run(x), want, rtol=1e-3, atol=0.0)
