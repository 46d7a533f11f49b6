"""Products of activations against torch, and the bits of a row in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.kernels import cpu
from radixlm.kernels.products import head_averages, head_products, row_products

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)
sizes = st.integers(1, 70)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(m=sizes, n=sizes, k=sizes, more=st.integers(0, 40), seed=st.integers(0, 1000))
def test_rows_do_not_depend_on_others_nor_on_zeros(
    m: int, n: int, k: int, more: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(m, k), torch.randn(n, k)
    whole = row_products(x, w)
    torch.testing.assert_close(whole, x @ w.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(row_products(x[m // 2 :], w[n // 3 :]), whole[m // 2 :, n // 3 :])
    x, w = F.pad(x, (more, more // 2)), F.pad(w, (more, more // 2), value=2.0)
    assert torch.equal(row_products(x, w), whole)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    queries=st.integers(1, 9),
    keys=sizes,
    hidden=st.integers(0, 200),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_does_not_depend_on_what_is_hidden(
    queries: int, keys: int, hidden: int, has_sinks: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(4, queries, 12), torch.randn(keys, 2, 12), torch.randn(keys, 2, 10)
    sinks = torch.randn(4) if has_sinks else None
    scores = head_products(q, k)
    torch.testing.assert_close(scores, q @ k.repeat_interleave(2, 1).permute(1, 2, 0))
    out = head_averages(scores, v, sinks)
    shares = (
        scores
        if sinks is None
        else torch.cat((scores, sinks[:, None, None].expand(-1, queries, 1)), -1)
    )
    shares = shares.softmax(-1)[..., :keys]
    expected = (shares @ v.repeat_interleave(2, 1).transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    masked = F.pad(scores, (0, hidden), value=-torch.inf)
    assert torch.equal(head_averages(masked, F.pad(v, (0, 0, 0, 0, 0, hidden)), sinks), out)
    assert torch.equal(head_averages(scores[:, -1:], v, sinks), out[-1:])
