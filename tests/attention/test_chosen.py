"""Output tokens that read only what an index has chosen, on the CPU, against all keys and a mask in
plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.paged_step import make_batch, open_backend
from tests.fakes.attention_case import Case
from torch import Tensor

from radixlm.base.record import replace
from radixlm.kernels import cpu
from radixlm.kernels.ops.kv import DTYPES, INT4
from radixlm.layers.gathered_attention import Choose, IndexChunk, attend_chosen, attend_gathered
from radixlm.step.batch import AttentionSite, ForwardBatch

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)
WIDTH, INDEX = 20, 6  # channels of a query, and those behind them in a row
SITES = {
    "latent": AttentionSite(1, 0, 6, 1, WIDTH + INDEX, 18, 0.3, latent=True),
    "latent sinks": AttentionSite(
        0, 0, 6, 1, WIDTH + INDEX, 18, 0.3, latent=True, sinks=torch.ones(6)
    ),
    "no index": AttentionSite(1, 0, 6, 1, WIDTH, 18, 0.3, latent=True),
    "blocks": AttentionSite(1, 0, 8, 2, WIDTH + INDEX, 12, 0.3, softcap=5.0),
}
LENGTHS = [(1, 70), (3, 40), (1, 5), (1, 0), (20, 13)]


def _choose(runs: tuple[int, int]) -> Choose:
    """By the sums of an index, the newest run always: the best quarter of the runs."""
    choices, size = runs

    def choose(chunk: IndexChunk) -> Tensor:
        sums_N = chunk.index_NKR.float().sum((1, 2))
        scores = torch.stack([torch.cos(sums_N * (g + 1)) for g in range(choices)])[:, None]
        scores = scores.expand(-1, len(chunk.positions_Q), -1)
        first_N = torch.arange(len(sums_N)) // size * size
        own = first_N == (chunk.positions_Q // size * size)[:, None]
        return (scores[..., first_N] > 0.5) | own

    return choose


def _outputs(case: Case, site: AttentionSite, runs: tuple[int, int], plain: bool) -> list[Tensor]:
    backend, batch = _step(case, site)
    q, k, v = (torch.cat(part) for part in _new(case))
    how: Any = attend_gathered if plain else attend_chosen
    more = () if plain else (runs,)
    out = how(q, k, None if site.latent else v, site, batch, _choose(runs), *more)
    assert plain or backend.pools[0].chosen_reader(site, q.shape[2], runs) is not None
    return list(out.split([len(x) for x in case.q]))


def _step(case: Case, site: AttentionSite) -> tuple[Any, ForwardBatch]:
    """A step of output tokens; half of the longest sequence's are of its prompt."""
    backend, table = open_backend("cpu", case, site)
    batch = make_batch(case, table, backend)
    batch.prompt_len_S = torch.tensor(
        [len(k) - len(q) + len(q) // 20 * 10 for q, k in zip(case.q, case.k, strict=True)]
    )
    backend.begin(batch)
    return backend, batch


def _new(case: Case) -> list[list[Tensor]]:
    """Queries without the channels of the index, keys and values of the step's tokens."""
    counts = [len(q) for q in case.q]
    q = [x[..., :WIDTH].contiguous() for x in case.q]
    return [q, *([x[-n:] for x, n in zip(of, counts, strict=True)] for of in (case.k, case.v))]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != INT4], ids=str)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(name=st.sampled_from(list(SITES)), choices=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_equals_all_keys_under_a_mask(
    dtype: torch.dtype, name: str, choices: int, data: st.DataObject
) -> None:
    site, size = SITES[name], data.draw(st.sampled_from([16, 32]))
    runs = (1, data.draw(st.sampled_from([1, 3]))) if site.latent else (choices, size)
    lengths = data.draw(st.permutations(LENGTHS[:-1])) + LENGTHS[-1:]
    case = Case.random(site, lengths, data.draw(st.sampled_from([16, 48])), 3, dtype)
    case = replace(case, q=[(q * site.scale).bfloat16().float() / site.scale for q in case.q])
    ours, plain = (_outputs(case, site, runs, is_plain) for is_plain in (False, True))
    # Products of bfloat16 round weights p and, not here, queries. Each p is wrong by 2^-8 of itself
    # at most: sum(p v) by 2^-8 of sum(p |v|), which is no more than the largest |v|.
    rounds = cpu.isa in ("amx", "avx512bf16") and dtype not in (torch.float32, torch.float16)
    largest = max(float(x.abs().max()) for x in (case.k if site.latent else case.v))
    limit = 1e-5 + rounds * largest / 256
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=limit)


@pytest.mark.parametrize("name", SITES)
def test_bits_do_not_depend_on_the_rest_of_the_step(name: str) -> None:
    site, runs = SITES[name], (1, 1) if SITES[name].latent else (4, 16)
    case = Case.random(site, LENGTHS, 16, 3, torch.bfloat16)
    together = _outputs(case, site, runs, False)
    for i in range(len(LENGTHS)):
        parts = {part: [getattr(case, part)[i]] for part in ("q", "k", "v")}
        (alone,) = _outputs(replace(case, **parts), site, runs, False)
        assert torch.equal(alone, together[i]), i


def test_runs_that_are_no_whole_tiles_have_no_kernel() -> None:
    backend, _ = _step(Case.random(SITES["blocks"], LENGTHS, 16, 3), SITES["blocks"])
    pool = backend.pools[0]
    assert pool.chosen_reader(SITES["blocks"], 20, (2, 24)) is None
    assert pool.chosen_reader(SITES["blocks"], 20, (3, 16)) is None
    sinks = replace(SITES["blocks"], sinks=torch.ones(8))
    assert pool.chosen_reader(sinks, 20, (2, 16)) is None
