"""Tokens follow the distribution of the parameters, and a row does not depend on its batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.kernels import cpu
from radixlm.sampling.drafts import DraftRows
from radixlm.sampling.logprobs import LOWEST, LogprobRequest, Logprobs, compute_logprobs
from radixlm.sampling.processors import NamedProcessor
from radixlm.sampling.sampler import Sampler, apply_mask_, unpack_mask
from radixlm.sampling.table import SamplingTable
from radixlm.wire.sampling_params import SamplingParams

QUICK = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def make(
    params: list[SamplingParams], vocab_size: int, prompt: tuple[int, ...] = (), **options: Any
) -> Sampler:
    table = SamplingTable(len(params), vocab_size, random_seed=0)
    for slot, item in enumerate(params):
        table.set(slot, item, prompt, eos_ids=(0,))
    return Sampler(table, **options)


def kept_tokens(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """token -> probability, written out plainly."""
    scaled = [x / params.temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    probs = [w / sum(weights) for w in weights]
    ordered = sorted(probs, reverse=True)
    top_k = params.top_k if params.top_k > 0 else len(probs)
    lowest = ordered[min(top_k, len(probs)) - 1]
    if params.top_p < 1:
        before = 0.0
        for p in ordered:
            if before > params.top_p:
                break
            before, last = before + p, p
        lowest = max(lowest, last)
    lowest = max(lowest, params.min_p * ordered[0])
    kept = {i: p for i, p in enumerate(probs) if p >= lowest * (1 - 1e-6)}
    return {i: p / sum(kept.values()) for i, p in kept.items()}


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=1.5, top_k=5, top_p=0.7),
    SamplingParams(min_p=0.3),
    SamplingParams(top_p=0.95, min_p=0.2, top_k=4),
    SamplingParams(top_k=1 << 30, top_p=1.0),
]


@pytest.mark.parametrize("params", PARAMS)
def test_samples_follow_the_distribution(params: SamplingParams) -> None:
    logits = [2.0, 1.0, 0.5, 0.5, 0.0, -0.5, -1.0, -3.0]
    num = 5000
    table = SamplingTable(1, 8)
    table.set(0, params, (), eos_ids=())
    rows = torch.tensor([logits]).repeat(num, 1)
    tokens = Sampler(table).sample(rows, [0] * num, torch.arange(num)).tokens_R
    shares = torch.bincount(tokens, minlength=8).double() / num
    expected = kept_tokens(logits, params)
    for token in range(8):
        probability = expected.get(token, 0.0)
        assert abs(shares[token] - probability) < 0.025, token
        assert shares[token] == 0 or probability > 0


MANY = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 1, 2, 20, 1 << 30]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([None, {3: 5.0}]),
    min_new_tokens=st.sampled_from([0, 4]),
    sampling_seed=st.integers(-5, 5),
)


@QUICK
@given(st.lists(MANY, min_size=2, max_size=6), st.integers(0, 100), st.booleans())
def test_a_row_does_not_depend_on_its_batch(
    params: list[SamplingParams], seed: int, with_mask: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab_size = 70
    logits = torch.randn(len(params), vocab_size, generator=generator) * 4
    logits = logits.bfloat16().float()  # ties are common here
    mask = None
    if with_mask:
        mask = torch.randint(-(2**31), 2**31, (len(params), 3), generator=generator)
        mask = mask.to(torch.int32)
    positions = torch.arange(len(params))
    prompt = (3, 5, 5)
    together = make(params, vocab_size, prompt)
    wanted = [LogprobRequest(top=2, token_ids=(1,))] * len(params)
    slots = list(range(len(params)))
    result = together.sample(logits.clone(), slots, positions, mask, wanted)
    for row, item in enumerate(params):
        alone = make([item], vocab_size, prompt)
        one = alone.sample(
            logits[row : row + 1].clone(),
            [0],
            positions[row : row + 1],
            None if mask is None else mask[row : row + 1],
            wanted[:1],
        )
        assert one.tokens_R[0] == result.tokens_R[row]
        assert one.logprobs is not None
        assert result.logprobs is not None
        assert one.logprobs.chosen[0] == result.logprobs.chosen[row]
        assert one.logprobs.top[0] == result.logprobs.top[row]


@QUICK
@given(MANY, st.integers(0, 1000))
def test_a_sample_is_always_allowed(params: SamplingParams, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab_size = 40
    logits = (torch.randn(1, vocab_size, generator=generator) * 3).bfloat16().float()
    bits = torch.rand(vocab_size, generator=generator) < 0.3
    bits[7] = True
    mask = pack(bits[None].numpy())
    token = make([params], vocab_size).sample(logits.clone(), [0], [seed], mask).tokens_R.item()
    assert bits[int(token)]
    is_late = params.min_new_tokens == 0 or seed >= 4
    assert token != 0 or is_late or not bits[1:].any()


def pack(bits: np.ndarray) -> Tensor:
    padded = np.zeros((bits.shape[0], -(-bits.shape[1] // 32) * 32), dtype=np.uint8)
    padded[:, : bits.shape[1]] = bits
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def test_masks_are_packed_words() -> None:
    rng = np.random.default_rng(0)
    for vocab_size in (1, 31, 32, 33, 100, 8200):
        bits = rng.random((3, vocab_size)) < 0.5
        logits = torch.zeros(3, vocab_size)
        apply_mask_(logits, pack(bits))
        assert ((logits == 0).numpy() == bits).all()
        assert (unpack_mask(pack(bits)).numpy()[:, :vocab_size] == bits).all()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-9, top_p=0.1),
        SamplingParams(top_k=1),
    ):
        assert make([params], 4).sample(logits.clone(), [0], [0]).tokens_R.tolist() == [1]


def test_the_seed_and_the_position_decide() -> None:
    logits = torch.zeros(1, 1000)
    params = [SamplingParams(sampling_seed=seed) for seed in (1, 1, 2)]
    sampler = make(params, 1000)
    draws = [
        [sampler.sample(logits.clone(), [slot], [p]).tokens_R.item() for p in range(5)]
        for slot in range(3)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) > 3
    unseeded = [SamplingParams(), SamplingParams()]
    first, second = (make(unseeded, 1000).sample(logits.repeat(2, 1), [0, 1], [0, 0]) for _ in "ab")
    assert first.tokens_R.tolist() == second.tokens_R.tolist()  # the table has a fixed seed
    assert first.tokens_R[0] != first.tokens_R[1]


def test_penalties_follow_the_formula() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    table = SamplingTable(2, 5)
    table.set(0, params, prompt_ids=[0, 0], output_ids=[1, 1, 2])
    table.set(1, SamplingParams(temperature=0.0), prompt_ids=[0])
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0, 1.0]]).repeat(2, 1)
    expected = [1.0, 1.0 - 1.0 - 0.25, -4.0 - 0.5 - 0.25, 2.0, 1.0]
    sampler = Sampler(table, "processed")
    wanted = [LogprobRequest(token_ids=(0, 1, 2, 3, 4))] * 2
    result = sampler.sample(logits.clone(), [0, 1], [5, 1], None, wanted)
    assert result.logprobs is not None
    reference = torch.log_softmax(torch.tensor(expected), 0).tolist()
    assert result.logprobs.of_token_ids[0][0] == pytest.approx(reference)
    plain = torch.log_softmax(logits[1], 0).tolist()
    assert result.logprobs.of_token_ids[1][0] == pytest.approx(plain)


@QUICK
@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=8))
def test_counting_as_it_goes_equals_counting_at_once(prompt: list[int], output: list[int]) -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5)
    tables = [SamplingTable(1, 10) for _ in range(3)]
    for table, known in zip(tables, ((), tuple(output), ()), strict=True):
        table.set(0, params, prompt, known)
    for token in output:
        tables[0].penalties.record([0], torch.tensor([token]))
    logits = torch.linspace(-2, 2, 10)[None]
    rows = [logits.clone(), logits.clone(), logits.repeat(len(output) + 1, 1)]
    tables[0].penalties.apply_(rows[0], [0])
    tables[1].penalties.apply_(rows[1], [0])
    slots = [0] * (len(output) + 1)
    tables[2].penalties.apply_(rows[2], slots, DraftRows.of([output]))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2][-1:])


def test_slots_are_reused() -> None:
    params = SamplingParams(frequency_penalty=2.0, temperature=0.0)
    table = SamplingTable(12, 3)
    for slot in range(12):
        table.set(slot, params, (), [slot % 3])
    table.clear(4)
    table.set(4, params, ())
    logits = torch.tensor([[1.0, 0.9, 0.8]])
    sampler = Sampler(table)
    tokens = [sampler.sample(logits.clone(), [s], [1]).tokens_R.item() for s in (0, 1, 4)]
    assert tokens == [1, 0, 0]
    assert sampler.sample(logits.clone(), [4], [2]).tokens_R.item() == 1
    assert sampler.sample(logits.clone(), [4], [3]).tokens_R.item() == 2  # 1 was recorded


def test_eos_waits_for_min_new_tokens() -> None:
    table = SamplingTable(1, 4)
    params = SamplingParams(temperature=0.0, min_new_tokens=2, stop_token_ids=(2,))
    table.set(0, params, prompt_ids=[1, 1, 1], eos_ids=[0, 99])
    logits = torch.tensor([[9.0, 1.0, 8.0, 2.0]])
    sampler = Sampler(table)
    found = [
        sampler.sample(logits.clone(), [0], [position]).tokens_R.item() for position in (3, 4, 5)
    ]
    assert found == [3, 3, 0]


def test_eos_does_not_wait_if_the_grammar_requires_it() -> None:
    params = SamplingParams(temperature=0.0, min_new_tokens=9)
    only_eos, eos_or_two = (pack(np.array([bits], dtype=bool)) for bits in ([1, 0, 0], [1, 0, 1]))
    sampler = make([params], 3)
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    assert sampler.sample(logits.clone(), [0], [0], only_eos).tokens_R.tolist() == [0]
    assert sampler.sample(logits.clone(), [0], [0], eos_or_two).tokens_R.tolist() == [2]


def test_bias_and_processors() -> None:
    class Only:
        def __call__(self, logits_RV: Tensor, params: Any, rows: Any) -> Tensor:
            for row, custom in zip(logits_RV, params, strict=True):
                row[custom["token"]] += 100.0
            return logits_RV

    table = SamplingTable(3, 5)
    table.set(0, SamplingParams(temperature=0.0, logit_bias={2: 50.0}), ())
    chosen = SamplingParams(temperature=0.0, custom_params={"token": 4})
    table.set(1, chosen, (), processor=NamedProcessor("only", Only()))
    table.set(2, SamplingParams(temperature=0.0), ())
    assert Sampler(table).sample(torch.zeros(3, 5), [0, 1, 2], [0, 0, 0]).tokens_R.tolist() == [
        2,
        4,
        0,
    ]
    with pytest.raises(InvalidRequest, match="logit_bias"):
        table.set(0, SamplingParams(logit_bias={5: 1.0}), ())


@pytest.mark.parametrize("is_original", [False, True])
def test_logprobs_equal_log_softmax(monkeypatch: pytest.MonkeyPatch, is_original: bool) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", str(is_original))
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    temperatures = (0.0, 0.5, 2.0, 1.0)
    params = [SamplingParams(temperature=t, top_k=5, logit_bias={1: 2.0}) for t in temperatures]
    allowed_W = torch.tensor([[-1 ^ 4, -1]] * 4, dtype=torch.int32)  # all but token 2
    biased = logits.clone()
    biased[:, 1] += 2.0
    biased[:, 2] = float("-inf")
    scales = [1.0 if is_original else t or 1.0 for t in temperatures]
    reference = torch.log_softmax(biased / torch.tensor(scales)[:, None], -1)
    wanted = [LogprobRequest(3, (7, 8, 2)), None, LogprobRequest(100), LogprobRequest()]
    result = make(params, 50).sample(logits.clone(), [0, 1, 2, 3], [0] * 4, allowed_W, wanted)
    found = result.logprobs
    assert isinstance(found, Logprobs)
    for row in (0, 2, 3):
        assert found.chosen[row] == pytest.approx(reference[row, result.tokens_R[row]].item())
    values, ids = torch.sort(reference[0], descending=True)
    assert found.top[0][1] == ids[:3].tolist()
    assert found.top[0][0] == pytest.approx(values[:3].tolist())
    asked = [*reference[0, [7, 8]].tolist(), LOWEST]
    assert found.of_token_ids[0] == (pytest.approx(asked), [7, 8, 2])
    assert (found.chosen[1], found.top[1], found.of_token_ids[1]) == (0.0, ([], []), ([], []))
    assert [len(pair[1]) for pair in found.top] == [3, 0, 50, 0]


def test_what_a_token_was_drawn_from() -> None:
    """Held against a sort of the whole vocabulary."""
    logits = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=0.7, top_k=6, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=30, min_p=0.1),
        SamplingParams(temperature=0.0),
    ]
    wanted = [LogprobRequest(kept=True)] * 3
    result = make(params, 50).sample(logits.clone(), [0, 1, 2], [0] * 3, None, wanted)
    assert isinstance(result.logprobs, Logprobs)
    for row, one in enumerate(params[:2]):
        probs, ids = torch.softmax(logits[row] / one.temperature, -1).sort(descending=True)
        before = probs.cumsum(0) - probs
        stays = (
            (torch.arange(50) < one.top_k) & (before <= one.top_p) & (probs >= one.min_p * probs[0])
        )
        token = int(result.tokens_R[row])
        share = probs[ids == token] / probs[stays].sum()
        logprob, found = result.logprobs.kept[row]
        assert found == ids[stays].tolist() and 1 < len(found) < 31
        assert logprob == pytest.approx(float(share.log()), abs=1e-5)
    assert result.logprobs.kept[2] == (0.0, [int(logits[2].argmax())])


def test_logprobs_of_ties_and_of_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, float("-inf")]])
    found = compute_logprobs(logits, torch.tensor([3]), [LogprobRequest(4, (3,))])
    assert found.chosen == [LOWEST]
    assert found.top[0][1] == [1, 2, 0, 3]
    assert found.of_token_ids[0][0] == [LOWEST]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_rows_of_nan_are_found_and_harmless(temperature: float, top_p: float) -> None:
    params = [SamplingParams(temperature=temperature, top_p=top_p)] * 3
    logits = torch.randn(3, 10)
    logits[0, 3] = float("nan")
    logits[1] = float("-inf")
    result = make(params, 10, detect_bad=True).sample(logits, [0, 1, 2], [0, 0, 0])
    assert result.is_bad_R is not None
    assert result.is_bad_R.tolist() == [True, True, False]
    assert all(0 <= token < 10 for token in result.tokens_R.tolist())


def test_the_shortcut_for_large_vocabularies_changes_no_sample() -> None:
    """The shortcut that skips unlikely tokens never changes a sample."""
    from radixlm.sampling.noise import draw_keys, gumbel_noise

    vocab_size, num = 3000, 40
    logits = torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(0)) * 5
    params = [SamplingParams(sampling_seed=i) for i in range(num)]
    found = make(params, vocab_size).sample(logits.clone(), list(range(num)), [7] * num).tokens_R
    keys = draw_keys(torch.arange(num), torch.full((num,), 7))
    noise = gumbel_noise(keys, torch.arange(vocab_size, dtype=torch.int32)[None])
    assert torch.equal(found, (logits + noise).argmax(-1))


@QUICK
@given(st.lists(MANY, min_size=1, max_size=5), st.integers(0, 1000))
def test_the_gpu_path_samples_the_same_tokens(params: list[SamplingParams], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(params), 300, generator=generator) * 4).bfloat16().float()
    slots = list(range(len(params)))
    ways = [make(params, 300) for _ in range(3)]
    ways[1]._is_native = False
    ways[2]._is_native = ways[2]._is_cpu = False
    first, *others = [way.sample(logits.clone(), slots, slots).tokens_R for way in ways]
    assert all(torch.equal(first, other) for other in others)


WILD = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 40, 2000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    sampling_seed=st.integers(0, 2**62),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.4]),
    frequency_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    min_new_tokens=st.sampled_from([0, 3]),
    logit_bias=st.dictionaries(st.integers(0, 1), st.sampled_from([-100.0, 5.0]), max_size=2),
)


@pytest.mark.skipif(not cpu.available, reason=cpu.reason)
@pytest.mark.parametrize("vocab_size", [5, 4096, 4097, 40_000])
def test_the_kernel_draws_what_numpy_draws_from_flat_and_peaked_rows(vocab_size: int) -> None:
    """Every token may win a flat row, few a peaked one; ties and rows of -inf are hard."""
    generator = torch.Generator().manual_seed(vocab_size)
    spreads = [0.0, 0.2, 3.0, 40.0, 1e5]
    logits = torch.cat(
        [torch.randn(6, vocab_size, generator=generator) * spread for spread in spreads]
    )
    logits[1::7] = logits[1::7].round()
    logits[2::9, vocab_size // 3 :] = -torch.inf
    logits[11] = -torch.inf
    params = [
        SamplingParams(
            temperature=(1.0, 0.0, 0.2, 1e30)[i % 4],
            top_p=(1.0, 1.0, 0.8)[i % 3],
            min_p=(0.0, 0.3)[i % 5 == 0],
            sampling_seed=i,
        )
        for i in range(len(logits))
    ]
    rows, found = list(range(len(logits))), []
    for is_native in (True, False):
        sampler = make(params, vocab_size)
        sampler._is_native = is_native
        found.append(sampler.sample(logits.clone(), rows, rows).tokens_R)
    assert torch.equal(*found)


@pytest.mark.skipif(not cpu.available, reason=cpu.reason)
@QUICK
@given(
    params=st.lists(WILD, min_size=1, max_size=6),
    vocab_size=st.sampled_from([2, 15, 16, 17, 64, 1001]),
    coarse=st.sampled_from([0.0, 0.5, 4.0]),  # rounded logits give many ties
    has_mask=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_kernel_equals_torch(
    params: list[SamplingParams], vocab_size: int, coarse: float, has_mask: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), vocab_size, generator=generator) * 4
    if coarse:
        logits = (logits / coarse).round() * coarse
    logits[torch.rand(logits.shape, generator=generator) < 0.02] = -torch.inf
    mask = None
    if has_mask:
        words = (len(params), -(-vocab_size // 32))
        mask = torch.randint(-(2**31), 2**31, words, generator=generator, dtype=torch.int32)
    rows = list(range(len(params)))
    found = []
    for is_native in (True, False):
        sampler, at = make(params, vocab_size, prompt=(0, 1, 1)), [3] * len(params)
        sampler._is_native = is_native
        for step in range(3):  # penalties count sampled tokens
            now, at = logits.clone(), [3 + step] * len(params)
            tokens = sampler.sample(now, rows, at, mask).tokens_R
            found.append((tokens, now))
    for (tokens, after), (want, want_after) in zip(found[:3], found[3:], strict=True):
        assert torch.equal(after, want_after)
        assert torch.equal(tokens, want)
