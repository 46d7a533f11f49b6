"""The noise generator is fixed, depends on its three keys only, and passes as random."""

from __future__ import annotations

import math

import numpy as np
import torch

from radixlm.sampling import cpu
from radixlm.sampling.noise import draw_keys, gumbel_noise, random_bits


def ids(num: int) -> torch.Tensor:
    return torch.arange(num, dtype=torch.int32)[None]


def plain_bits(seed: int, position: int, token: int) -> int:
    """The same generator in Python integers."""

    def split(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    key = split(split(seed % 2**64) ^ (position * 0x9E3779B97F4A7C15 % 2**64))
    return mix((mix(token ^ (key % 2**32)) + (key >> 32)) % 2**32) % 2**31


def test_equal_to_plain_integers() -> None:
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63)], [0, 1, 17, 2**20, 5]
    keys = draw_keys(torch.tensor(seeds), torch.tensor(positions))
    found = random_bits(keys, ids(50)).tolist()
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [plain_bits(seed, position, token) for token in range(50)]
        assert found[row] == expected
        key = int(cpu.draw_keys([seed], [position])[0])
        assert cpu.random_bits(key, np.arange(50, dtype=np.uint32)).tolist() == expected


def test_the_noise_of_a_token_depends_on_nothing_else() -> None:
    keys = draw_keys(torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3]))
    whole = gumbel_noise(keys, ids(1000))
    some = torch.tensor([[7, 999, 0]], dtype=torch.int32)
    assert torch.equal(gumbel_noise(keys[1:2], some)[0], whole[1, some[0].long()])


def test_the_noise_is_gumbel_distributed() -> None:
    keys = draw_keys(torch.full((64,), 3), torch.arange(64))
    noise = gumbel_noise(keys, ids(20000)).flatten().double()
    assert noise.isfinite().all()
    assert noise.max() < cpu.MAX_NOISE
    assert abs(noise.mean() - 0.5772) < 0.005
    assert abs(noise.std() - math.pi / 6**0.5) < 0.005
    for x in (-1.0, 0.0, 1.0, 3.0, 8.0):
        share = (noise < x).double().mean().item()
        assert abs(share - math.exp(-math.exp(-x))) < 0.002


def test_both_implementations_give_the_same_noise() -> None:
    for seed in range(5):
        first = gumbel_noise(draw_keys(torch.tensor([seed]), torch.tensor([9])), ids(3000))[0]
        key = int(cpu.draw_keys([seed], [9])[0])
        second = cpu.gumbel_noise(key, np.arange(3000, dtype=np.uint32))
        close = np.abs(first.numpy() - second) < 1e-4
        assert (close | (second < -2)).all()  # single precision is coarse for very small values


def test_steps_tokens_and_seeds_are_not_correlated() -> None:
    size = 4000
    base = random_bits(draw_keys(torch.arange(size), torch.zeros(size).long()), ids(2))
    others = {
        "next position": random_bits(
            draw_keys(torch.arange(size), torch.ones(size).long()), ids(2)
        ),
        "next seed": random_bits(
            draw_keys(torch.arange(size) + 1, torch.zeros(size).long()), ids(2)
        ),
    }
    pairs = {"next token": (base[:, 0], base[:, 1])}
    pairs.update({name: (base[:, 0], other[:, 0]) for name, other in others.items()})
    for name, (left, right) in pairs.items():
        correlation = torch.corrcoef(torch.stack([left.double(), right.double()]))[0, 1]
        assert abs(correlation) < 0.06, name
