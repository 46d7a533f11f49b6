"""Drafted tokens change no sampled token, log-probability or count, whoever drafts."""

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
from radixlm.sampling.drafts import DraftRows
from radixlm.sampling.logprobs import LogprobRequest, Logprobs
from radixlm.sampling.processors import NamedProcessor
from radixlm.sampling.sampler import Sampler
from radixlm.sampling.table import SamplingTable
from radixlm.wire.sampling_params import SamplingParams

VOCAB, LENGTH, PROMPT = 40, 8, [1, 2, 2]
WANTED = LogprobRequest(2, (5,))


class Model:
    """Logits by the last token and the position; tokens of equal logits are common."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (LENGTH + 16, VOCAB, VOCAB)
        self.logits = (torch.randn(shape, generator=generator) * 3).round() / 2

    def rows(self, tokens: list[int], at: int) -> torch.Tensor:
        """The rows behind each of ``tokens``, the first of which stands at ``at``."""
        return torch.stack([self.logits[at + j, token] for j, token in enumerate(tokens)])


def add_history(logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
    """A logit processor that reads the whole history."""
    for row, info in enumerate(rows):
        logits[row, sum(info.output_ids) % VOCAB] += 3.0
    return logits


def make(way: str, requests: list[SamplingParams], has_processor: list[bool]) -> Sampler:
    table = SamplingTable(len(requests), VOCAB, random_seed=0)
    for slot, params in enumerate(requests):
        processor = NamedProcessor("history", add_history) if has_processor[slot] else None
        table.set(slot, params, PROMPT, eos_ids=(0,), processor=processor)
    sampler = Sampler(table)
    sampler._is_native = way == "native" and extension.available
    sampler._is_cpu = way != "as on a GPU"
    if way == "triton":
        sampler._gpu = cuda.GpuSampler(table, cuda.SamplerKernels())
    return sampler


def mask_of(position: int, token: int) -> torch.Tensor:
    """What a grammar might allow: it depends on the tokens before the row."""
    bits = np.random.default_rng((position, token)).integers(0, 2**32, 2, np.uint32)
    return torch.from_numpy((bits | 1 << 30).view(np.int32))


def entries(found: Logprobs, row: int) -> tuple[Any, ...]:
    return found.chosen[row], found.top[row], found.of_token_ids[row]


def play(
    sampler: Sampler, model: Model, num: int, draft: Any, has_mask: bool
) -> tuple[list[list[int]], list[list[Any]], int]:
    """Sample until each of ``num`` sequences has LENGTH tokens; tokens, log-probabilities and
    rounds. ``draft(n, out)`` proposes tokens."""
    outs: list[list[int]] = [[] for _ in range(num)]
    logprobs: list[list[Any]] = [[] for _ in range(num)]
    rounds = 0
    while True:
        live = [n for n in range(num) if len(outs[n]) < LENGTH]
        if not live:
            return outs, logprobs, rounds
        rounds += 1
        drafts = [draft(n, outs[n]) for n in live]
        logits, slots, positions, masks = [], [], [], []
        for n, drafted in zip(live, drafts, strict=True):
            fed = [outs[n][-1] if outs[n] else PROMPT[-1], *drafted]
            at = len(PROMPT) + len(outs[n])
            logits.append(model.rows(fed, len(outs[n])))
            slots += [n] * len(fed)
            positions += range(at, at + len(fed))
            masks += [mask_of(at + j, token) for j, token in enumerate(fed)]
        rows = DraftRows.of(drafts) if any(drafts) else None
        found = sampler.sample(
            torch.cat(logits),
            slots,
            positions,
            torch.stack(masks) if has_mask else None,
            [WANTED] * len(slots),
            rows,
        )
        assert not found.errors
        assert isinstance(found.logprobs, Logprobs)
        counts = [1] * len(live) if found.accepted is None else found.accepted.counts_N.tolist()
        first = 0
        for n, drafted, count in zip(live, drafts, counts, strict=True):
            tokens = found.tokens_R[first : first + count].tolist()
            assert tokens[:-1] == drafted[: count - 1]
            outs[n] += tokens
            logprobs[n] += [entries(found.logprobs, first + j) for j in range(count)]
            first += len(drafted) + 1


REQUESTS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 5]),
    top_p=st.sampled_from([0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    sampling_seed=st.integers(0, 2**62),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    min_new_tokens=st.sampled_from([0, 5]),
    logit_bias=st.dictionaries(st.integers(0, 3), st.sampled_from([-100.0, 5.0]), max_size=2),
)


def check(
    way: str,
    requests: list[SamplingParams],
    has_processor: list[bool],
    has_mask: bool,
    right: float,
    seed: int,
) -> None:
    """The same with and without drafts, of which the share ``right`` is right."""
    model, num = Model(seed), len(requests)
    plain = make(way, requests, has_processor)
    want, want_logprobs, _ = play(plain, model, num, lambda n, out: [], has_mask)
    chance = np.random.default_rng(seed)

    def draft(n: int, out: list[int]) -> list[int]:
        """Some of the tokens to come, each replaced by another one now and then."""
        ahead = want[n][len(out) : len(out) + int(chance.integers(0, 6))]
        return [t if chance.random() < right else (t + 1) % VOCAB for t in ahead]

    drafted = make(way, requests, has_processor)
    got, got_logprobs, rounds = play(drafted, model, num, draft, has_mask)
    if right:
        assert rounds < LENGTH
    else:
        assert rounds == max(map(len, want)) == LENGTH
    # drafts beyond the end are drawn too, so the last round may give more than the plain run
    assert [out[:LENGTH] for out in got] == [out[:LENGTH] for out in want]
    assert [one[:LENGTH] for one in got_logprobs] == [one[:LENGTH] for one in want_logprobs]
    if [len(out) for out in got] == [LENGTH] * num:
        tables = [sampler._table for sampler in (plain, drafted)]
        counted = [table.penalties._counts_NV.sum(0).tolist() for table in tables]
        assert counted[0] == counted[1]
        histories = [[table.state(slot).output_ids for slot in range(num)] for table in tables]
        assert histories[0] == histories[1]


@pytest.mark.parametrize("way", ["native", "torch", "as on a GPU"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_drafts_change_nothing(way: str, data: st.DataObject) -> None:
    requests = data.draw(st.lists(REQUESTS, min_size=1, max_size=3))
    has_processor = [data.draw(st.booleans()) for _ in requests]
    right = data.draw(st.sampled_from([0.0, 0.7, 1.0]))
    has_mask, seed = data.draw(st.booleans()), data.draw(st.integers(0, 1000))
    check(way, requests, has_processor, has_mask, right, seed)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
def test_drafts_change_nothing_on_a_gpu() -> None:
    penalties = SamplingParams(
        temperature=0.7, sampling_seed=3, repetition_penalty=1.7, frequency_penalty=1.5
    )
    check("triton", [penalties, SamplingParams(temperature=0.0)], [True, False], True, 0.7, 5)


@given(
    lens=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_walk_stops_at_the_first_difference(lens: list[int], seed: int) -> None:
    chance = np.random.default_rng(seed)
    drafts = [chance.integers(0, 2, length).tolist() for length in lens]
    drawn = [chance.integers(0, 2, length + 1).tolist() for length in lens]
    rows = DraftRows.of(drafts)
    accepted = rows.accept(torch.tensor([token for row in drawn for token in row]))
    kept: list[bool] = []
    for count, drafted, tokens in zip(accepted.counts_N.tolist(), drafts, drawn, strict=True):
        matches = [a == b for a, b in zip(drafted, tokens, strict=False)]
        assert count == (matches.index(False) if False in matches else len(drafted)) + 1
        kept += [True] * count + [False] * (len(tokens) - count)
    assert accepted.kept_R.tolist() == kept


@given(
    lens=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    paths=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_first_path_with_the_most_drafts_wins(
    lens: list[int], paths: list[tuple[int, int]], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    owners = [owner % len(lens) for owner, _ in paths]
    drawn = [chance.integers(0, 2, 5).tolist() for _ in lens]  # the same on all paths
    drafts = [chance.integers(0, 2, count).tolist() for count in lens]
    drafts += [chance.integers(0, 2, count).tolist() for _, count in paths]
    of = [*range(len(lens)), *owners]
    rows = DraftRows.of(drafts)
    if paths:
        rows = DraftRows(rows.first_A1, rows.next_R, np.array(owners))
    drawn_R = [
        drawn[n][j] for n, some in zip(of, drafts, strict=True) for j in range(len(some) + 1)
    ]
    accepted = rows.accept(torch.tensor(drawn_R))

    def right(number: int) -> int:
        pairs = zip(drafts[number], drawn[of[number]], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts[number]))

    kept = [False] * len(drawn_R)
    for n in range(len(lens)):
        sequences = [i for i, owner in enumerate(of) if owner == n]
        winner = max(sequences, key=lambda i: (right(i), -i))
        assert accepted.counts_N[n] == right(winner) + 1
        assert accepted.chosen_N is None or accepted.chosen_N[n] == winner
        first = int(rows.first_A1[winner])
        kept[first : first + right(winner) + 1] = [True] * (right(winner) + 1)
    assert accepted.kept_R.tolist() == kept
