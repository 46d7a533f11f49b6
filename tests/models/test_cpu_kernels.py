"""Every architecture on the C++ kernels: close to the reference, and the same bit for bit however
tokens are batched and cut."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny
from tests.models.test_decoder import prompts, relative_error

from radixlm.kernels import cpu
from radixlm.kernels.cpu.extension import native as native_module
from radixlm.kernels.dispatch import bind

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

LENGTHS = (23, 1, 9, 17, 2, 5, 3, 7, 1, 1, 12, 4, 6, 2, 8, 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_close_to_the_reference_and_bit_invariant(arch: str) -> None:
    folder = cached_tiny(arch)
    model, reference = load_model(folder, bind("cpu")), load_model(folder)
    ids = prompts(model.decoder.vocab, LENGTHS)
    together = PagedRunner(model, "cpu", page_size=16).prefill(ids, num_chunks=3)
    expected = PagedRunner(reference).prefill({0: ids[0]})[0]
    assert relative_error(together[0], expected) < 1e-5
    alone = PagedRunner(model, "cpu", page_size=32, seed=1)
    for sequence in (0, 3):
        whole = alone.prefill({sequence: ids[sequence]})[sequence]
        assert torch.equal(whole, together[sequence]), "alone or among 15 others, in 1 or 3 chunks"
    stepped = PagedRunner(model, "cpu", page_size=16, seed=2)
    rows = [stepped.step({0: [token]})[0] for token in ids[0]]
    assert torch.equal(torch.cat(rows), together[0]), "decoded one by one or prefilled"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_and_cache(dtype: torch.dtype) -> None:
    folder = cached_tiny("Qwen3ForCausalLM", dtype=dtype)
    model, reference = load_model(folder, bind("cpu")), load_model(folder)
    ids = prompts(model.decoder.vocab)
    ours = PagedRunner(model, "cpu", 16, cache_dtype=dtype).prefill(ids, 2)
    theirs = PagedRunner(reference, cache_dtype=dtype).prefill(ids, 2)
    for sequence in ids:
        # Both round keys and values, from numbers that differ in their last bits.
        assert relative_error(ours[sequence], theirs[sequence]) < 5e-3


def test_threads_change_nothing() -> None:
    model = load_model(cached_tiny("Qwen3MoeForCausalLM"), bind("cpu"))
    ids = prompts(model.decoder.vocab)
    native = native_module()
    before = native.max_threads()
    try:
        results = []
        for threads in (1, 3):
            native.set_max_threads(threads)
            results.append(PagedRunner(model, "cpu", 16).prefill(ids))
    finally:
        native.set_max_threads(before)
    assert all(torch.equal(results[0][s], results[1][s]) for s in ids)
