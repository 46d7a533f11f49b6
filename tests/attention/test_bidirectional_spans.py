"""Tokens of a bidirectional span, against a mask written out for each query."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.fakes.attention_case import Case, run_case
from torch import Tensor

from radixlm.attention import reference
from radixlm.base.record import replace
from radixlm.kernels import cpu
from radixlm.step.batch import AttentionSite

SITE = AttentionSite(layer=1, group=0, heads=4, kv_heads=2, head_dim=16, v_dim=16, scale=0.3)
SITES = {
    "plain": SITE,
    "window": replace(SITE, window=5),
    "softcap": replace(SITE, softcap=2.0),
    "latent": replace(SITE, kv_heads=1, v_dim=8, latent=True),
    "causal": replace(SITE, looks_ahead=False),
}
# (queries, tokens before): a chunk with two spans, a decode, a span at the chunk's end, no span
SHAPES = [(30, 21), (1, 40), (12, 0), (7, 9)]
MUTUAL = ((2, 9), (14, 16), (35, 8))
CACHES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
NATIVE = pytest.param("cpu", marks=pytest.mark.skipif(not cpu.available, reason="not built"))


def written_out(case: Case, site: AttentionSite) -> list[Tensor]:
    starts = itertools.accumulate((len(q) for q in case.q), initial=0)
    return [
        _one(case, site, i, start) for i, start in zip(range(len(case.q)), starts, strict=False)
    ]


def _one(case: Case, site: AttentionSite, index: int, start: int) -> Tensor:
    q, k, v = case.q[index], case.k[index], case.v[index]
    v = k[..., : site.v_dim] if site.latent else v
    before = len(k) - len(q)
    sees = torch.zeros(len(q), len(k), dtype=torch.bool)
    for row in range(len(q)):
        place = before + row
        last = place
        for first, count in MUTUAL if site.looks_ahead else ():
            if first <= start + row < first + count:
                last = before + first + count - 1 - start
        sees[row, max(0, place - site.window + 1) if site.window else 0 : last + 1] = True
    return attend_by_mask(q, k, v, sees, site)


def attend_by_mask(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, site: AttentionSite) -> Tensor:
    share = site.heads // site.kv_heads
    scores = torch.einsum("qhc,nhc->hqn", q, k.repeat_interleave(share, 1)) * site.scale
    if site.softcap:
        scores = torch.tanh(scores / site.softcap) * site.softcap
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqn,nhv->qhv", weights, v.repeat_interleave(share, 1)).flatten(1)


@pytest.mark.parametrize("backend", ["torch_native", NATIVE])
@pytest.mark.parametrize("name", SITES)
def test_only_spans_attend_forwards(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = SITES[name]
    case = Case.random(site, SHAPES, 16, 1)
    expected = written_out(case, site)
    for max_scores in (reference.MAX_SCORES, 4 * 51 * 3):  # at once, and in chunks of queries
        monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
        found = run_case(case, site, backend, poison=True, bidirectional_spans=MUTUAL)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch_native", NATIVE])
def test_a_span_may_ignore_the_window(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PaliGemma 2: each token of the prompt sees all of it; later ones see their window."""
    site, shapes = SITES["window"], [(30, 0), (1, 40), (12, 0)]
    case = Case.random(site, shapes, 16, 1)
    spans = ((0, 30), (31, 12))
    whole = replace(site, window=0)
    expected = [
        attend_by_mask(q, k, v, torch.ones(len(q), len(k), dtype=torch.bool), whole)
        for q, k, v in zip(case.q, case.k, case.v, strict=True)
    ]
    window = torch.arange(41)[None] > 40 - site.window
    expected[1] = attend_by_mask(case.q[1], case.k[1], case.v[1], window, site)
    for max_scores in (reference.MAX_SCORES, 4 * 51 * 3):
        monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
        found = run_case(case, site, backend, bidirectional_spans=spans, ignores_window=True)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", CACHES, ids=str)
@pytest.mark.skipif(not cpu.available, reason="not built")
def test_every_cache_type(dtype: torch.dtype) -> None:
    case = Case.random(SITE, SHAPES, 16, 1, dtype)
    ours, theirs = (
        run_case(case, SITE, backend, bidirectional_spans=MUTUAL)
        for backend in ("cpu", "torch_native")
    )
    rounds = cpu.isa in ("amx", "avx512bf16") and dtype.itemsize < 4  # to bfloat16
    limit = 1e-2 if rounds else 2e-3
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)
