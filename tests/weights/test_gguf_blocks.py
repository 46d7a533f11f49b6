"""Blocks of GGUF tensors: every type against a decoder that reads one number at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.arch.gguf import TYPES
from radixlm.weights import gguf_blocks, gguf_iquants

SIZES = {name: (block, size) for name, block, size in TYPES.values()}
CURVE = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def half(b: bytes, at: int) -> np.float32:
    """In the arithmetic of the result, where products and differences round the same way."""
    return np.float32(struct.unpack_from("<e", b, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibble(b: bytes, at: int, i: int) -> int:
    """Number i of a block of 32 whose nibbles start at byte `at`."""
    return b[at + i] & 15 if i < 16 else b[at + i - 16] >> 4


def bit(b: bytes, at: int, i: int) -> int:
    return b[at + i // 8] >> (i % 8) & 1


def q8_0(b: bytes, i: int) -> float:
    return half(b, 0) * signed(b[2 + i])


def q4_0(b: bytes, i: int) -> float:
    return half(b, 0) * (nibble(b, 2, i) - 8)


def q4_1(b: bytes, i: int) -> float:
    return half(b, 0) * nibble(b, 4, i) + half(b, 2)


def q5_0(b: bytes, i: int) -> float:
    return half(b, 0) * (nibble(b, 6, i) + 16 * bit(b, 2, i) - 16)


def q5_1(b: bytes, i: int) -> float:
    return half(b, 0) * (nibble(b, 8, i) + 16 * bit(b, 4, i)) + half(b, 2)


def q2_k(b: bytes, i: int) -> float:
    scale, part = b[i // 16], i % 128
    pair = b[16 + i // 128 * 32 + part % 32] >> 2 * (part // 32) & 3
    return half(b, 80) * (scale & 15) * pair - half(b, 82) * (scale >> 4)


def q3_k(b: bytes, i: int) -> float:
    group, part = i // 16, i % 128
    low = b[96 + group] & 15 if group < 8 else b[96 + group - 8] >> 4
    upper = b[104 + group % 4] >> 2 * (group // 4) & 3
    pair = b[32 + i // 128 * 32 + part % 32] >> 2 * (part // 32) & 3
    third = b[i % 32] >> (i // 32) & 1
    return half(b, 108) * (low + 16 * upper - 32) * (pair + 4 * third - 4)


def six_bits(b: bytes, group: int) -> tuple[int, int]:
    """Scale and offset of one group of Q4_K and Q5_K."""
    if group < 4:
        return b[4 + group] & 63, b[8 + group] & 63
    last = b[12 + group - 4]
    return (last & 15) + 16 * (b[group] >> 6), (last >> 4) + 16 * (b[4 + group] >> 6)


def q4_k(b: bytes, i: int) -> float:
    scale, less = six_bits(b, i // 32)
    byte = b[16 + i // 64 * 32 + i % 32]
    value = byte >> 4 if i // 32 % 2 else byte & 15
    return half(b, 0) * scale * value - half(b, 2) * less


def q5_k(b: bytes, i: int) -> float:
    scale, less = six_bits(b, i // 32)
    byte = b[48 + i // 64 * 32 + i % 32]
    value = byte >> 4 if i // 32 % 2 else byte & 15
    fifth = b[16 + i % 32] >> (i // 32) & 1
    return half(b, 0) * scale * (value + 16 * fifth) - half(b, 2) * less


def q6_k(b: bytes, i: int) -> float:
    side, part = divmod(i, 128)
    byte = b[side * 64 + part % 64]
    low = byte & 15 if part < 64 else byte >> 4
    pair = b[128 + side * 32 + part % 32] >> 2 * (part // 32) & 3
    return half(b, 208) * signed(b[192 + i // 16]) * (low + 16 * pair - 32)


def iq4_nl(b: bytes, i: int) -> float:
    return half(b, 0) * CURVE[nibble(b, 2, i)]


def iq4_xs(b: bytes, i: int) -> float:
    group = i // 32
    low = b[4 + group // 2] >> 4 * (group % 2) & 15
    upper = struct.unpack_from("<H", b, 2)[0] >> 2 * group & 3
    return half(b, 0) * (low + 16 * upper - 32) * CURVE[nibble(b, 8 + 16 * group, i % 32)]


def mxfp4(b: bytes, i: int) -> float:
    value = nibble(b, 1, i)
    return np.ldexp(np.float32(-FP4[value - 8] if value > 7 else FP4[value]), b[0] - 127)


SLOW: dict[str, Callable[[bytes, int], float]] = {
    "Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q2_K": q2_k,
    "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}  # fmt: skip


def test_every_type_has_a_case() -> None:
    assert set(SLOW) | set(gguf_iquants.DEQUANTIZE) == set(gguf_blocks.DEQUANTIZE)


@pytest.mark.parametrize("kind", SLOW)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_numbers_are_those_of_the_layout(kind: str, data: st.DataObject) -> None:
    block, size = SIZES[kind]
    raw = data.draw(st.binary(min_size=2 * size, max_size=2 * size))
    ours = gguf_blocks.dequantize(
        kind, torch.tensor(list(raw), dtype=torch.uint8).view(2, size), block, torch.float32
    )
    assert ours.shape == (2, block)
    with np.errstate(all="ignore"):
        wanted = [[SLOW[kind](raw[n * size :], i) for i in range(block)] for n in range(2)]
    torch.testing.assert_close(ours, torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slices_and_16_bit_results(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    block, size = SIZES["Q4_K"]
    raw = torch.randint(0, 256, (37, size), generator=torch.Generator().manual_seed(1))
    blocks = raw.to(torch.uint8)
    blocks[:, 1] = blocks[:, 3] = 0x10  # scales of about 5e-4
    whole = gguf_blocks.dequantize("Q4_K", blocks, block, torch.float32)
    monkeypatch.setattr(gguf_blocks, "CHUNK", 5 * block)
    assert torch.equal(gguf_blocks.dequantize("Q4_K", blocks, block, dtype), whole.to(dtype))
