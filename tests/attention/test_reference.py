"""torch_native against attention written out for one query at a time over plain lists."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.attention_case import Case, run_case
from torch import Tensor

from radixlm.attention import reference
from radixlm.attention.select import make_backend
from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.kernels.dispatch import bind
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite

CPU = torch.device("cpu")


def written_out(case: Case, site: AttentionSite, sequence: int) -> Tensor:
    """[queries, heads * v_dim] of the last `queries` tokens, from the definition."""
    q, k, v = case.q[sequence], case.k[sequence], case.v[sequence]
    if site.latent:
        v = k[..., : site.v_dim]
    rows = []
    for number, query in enumerate(q):
        position = len(k) - len(q) + number
        heads = []
        for head in range(site.heads):
            shared = head * site.kv_heads // site.heads
            scores = []
            for other in range(position + 1):
                if site.window and other <= position - site.window:
                    scores.append(-math.inf)
                    continue
                score = float(query[head].double() @ k[other, shared].double()) * site.scale
                if site.softcap:
                    score = math.tanh(score / site.softcap) * site.softcap
                scores.append(score)
            if site.sinks is not None:
                scores.append(float(site.sinks[head]))
            shares = torch.tensor(scores, dtype=torch.float64).softmax(0)[: position + 1]
            heads.append((shares[:, None] * v[: position + 1, shared].double()).sum(0))
        rows.append(torch.cat(heads))
    return torch.stack(rows).float()


SITE = AttentionSite(layer=1, group=0, heads=4, kv_heads=2, head_dim=8, v_dim=8, scale=0.3)
VARIANTS = {
    "plain": SITE,
    "window": replace(SITE, window=5),
    "softcap": replace(SITE, softcap=2.0),
    "sinks": replace(SITE, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "everything": replace(SITE, window=3, softcap=1.5, sinks=torch.tensor([0.1, 0.2, 3.0, -2.0])),
    "many heads": replace(SITE, kv_heads=1),
    "no sharing": replace(SITE, kv_heads=4),
    "latent": replace(SITE, kv_heads=1, head_dim=12, v_dim=8, latent=True),
    "narrow values": replace(SITE, v_dim=5),
}


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(
    name: str, shapes: list[tuple[int, int]], page_size: int, seed: int
) -> None:
    site = VARIANTS[name]
    case = Case.random(site, shapes, page_size, seed)
    for sequence, out in enumerate(run_case(case, site, "torch_native")):
        torch.testing.assert_close(out, written_out(case, site, sequence), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_cache_rounds_keys_and_values_only(dtype: torch.dtype) -> None:
    case = Case.random(SITE, [(3, 7), (1, 12)], 4, 0, cache_dtype=dtype)
    rounded = replace(
        case, k=[k.to(dtype).float() for k in case.k], v=[v.to(dtype).float() for v in case.v]
    )
    for sequence, out in enumerate(run_case(case, SITE, "torch_native")):
        expected = written_out(rounded, SITE, sequence)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_pages_of_other_sequences_do_not_leak(name: str) -> None:
    """NaN everywhere but in the sequence's own tokens; masked values must not be summed."""
    site = VARIANTS[name]
    case = Case.random(site, [(2, 9), (1, 30), (1, 3)], 4, 1)
    for sequence, out in enumerate(run_case(case, site, "torch_native", poison=True)):
        expected = written_out(case, site, sequence)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_long_queries_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.random(SITE, [(23, 40), (1, 5), (1, 40)], 4, 2)
    whole = run_case(case, SITE, "torch_native")
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 63 * 5)
    cut = run_case(case, SITE, "torch_native")
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_padding_of_decode_batches_is_bounded() -> None:
    lengths = random.Random(0).choices(range(1, 1000), k=64)
    spans = [reference.Span(i, i, 1, n) for i, n in enumerate(lengths)]
    parts = reference.split_spans(spans, SITE)
    assert sorted(s.index for part in parts for s in part) == list(range(64))
    for part in parts:
        shortest, longest = min(s.kv_len for s in part), max(s.kv_len for s in part)
        assert longest <= reference.MAX_PADDING * shortest


def test_unknown_backend_names_the_flag_and_the_choices() -> None:
    group = KvGroup(0, "full", (0,), 1, 8, 8)
    with pytest.raises(ConfigError, match=r"--attention-backend 'magic'.*torch_native"):
        make_backend("magic", (group,), bind("cpu", {"all": "reference"}), CPU)


def test_pages_outside_the_window_are_not_looked_up() -> None:
    site = VARIANTS["window"]
    case = Case.random(site, [(2, 60), (1, 90), (1, 3), (40, 33)], 16, 1)
    whole, forgotten = (run_case(case, site, "torch_native", forget=f) for f in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(whole, forgotten, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_step(name: str, dtype: torch.dtype) -> None:
    """In one step, in parts, and token by token, with others beside it or alone."""
    site = VARIANTS[name]
    lengths = [130, 200, 7]
    whole = Case.random(site, [(n, 0) for n in lengths], 16, 3, cache_dtype=dtype)
    expected = run_case(whole, site, "torch_native")
    for first, count in ((0, 64), (64, 66), (129, 1), (190, 10), (199, 1), (5, 2), (6, 1)):
        rows = [i for i, n in enumerate(lengths) if first + count <= n]
        for beside in (rows, rows[:1]):
            case = replace(
                whole,
                q=[whole.q[i][first : first + count] for i in beside],
                k=[whole.k[i][: first + count] for i in beside],
                v=[whole.v[i][: first + count] for i in beside],
            )
            for i, out in zip(beside, run_case(case, site, "torch_native"), strict=True):
                assert torch.equal(out, expected[i][first : first + count]), (first, i)
