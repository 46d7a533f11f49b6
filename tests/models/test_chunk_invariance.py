"""Every family with the C++ kernels: the same bits in chunks, in a batch and token by token."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.mechanisms import each_mechanism
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny

from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)


@pytest.mark.parametrize("architecture", each_mechanism(ARCHITECTURES))
def test_the_same_bits(architecture: str) -> None:
    model = load_model(cached_tiny(architecture), bind("cpu", {}))
    generator = torch.Generator().manual_seed(1)
    ids, other = (torch.randint(3, 250, (n,), generator=generator).tolist() for n in (35, 20))

    for dtype in (torch.float32, torch.bfloat16):

        def runner(dtype: torch.dtype = dtype) -> PagedRunner:
            return PagedRunner(model, "cpu", page_size=16, cache_dtype=dtype)

        whole = runner().prefill({0: ids})[0]
        assert torch.equal(runner().prefill({0: ids}, 7)[0], whole)
        assert torch.equal(runner().prefill({0: ids, 1: other}, 2)[0], whole)
        if dtype == torch.bfloat16:  # test_cpu_kernels.py decodes with a cache of float32
            steps = runner()
            assert torch.equal(torch.cat([steps.step({0: [one]})[0] for one in ids]), whole)
