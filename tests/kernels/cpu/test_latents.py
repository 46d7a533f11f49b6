"""Attention to latents, where one row of the cache is key and value of every query head: against
fp64 on every instruction set of this processor, and the same bits in prompts, chunks and
decodes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu.test_attention import Case, World

from radixlm.kernels.cpu import linear
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.heads import HeadLinear

LENS = ((1, 1), (1, 70), (5, 5), (3, 130), (40, 100), (1, 600))
FLOATS = (torch.float32, torch.float16)
DTYPES = (*FLOATS, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = [  # heads, channels of a row, channels of a value
    (16, 576, 512),
    (40, 288, 256),
    (4, 40, 24),
    (7, 50, 20),
    (100, 48, 40),
]


def latents(shape: tuple[int, int, int], **kind: object) -> Case:
    heads, dim, v_dim = shape
    case = Case(LENS, heads, 1, dim, v_dim, is_latent=True, scale=dim**-0.5)
    return replace(case, **kind)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_match_fp64(isa: str, shape: tuple[int, int, int]) -> None:
    for dtype in DTYPES if shape[1] == 50 else DTYPES[::2]:
        world = World(latents(shape, dtype=dtype))
        # matrix tiles round queries and weights to bfloat16
        is_exact = isa != "amx" or dtype in FLOATS
        for s, got in enumerate(world.run(list(LENS), threads=2)):
            want = world.reference(s, *LENS[s])
            error = float((got - want).abs().max() / want.abs().max())
            assert error < (1e-5 if is_exact else 5e-3), (dtype, s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_windows_sinks_and_caps(isa: str, dtype: torch.dtype) -> None:
    case = latents((20, 72, 64), dtype=dtype, window=45, softcap=4.0, has_sinks=True, page_size=32)
    world = World(case)
    for s, got in enumerate(world.run(list(LENS))):
        want = world.reference(s, *LENS[s])
        error = float((got - want).abs().max() / want.abs().max())
        assert error < (5e-3 if isa == "amx" and dtype not in FLOATS else 1e-5), s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_decode_and_chunks_give_the_bits_of_a_prompt(isa: str, dtype: torch.dtype) -> None:
    world = World(latents((20, 72, 64), dtype=dtype, lens=((150, 150), (90, 90))))
    whole = world.run([(150, 150), (90, 90)], threads=2)
    for cut in (1, 63, 89):
        first = world.run([(cut, cut), (cut, cut)])
        rest = world.run([(150 - cut, 150), (90 - cut, 90)], threads=2)
        for s in range(2):
            assert torch.equal(torch.cat([first[s], rest[s]]), whole[s]), cut
    for total in (1, 64, 90):
        decoded = world.run([(1, total), (1, total)])
        for s in range(2):
            assert torch.equal(decoded[s][0], whole[s][total - 1]), total


def test_splits_of_one_long_sequence_merge_the_same(isa: str) -> None:
    world = World(latents((16, 72, 64), dtype=torch.bfloat16, lens=((1100, 1100),)))
    whole = world.run([(1100, 1100)], threads=2)[0]
    for total in (512, 513, 1100):
        for threads in (1, 2, 3):
            assert torch.equal(world.run([(1, total)], threads)[0][0], whole[total - 1]), total


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(0, 89)),
    lens=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 150)), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_any_shape(
    shape: tuple[int, int, int], lens: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    heads, v_dim, more = shape
    new_and_all = tuple((new, new + before) for new, before in lens)
    world = World(latents((heads, v_dim + more, v_dim), dtype=dtype, lens=new_and_all), seed)
    bound = 1e-5 if native().isa() != "amx" or dtype in FLOATS else 1.5e-2
    for s, got in enumerate(world.run(list(new_and_all), threads=2)):
        want = world.reference(s, *new_and_all[s])
        assert float((got - want).abs().max()) < bound * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_a_projection_for_each_head(isa: str, dtype: torch.dtype, heads: int) -> None:
    """Fewer and more heads than threads; strided rows of x; a row alone and among 300."""
    g = torch.Generator().manual_seed(heads)
    weight = torch.randn(heads, 70, 40, generator=g).to(dtype)
    layers = [linear.pack(one, None) for one in weight]
    packed = HeadLinear(layers)
    x = torch.randn(300, heads, 56, generator=g)[..., :40]
    want = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    got = packed.run(x, num_threads=3)
    bound = 1e-2 if layers[0].rounds_inputs else 1e-5
    assert float((got - want).abs().max() / want.abs().max()) < bound
    for t in (0, 255, 299):
        for threads in (1, 2):
            assert torch.equal(packed.run(x[t : t + 1], threads)[0], got[t])
    with pytest.raises(ValueError, match="heads of"):
        packed.run(x[:, :, :39])
