"""Whisper's timestamp rules against Hugging Face's processors of the same rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.sampling.processors import RowInfo, ServerFacts
from radixlm.sampling.whisper_timestamps import WhisperTimestamps

logits = pytest.importorskip("transformers.generation.logits_process")

VOCAB, END, TIMES = 40, 20, 28
token = st.integers(0, VOCAB - 1)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(token, max_size=8), st.integers(0, 2**31), st.sampled_from([None, 0, 3]))
def test_timestamps_equal_the_oracle(ids: list[int], seed: int, latest: int | None) -> None:
    held = SimpleNamespace(
        no_timestamps_token_id=TIMES - 1, eos_token_id=END, max_initial_timestamp_index=latest
    )
    oracle = logits.WhisperTimeStampLogitsProcessor(held, begin_index=2)
    rows = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    want = oracle(torch.tensor([[7, 8, *ids]]), rows.clone())
    params = {"times_from": TIMES, "end": END, "latest_first": latest}
    got = WhisperTimestamps()(rows.clone(), [params], [RowInfo("r", [7, 8], ids)])
    assert torch.equal(got, want)


def test_the_first_token_has_its_own_rules() -> None:
    made = WhisperTimestamps()
    params = {"suppress": [1], "first_suppress": [2, 3]}
    first, later = made(
        torch.zeros(2, 8), [params, params], [RowInfo("a", [5], []), RowInfo("b", [5], [6])]
    )
    assert first.isneginf().nonzero().flatten().tolist() == [1, 2, 3]
    assert later.isneginf().nonzero().flatten().tolist() == [1]


def test_options_are_checked() -> None:
    made = WhisperTimestamps()
    made.bind(ServerFacts(vocab_size=VOCAB))
    made.check({"suppress": [1, 2], "times_from": TIMES, "end": END, "latest_first": 3})
    made.check(None)
    for wrong in (
        {"suppress": [VOCAB]}, {"first_suppress": "en"}, {"times_from": TIMES},
        {"latest_first": -1}, {"times_from": 0, "end": 1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must|token id"):
            made.check(wrong)
