"""Tokens of the sampling kernels equal those of the sampler's torch steps with the same noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.kernels.triton import sample
from radixlm.sampling import cpu, noise

VOCAB = 5000  # three chunks, the last one ragged


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(
    logits: torch.Tensor,
    settings_of: list[tuple[float, int, float, float]],
    seeds: list[int],
    positions: list[int],
    greedy: list[bool] | None = None,
    **more: torch.Tensor,
) -> tuple[list[int], list[bool]]:
    rows = len(seeds)
    floats = torch.tensor([[t, p, m] for t, _, p, m in settings_of])
    top_k = torch.tensor([k for _, k, _, _ in settings_of])
    params = sample.pack_params(
        floats, top_k, torch.tensor(seeds), torch.tensor(greedy or [False] * rows)
    )
    at = torch.tensor(positions, dtype=torch.int32)
    tokens, bad = sample.draw(logits, params, at, **more)
    return tokens.tolist(), bad.tolist()


def reference(
    logits: torch.Tensor,
    settings_of: list[tuple[float, int, float, float]],
    seeds: list[int],
    positions: list[int],
) -> list[int]:
    keys = cpu.draw_keys(seeds, positions).tolist()
    return [
        cpu.draw(row.numpy(), key, *limits)
        for row, key, limits in zip(logits, keys, settings_of, strict=True)
    ]


def test_greedy_takes_the_lowest_of_equal_tokens_in_every_chunk() -> None:
    logits = logits_of(4)
    logits[0, 4999] = logits[1, 2047] = logits[2, 0] = 50.0
    logits[3, [77, 78, 2100]] = 50.0
    tokens, bad = draw(logits, [(1.0, VOCAB, 1.0, 0.0)] * 4, [0] * 4, [0] * 4, [True] * 4)
    assert tokens == [4999, 2047, 0, 77]
    assert not any(bad)


def test_noise_is_that_of_the_sampler() -> None:
    seeds, positions = [3, -5, 2**62 + 12345], [0, 17, 100000]
    logits = torch.zeros(3, VOCAB)
    tokens, _ = draw(logits, [(1.0, VOCAB, 1.0, 0.0)] * 3, seeds, positions)
    keys = noise.draw_keys(torch.tensor(seeds), torch.tensor(positions))
    wanted = noise.gumbel_noise(keys, torch.arange(VOCAB, dtype=torch.int32)[None])
    assert tokens == wanted.argmax(-1).tolist()


LIMITS = [
    (1.0, VOCAB, 1.0, 0.0),
    (0.3, VOCAB, 1.0, 0.0),
    (1e30, VOCAB, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (5.0, 40, 0.9, 0.0),
    (1.0, VOCAB, 0.5, 0.0),
    (2.0, VOCAB, 0.0, 0.0),
    (1.5, VOCAB, 1.0, 0.05),
    (1.5, VOCAB, 1.0, 1.0),
    (0.8, 50, 0.95, 0.02),
    (3.0, 4999, 0.999, 0.0),
]


@pytest.mark.parametrize("spread", [0.7, 4.0])
def test_rows_of_all_kinds_at_once(spread: float) -> None:
    rows = len(LIMITS)
    logits = logits_of(rows, spread=spread)
    seeds = [10 * i + 1 for i in range(rows)]
    positions = [i % 5 for i in range(rows)]
    tokens, bad = draw(logits, LIMITS, seeds, positions)
    assert tokens == reference(logits, LIMITS, seeds, positions)
    assert not any(bad)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_small_vocabularies_with_ties_keep_exact_supports(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 40))
    levels = data.draw(st.lists(st.integers(-8, 8), min_size=vocab, max_size=vocab))
    logits = torch.tensor(levels, dtype=torch.float32)[None].repeat(4, 1)
    limits = (
        data.draw(st.sampled_from([0.5, 1.0, 4.0])),
        data.draw(st.integers(1, vocab)),
        data.draw(st.sampled_from([0.0, 0.13, 0.5, 0.77, 0.99, 1.0])),
        data.draw(st.sampled_from([0.0, 0.01, 0.2, 0.9])),
    )
    seeds = [data.draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(4)]
    positions = list(range(4))
    tokens, _ = draw(logits, [limits] * 4, seeds, positions)
    assert tokens == reference(logits, [limits] * 4, seeds, positions)


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    logits = logits_of(8, seed=2)
    limits = [LIMITS[i % len(LIMITS)] for i in range(8)]
    tokens, _ = draw(logits, limits, list(range(8)), [9] * 8)
    for row in (0, 5, 7):
        alone, _ = draw(logits[row : row + 1], limits[row : row + 1], [row], [9])
        assert alone == tokens[row : row + 1]


def test_masks_nan_and_token_table() -> None:
    logits = logits_of(4)
    allowed = [5, 2050, 4998]
    bits = np.zeros((4, 160), np.uint32)
    bits[:3] = 0
    for token in allowed:
        bits[:3, token // 32] |= np.uint32(1 << token % 32)
    bits[2] = 0
    bits[3] = 0xFFFFFFFF
    logits[3, 3000] = float("nan")
    before = logits.clone()
    table = torch.full((9,), -1)
    slots = torch.tensor([8, 1, 0, 4])
    tokens, bad = draw(
        logits,
        [(1.0, VOCAB, 1.0, 0.0), (2.0, 2, 0.9, 0.0), (1.0, VOCAB, 1.0, 0.0), (1.0, 3, 1.0, 0.0)],
        [1, 2, 3, 4],
        [0] * 4,
        mask_RW=torch.from_numpy(bits.view(np.int32)),
        next_token=table,
        slots_R=slots,
    )
    assert bad == [False, False, True, True]
    expected = torch.full_like(before, float("-inf"))
    expected[:, allowed] = before[:, allowed]
    assert torch.equal(logits[:2], expected[:2])
    wanted = reference(expected[:2], [(1.0, VOCAB, 1.0, 0.0), (2.0, 2, 0.9, 0.0)], [1, 2], [0, 0])
    assert tokens[:2] == wanted
    assert all(0 <= token < VOCAB for token in tokens)
    assert table[slots].tolist() == tokens and (table >= 0).sum() == 4


def test_samples_follow_the_distribution() -> None:
    """Chi-square over many positions, with a vocabulary of 12."""
    probs = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.08, 0.07, 0.05, 0.04, 0.03, 0.02, 0.008, 0.002])
    keys = noise.draw_keys(torch.full((40000,), 7), torch.arange(40000))
    scores = noise.gumbel_noise(keys, torch.arange(12, dtype=torch.int32)[None]) + probs.log()
    counts = torch.bincount(scores.argmax(-1), minlength=12).float()
    rows = 32  # a subset that the kernel must reproduce
    tokens, _ = draw(
        probs.log().repeat(rows, 1), [(1.0, 12, 1.0, 0.0)] * rows, [7] * rows, list(range(rows))
    )
    assert tokens == scores[:rows].argmax(-1).tolist()
    chi_square = ((counts - 40000 * probs) ** 2 / (40000 * probs)).sum()
    assert chi_square < 31.3  # 0.1 % beyond, 11 degrees of freedom
