"""Linear layers against fp64, and a row's result in different batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixlm.kernels.cpu import linear
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.ops.quantized import (
    SPAN,
    ReferenceQuantized,
    fp4_values,
    quantize_fp4,
    quantize_int4,
    quantize_w4a8,
)

FLOAT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = [*FLOAT, "int8wo", "int4-32", "w8a8", "w4a8-64"]
SLOW_SHAPES = 2000
EXACT = [*FLOAT, "int8wo", "int4-32"]  # activations are not rounded to 8 bits


def make(num_out: int, num_in: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
    return weight, torch.randn(num_out, generator=generator)


def rows(num_rows: int, num_in: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(seed))


def seen(x: Tensor, packed: linear.PackedLinear) -> Tensor:
    """Activations as the kernel multiplies them."""
    if packed.format_code == linear.W8A16:
        return quantized(x, x.shape[1], 127 * 256)
    return (x.bfloat16() if packed.rounds_inputs else x).double()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("fmt", FLOAT)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 12, 13, 24, 25, 40, 130])
@pytest.mark.parametrize(("num_out", "num_in"), [(33, 31), (96, 256), (31, 300), (160, 517)])
def test_float_weights(fmt: str, num_rows: int, num_out: int, num_in: int) -> None:
    weight, bias = make(num_out, num_in)
    weight = weight.to(FLOAT[fmt])
    x = rows(num_rows, num_in)
    packed = linear.pack(weight, bias, fmt)
    got = packed.run(x)
    assert error(got, seen(x, packed) @ weight.double().T + bias.double()) < 1e-5
    assert error(got, x.double() @ weight.double().T + bias.double()) < 1e-2


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(fmt: str) -> None:
    weight, bias = make(200, 320)
    packed = linear.pack(weight, bias, fmt)
    x = rows(64, 320)
    together = packed.run(x, num_threads=2)
    for num_rows in (1, 2, 3, 5, 11, 12, 13, 16, 17, 24, 25, 32, 33, 37):
        part = packed.run(x[:num_rows].contiguous(), num_threads=1)
        assert torch.equal(part, together[:num_rows]), num_rows
    assert torch.equal(packed.run(x[40:41]), together[40:41])


@given(
    num_rows=st.integers(1, 90),
    num_out=st.integers(1, 140),
    num_in=st.integers(1, 600),
    fmt=st.sampled_from(sorted(FLOAT)),
    threads=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_shapes(num_rows: int, num_out: int, num_in: int, fmt: str, threads: int) -> None:
    weight, _ = make(num_out, num_in)
    weight = weight.to(FLOAT[fmt])
    x = rows(num_rows, num_in)
    packed = linear.pack(weight, None, fmt)
    y = packed.run(x, num_threads=threads)
    scale = (x.double().abs() @ weight.double().abs().T).max()
    want = seen(x, packed) @ weight.double().T
    assert float((y.double() - want).abs().max() / scale) < 1e-6
    assert torch.equal(packed.run(x[-1:].clone(), num_threads=1), y[-1:])


def check_shape(shape: tuple[int, int, int], fmt: str, threads: int, seed: int) -> None:
    """A product against fp64 on the kernel's weights and activations, and one row against itself
    alone."""
    num_rows, num_out, num_in = shape
    weight, bias = make(num_out, num_in, seed)
    packed = linear.pack(weight, bias, fmt)
    x = rows(num_rows, num_in, seed + 1)
    y = packed.run(x, num_threads=threads)
    held = packed.unpack().double()
    inputs = quantized(x, span_of(fmt, num_in)) if fmt.startswith("w") else seen(x, packed)
    bound = 3e-3 if fmt.startswith("w") else 1e-5
    scale = (inputs.abs() @ held.abs().T + bias.abs().double()).max()
    assert float((y.double() - inputs @ held.T - bias.double()).abs().max() / scale) < bound
    exact = x.double() @ weight.double().T + bias.double()
    own = float((inputs @ held.T + bias.double() - exact).norm())
    rounding = 1e-5 * float(scale) * y.numel() ** 0.5
    assert float((y.double() - exact).norm()) <= 1.05 * own + rounding
    row = seed % num_rows
    assert torch.equal(packed.run(x[row : row + 1].clone(), num_threads=1), y[row : row + 1])


SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 200), st.integers(1, 700))


@given(SHAPES, st.sampled_from(FORMATS), st.integers(1, 3), st.integers(0, 1000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_format_at_random_shapes(
    shape: tuple[int, int, int], fmt: str, threads: int, seed: int
) -> None:
    group = int(fmt.partition("-")[2] or 1)
    num_rows, num_out, num_in = shape
    check_shape((num_rows, num_out, -(-num_in // group) * group), fmt, threads, seed)


@pytest.mark.slow
@given(SHAPES, st.sampled_from([*FORMATS, "w4a8-32", "w4a8-128", "int4-128"]), st.integers(1, 3))
@settings(max_examples=SLOW_SHAPES, deadline=None, derandomize=True)
def test_two_thousand_random_shapes(shape: tuple[int, int, int], fmt: str, threads: int) -> None:
    group = int(fmt.partition("-")[2] or 1)
    num_rows, num_out, num_in = shape
    check_shape((num_rows, num_out, -(-num_in // group) * group), fmt, threads, num_in)


@pytest.mark.parametrize("fmt", ["bf16", "int8wo", "w8a8", "w4a8-32", "w4a8-64", "w4a8-128"])
@pytest.mark.parametrize("num_in", [128, 640, 1408])
def test_rows_chunks_and_threads_change_no_bit(fmt: str, num_in: int) -> None:
    """Across the borders of blocks, slices, and kernels for few and many rows."""
    weight, bias = make(300, num_in)
    packed = linear.pack(weight, bias, fmt)
    x = rows(1100, num_in)
    whole = packed.run(x, num_threads=2)
    for first, count, threads in ((0, 1, 1), (3, 8, 2), (5, 9, 1), (20, 33, 2), (500, 530, 3)):
        part = packed.run(x[first : first + count].contiguous(), num_threads=threads)
        assert torch.equal(part, whole[first : first + count]), (first, count, threads)


def test_zero_points_of_eight_equal_no_zero_points() -> None:
    generator = torch.Generator().manual_seed(3)
    x = rows(20, 128)
    q = torch.randint(0, 16, (50, 128), dtype=torch.uint8, generator=generator)
    scale = torch.rand(50, 2, generator=generator)
    given = linear.pack_int4_offsets(q, scale, -8 * scale, None, "w4a8-64").run(x)
    assert torch.equal(given, linear.pack_quantized(q, (scale, -8 * scale), None, "w4a8-64").run(x))
    zero = torch.randint(0, 16, (50, 2), generator=generator)
    packed = linear.pack_int4_offsets(q, scale, -zero * scale, None, "w4a8-64")
    held = (q.double().view(50, 2, 64) - zero[..., None]) * scale.double()[..., None]
    assert error(packed.unpack(), held.view(50, 128)) < 1e-6
    for num_rows in (3, 20):
        want = quantized(x[:num_rows], 64) @ held.view(50, 128).T
        assert error(packed.run(x[:num_rows].contiguous()), want) < 2e-3


@pytest.mark.parametrize(
    ("act", "function"),
    [
        ("silu_mul", torch.nn.functional.silu),
        ("gelu_mul", torch.nn.functional.gelu),
        ("gelu_tanh_mul", lambda g: torch.nn.functional.gelu(g, approximate="tanh")),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 9, 40])
@pytest.mark.parametrize("inner", [48, 37])
def test_paired_gate_and_up(act: str, function, num_rows: int, inner: int) -> None:
    weight, bias = make(2 * inner, 64)
    x = rows(num_rows, 64) * 3
    packed = linear.pack(weight, bias, "fp32", is_paired=True)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, 1)
    assert error(packed.run(x, act=act), function(gate) * up) < 1e-5


@pytest.mark.parametrize("num_rows", [1, 30])
def test_residual_scale_and_strided_rows(num_rows: int) -> None:
    weight, bias = make(70, 96)
    wide = rows(num_rows, 200)
    x, residual = wide[:, 50:146], rows(num_rows, 70, seed=5)
    want = (x.double() @ weight.double().T + bias.double()) * 0.25 + residual.double()
    out = residual.clone()
    linear.pack(weight, bias, "fp32").run(x, out, residual=out, out_scale=0.25)
    assert error(out, want) < 1e-5


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_plain_activation(act: str) -> None:
    weight, bias = make(40, 32)
    x = rows(5, 32)
    h = x.double() @ weight.double().T + bias.double()
    f = torch.nn.functional
    want = {
        "silu": f.silu, "gelu": f.gelu, "gelu_tanh": lambda h: f.gelu(h, approximate="tanh"),
        "relu": f.relu, "relu2": lambda h: f.relu(h) ** 2,
    }[act](h)  # fmt: skip
    assert error(linear.pack(weight, bias, "fp32").run(x, act=act), want) < 1e-5


@pytest.mark.parametrize("fmt", EXACT)
def test_quantized_weights_compute_what_they_unpack_to(fmt: str) -> None:
    weight, bias = make(75, 128)
    packed = linear.pack(weight, bias, fmt)
    held = packed.unpack()
    bound = {"fp32": 0, "bf16": 4e-3, "fp16": 5e-4, "int8wo": 6e-3, "int4-32": 0.1}[fmt]
    assert error(held, weight.double()) <= bound
    for num_rows in (1, 6, 50):
        x = rows(num_rows, 128)
        want = seen(x, packed) @ held.double().T + bias.double()
        assert error(packed.run(x), want) < 1e-5


def test_given_int8_and_int4_values() -> None:
    generator = torch.Generator().manual_seed(3)
    x = rows(20, 128)
    q8 = torch.randint(-127, 128, (50, 128), dtype=torch.int8, generator=generator)
    scale8 = torch.rand(50, generator=generator)
    packed = linear.pack_int8(q8, scale8, None, "int8wo")
    want = seen(x, packed) @ (q8.double() * scale8.double()[:, None]).T
    assert error(packed.run(x), want) < 1e-5
    q4 = torch.randint(0, 16, (50, 128), dtype=torch.uint8, generator=generator)
    scale4 = torch.rand(50, 2, generator=generator)
    zero4 = torch.randint(0, 16, (50, 2), generator=generator)
    got = linear.pack_int4_offsets(q4, scale4, -zero4 * scale4, None, "int4-64").run(x)
    held = (q4.double().view(50, 2, 64) - zero4[..., None]) * scale4.double()[..., None]
    assert error(got, x.double() @ held.view(50, 128).T) < 1e-5


def quantized(x: Tensor, group: int, most: int = 127) -> Tensor:
    """Activations as integer products use them: integers up to `most` with a scale for each row and
    group (the last group may be shorter)."""
    done = []
    for part in x.split(group, 1):
        scale = part.abs().amax(-1, keepdim=True) / most
        steps = (part * (1 / scale.clamp_min(1e-30))).round().clamp(-most, most)
        done.append(steps.double() * scale.double())
    return torch.cat(done, 1)


def span_of(fmt: str, num_in: int) -> int:
    """Number of inputs whose activations share a scale."""
    return num_in if fmt == "w8a8" else SPAN


@pytest.mark.parametrize("fmt", ["w8a8", "w4a8-32", "w4a8-64"])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13, 50])
@pytest.mark.parametrize("num_in", [192, 1088])
def test_quantized_activations(fmt: str, num_in: int, num_rows: int) -> None:
    weight, bias = make(75, num_in)
    packed = linear.pack(weight, bias, fmt)
    x = rows(num_rows, num_in)
    want = quantized(x, span_of(fmt, num_in)) @ packed.unpack().double().T + bias.double()
    # a value halfway between two steps may round either way
    assert error(packed.run(x), want) < 2e-3
    exact = x.double() @ packed.unpack().double().T + bias.double()
    assert error(packed.run(x), exact) < 2e-2


@pytest.mark.parametrize("fmt", ["w8a8", "w4a8-32", "fp4-32"])
def test_integer_products_have_the_same_bits_on_every_instruction_set(fmt: str) -> None:
    weight, bias = make(75, 1088)
    x = rows(50, 1088)
    before, found = native().isa(), {}
    for isa in native().supported_isas():
        native().select_isa(isa)
        packed = linear.pack(weight, bias, fmt)
        parts = [packed.run(x[:count].contiguous(), num_threads=2) for count in (1, 3, 8, 50)]
        found[isa] = torch.cat(parts)
    native().select_isa(before)
    found.pop("portable")  # it may round products before they are added up
    first = next(iter(found.values()))
    for isa, got in found.items():
        assert torch.equal(got, first), isa


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("num_in", [128, 1152])
def test_multiples_are_those_of_the_reference(group: int, num_in: int) -> None:
    weight = torch.distributions.StudentT(4.0).sample((70, num_in))
    weight[3], weight[4, :group], weight[5, 7] = 0, 0, 100
    held = linear.pack(weight, None, f"w4a8-{group}").unpack()
    values, scale = quantize_w4a8(weight, group)
    want = ((values.float().view(70, -1, group) - 8) * scale[..., None]).view(70, num_in)
    is_same = (held - want).abs() <= 1e-5 * want.abs().amax(1, keepdim=True)
    assert is_same.float().mean() > 0.99, "but for multiples that are as good as each other"
    values, scale = quantize_int4(weight, group)
    plain = ((values.float().view(70, -1, group) - 8) * scale[..., None]).view(70, num_in)
    assert (held - weight).norm() <= 1.02 * (plain - weight).norm()
    assert torch.equal(held[3], weight[3]) and torch.equal(held[4, :group], weight[4, :group])


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("is_paired", [False, True])
def test_floats_of_four_bits(group: int, is_paired: bool) -> None:
    """Every code, the numbers of the reference bit for bit, and no bit that a batch changes."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (76, 192), dtype=torch.uint8, generator=generator)
    codes[0, :16] = torch.arange(16)
    scale = torch.exp2(torch.randint(-9, 3, (76, 192 // group), generator=generator).float())
    plain = linear.pack_quantized(codes, (scale, None), None, f"fp4-{group}")
    held = ReferenceQuantized(codes, None, f"fp4-{group}", (scale, None)).dequantize()
    assert torch.equal(plain.unpack(), held)
    assert held[0, :8].tolist() == [n * float(scale[0, 0]) for n in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    bias = torch.randn(76, generator=generator)
    packed = linear.pack_quantized(codes, (scale, None), bias, f"fp4-{group}", is_paired)
    x = rows(70, 192)
    want = quantized(x, group) @ held.double().T + bias.double()
    if is_paired:
        want = torch.nn.functional.silu(want[:, :38]) * want[:, 38:]
    whole = packed.run(x)
    assert error(whole, want) < 2e-3  # a value halfway between two steps may round either way
    for first, count in ((0, 1), (3, 5), (9, 13), (20, 50)):
        part = packed.run(x[first : first + count].contiguous())
        assert torch.equal(part, whole[first : first + count]), (first, count)


@pytest.mark.parametrize("group", [16, 32])
def test_floats_of_four_bits_are_the_nearest(group: int) -> None:
    """Of those that a scale gives; zeros, single numbers and very small ones too."""
    weight = torch.distributions.StudentT(3.0).sample((70, 192))
    weight[3], weight[4, :group], weight[5], weight[6, 7] = 0, 0, weight[5] * 1e-30, 6e4
    packed = linear.pack(weight, None, f"fp4-{group}")
    held = packed.unpack()
    assert torch.equal(held, ReferenceQuantized(weight, None, f"fp4-{group}").dequantize())
    _, scale = quantize_fp4(weight, group)
    share = weight.view(70, -1, group).abs().amax(-1) / scale
    assert bool(((share >= 4) & (share < 8) | (share == 0)).all())
    numbers = fp4_values(torch.arange(16, dtype=torch.uint8)) * scale[..., None, None]
    nearest = (numbers - weight.view(70, -1, group)[..., None]).abs().amin(-1).view(70, 192)
    assert torch.equal((held - weight).abs(), nearest)


def test_integer_sums_are_exact_at_the_extremes() -> None:
    weight = torch.full((64, 2048), 3.0)
    weight[1::2] *= -1
    packed = linear.pack(weight, None, "w4a8-128")
    for num_rows in (1, 20):
        got = packed.run(torch.full((num_rows, 2048), -5.0))
        assert error(got, (weight.sum(1).double() * -5).expand(num_rows, -1)) < 1e-6


@pytest.mark.parametrize(("num_rows", "num_in"), [(100, 11008), (100, 14336), (240, 8192)])
def test_blocks_of_rows_that_do_not_divide(num_rows: int, num_in: int) -> None:
    """Widened panels meet blocks of row tiles: ceilings must leave no block empty."""
    packed = linear.pack(make(32, num_in)[0], None, "w4a8-128")
    x = rows(num_rows, num_in)
    assert torch.equal(packed.run(x)[-1:], packed.run(x[-1:]))


@pytest.mark.parametrize("num_in", [3, 30, 65])
def test_w8a8_takes_any_number_of_inputs(num_in: int) -> None:
    weight, _ = make(40, num_in)
    packed = linear.pack(weight, None, "w8a8")
    x = rows(3, num_in)
    x[1] = 0
    got = packed.run(x)
    assert error(got, quantized(x, num_in) @ packed.unpack().double().T) < 3e-3
    assert not got[1].any()


def test_integer_sums_do_not_overflow_at_the_extremes() -> None:
    weight = torch.full((32, 4096), 127, dtype=torch.int8)
    x = torch.full((2, 4096), -3.0)
    got = linear.pack_int8(weight, torch.ones(32), None, "w8a8").run(x)
    assert error(got, torch.full((2, 32), -3.0 * 127 * 4096).double()) < 1e-6


def test_several_sources_and_embedding_rows() -> None:
    q, kv = make(48, 64)[0], make(20, 64, seed=2)[0]
    packed = linear.pack_rows([q, kv], None, "bf16")
    joined = torch.cat([q, kv]).bfloat16().float()
    ids = torch.tensor([0, 67, 31, 32, 5], dtype=torch.int32)
    assert torch.equal(packed.embed(ids, scale=2.0), joined[ids.long()] * 2)
    assert torch.equal(packed.unpack(), joined)


def test_a_single_column_may_have_any_stride() -> None:
    weight_NK = torch.randn(1, 7, generator=torch.Generator().manual_seed(0)).T
    assert weight_NK.contiguous().stride(1) == 7  # torch keeps the stride of an axis of one
    x_MK = torch.randn(3, 1, generator=torch.Generator().manual_seed(1))
    packed = linear.pack(weight_NK.contiguous(), None, "fp32")
    assert torch.equal(packed.run(x_MK), x_MK @ weight_NK.T)


def test_wrong_shapes_are_refused() -> None:
    weight, _ = make(32, 64)
    packed = linear.pack(weight, None, "fp32")
    with pytest.raises(ValueError, match="inputs"):
        packed.run(rows(2, 63))
    with pytest.raises(TypeError, match="float32"):
        packed.run(rows(2, 64).bfloat16())
    with pytest.raises(ValueError, match="act"):
        packed.run(rows(2, 64), act="silu_mul")
    with pytest.raises(ValueError, match="format"):
        linear.pack(weight, None, "int4")
    with pytest.raises(ValueError, match="group"):
        linear.pack(make(8, 40)[0], None, "int4-32")
