"""Sampling by Triton kernels, interpreted on CPU tensors, against the sampler's torch steps."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.kernels.cpu import extension
from radixlm.sampling import cuda
from radixlm.sampling.logprobs import LogprobRequest, compute_logprobs
from radixlm.sampling.sampler import Sampler
from radixlm.sampling.table import SamplingTable
from radixlm.wire.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
VOCAB = 2500


class Pair:
    """The same requests in two tables: one sampled by torch, one by the kernels."""

    def __init__(
        self, requests: list[dict[str, Any]], vocab: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(extension, "available", False)
        self.tables = [SamplingTable(len(requests), vocab, random_seed=5) for _ in range(2)]
        for table in self.tables:
            for slot, given_params in enumerate(requests):
                params = SamplingParams(**({"sampling_seed": slot} | given_params))
                table.set(slot, params, [1, 2, 2], [3, 4, 4, 4], eos_ids=[0, 7])
        self.slots = list(range(len(requests)))
        self.reference = Sampler(self.tables[0], detect_bad=True)
        self.kernels = Sampler(self.tables[1], detect_bad=True)
        self.kernels._gpu = cuda.GpuSampler(self.tables[1], cuda.SamplerKernels())

    def check(self, logits: torch.Tensor, position: int, **more: Any) -> None:
        positions = [position] * len(self.slots)
        wanted = self.reference.sample(logits.clone(), self.slots, positions, **more)
        got = self.kernels.sample(logits.clone(), self.slots, positions, **more)
        assert got.is_bad_R is not None and wanted.is_bad_R is not None
        assert got.is_bad_R.tolist() == wanted.is_bad_R.tolist()
        fine = ~wanted.is_bad_R
        assert got.tokens_R[fine].tolist() == wanted.tokens_R[fine].tolist()
        if wanted.logprobs is not None and got.logprobs is not None:
            assert [t[1] for t in got.logprobs.top] == [t[1] for t in wanted.logprobs.top]
            assert got.logprobs.chosen == pytest.approx(wanted.logprobs.chosen, abs=1e-5)
            for mine, theirs in zip(
                got.logprobs.of_token_ids, wanted.logprobs.of_token_ids, strict=True
            ):
                assert mine[1] == theirs[1] and mine[0] == pytest.approx(theirs[0], abs=1e-5)


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"temperature": 1.0, "repetition_penalty": 1.7, "frequency_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 2.0, "repetition_penalty": 0.0},
    {"temperature": 1.0, "logit_bias": {9: 8.0, 2499: 9.0, 3: -100.0}},
    {"temperature": 2.0, "min_new_tokens": 20, "stop_token_ids": [11], "top_k": 30},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
]


def test_steps_of_all_kinds_of_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(REQUESTS, VOCAB, monkeypatch)
    for step in range(3):  # sampled tokens count for the penalties of the next step
        logits = logits_of(len(REQUESTS), seed=step)
        logits[:, [0, 7, 11]] += 12.0  # EOS and a stop token would be picked
        pair.check(logits, 7 + step)
    counts = [table.penalties._counts_NV for table in pair.tables]
    assert torch.equal(*counts) and int(counts[0].sum()) == 2 * (4 + 3)


def test_masks_and_tokens_forbidden_by_min_new_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[dict[str, Any]] = [{"min_new_tokens": 9}] * 2 + REQUESTS[:5]
    pair = Pair(requests, VOCAB, monkeypatch)
    bits = np.zeros((len(requests), 79), np.uint32)
    bits[0, 0] = 1 << 7 | 1  # only EOS
    bits[1, 0] = 1 << 7 | 1 << 30
    bits[2:, 3:70] = 0x5555AAAA
    mask = torch.from_numpy(bits.view(np.int32))
    pair.check(logits_of(len(requests)), 5, mask_RW=mask)
    pair.check(logits_of(len(requests)), 12, mask_RW=mask)  # min_new_tokens is reached


def test_rows_without_a_valid_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(REQUESTS[:4], VOCAB, monkeypatch)
    logits = logits_of(4)
    logits[1, 2222] = float("nan")
    logits[2] = float("-inf")
    pair.check(logits, 7)


def test_logprobs_are_of_the_processed_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(REQUESTS, VOCAB, monkeypatch)
    logits = logits_of(len(REQUESTS))
    logits[:, 100:110] = 20.0  # ties by id
    wanted: list[LogprobRequest | None] = [LogprobRequest(5), None, LogprobRequest(0, (4, 2499))]
    wanted += [LogprobRequest(2, (9,))] * 4
    pair.check(logits, 7, wanted=wanted)


def test_logprobs_are_behind_a_grammar_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair([{"temperature": 0.0}, {"temperature": 0.7}], VOCAB, monkeypatch)
    mask = torch.full((2, (VOCAB + 31) // 32), 0x0F0F0F0F, dtype=torch.int32)
    wanted: list[LogprobRequest | None] = [LogprobRequest(3), LogprobRequest(3, (1, 9))]
    pair.check(logits_of(2), 7, mask_RW=mask, wanted=wanted)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_parameters_on_small_vocabularies(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(12, 70))
    number = st.floats(0.0, 2.0, width=16)
    requests = [
        {
            "temperature": data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
            "top_k": data.draw(st.sampled_from([-1, 1, 3, 20])),
            "top_p": data.draw(st.sampled_from([0.1, 0.6, 1.0])),
            "min_p": data.draw(st.sampled_from([0.0, 0.2])),
            "frequency_penalty": data.draw(number),
            "presence_penalty": data.draw(number),
            "repetition_penalty": data.draw(st.floats(0.5, 2.0, width=16)),
            "min_new_tokens": data.draw(st.sampled_from([0, 6])),
            "logit_bias": data.draw(st.dictionaries(st.integers(0, 11), number, max_size=4)),
        }
        for _ in range(3)
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        pair = Pair(requests, vocab, monkeypatch)
        pair.check(
            logits_of(3, vocab, data.draw(st.integers(0, 99))), data.draw(st.integers(7, 14))
        )


def test_log_probabilities_of_many_chunks_and_dtypes() -> None:
    at = cuda.SamplerKernels().logprob.logprobs_at
    for dtype, limit in ((torch.float32, 2e-5), (torch.float16, 2e-5)):
        logits = logits_of(3, 9000).to(dtype)
        logits[1, 17] = float("-inf")
        tokens = torch.tensor([[0, 8999], [17, 4096], [5, 5]])
        found = at(logits, tokens)
        for column in range(2):
            rows = [LogprobRequest()] * 3
            wanted = compute_logprobs(logits, tokens[:, column], rows).chosen
            assert found[:, column].tolist() == pytest.approx(wanted, abs=limit)


def test_the_mask_alone() -> None:
    logits = logits_of(2, 100)
    mask = torch.tensor([[0x0F0F0F0F, -1, 1, 8], [0, 0, 0, 0]], dtype=torch.int32)
    expected = logits.clone()
    bits = torch.tensor([[(int(w) >> i) & 1 for w in row for i in range(32)] for row in mask])
    expected[bits[:, :100] == 0] = float("-inf")
    cuda.SamplerKernels().bitmask.apply_mask_(logits, mask)
    assert torch.equal(logits, expected)


def test_kernels_are_for_gpus_only() -> None:
    assert cuda.load_kernels(torch.device("cpu")) is None
