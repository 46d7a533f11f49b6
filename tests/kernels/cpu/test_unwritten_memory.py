"""No number comes from memory that nobody has written: scratch memory, pads, slots of the cache and
fresh tensors hold NaN here, and dimensions are no multiples of vectors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.cpu.test_attention import Case, World

from radixlm.kernels.cpu import linear
from radixlm.kernels.ops import kv

DIMS = (12, 20, 36, 80, 96)
LENS = ((1, 1), (1, 70), (5, 5), (3, 130), (40, 100), (1, 600))


@pytest.mark.parametrize("dtype", kv.DTYPES, ids=str)
@pytest.mark.usefixtures("isa")
def test_attention(dtype: torch.dtype) -> None:
    for dim in DIMS:
        world = World(Case(LENS, 6, 2, dim, dim, dtype=dtype))  # its other slots are NaN
        before = torch.cat(world.run(list(LENS)))
        queries, world.q = world.q, [torch.full_like(q, torch.nan) for q in world.q]
        world.run(list(LENS))  # leaves NaN in scratch memory
        world.q = queries
        after = torch.cat(world.run(list(LENS)))
        assert bool(after.isfinite().all()) and torch.equal(after, before), dim


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16", "int8wo", "w8a8"])
@pytest.mark.usefixtures("isa")
def test_linear_layers(fmt: str) -> None:
    for num_in in DIMS:
        packed = linear.pack(torch.randn(3 * num_in, num_in), None, fmt)
        for num_rows in (1, 3, 40):
            x = torch.randn(num_rows, num_in)
            before = packed.run(x)
            packed.run(torch.full((2 * num_rows, num_in), torch.nan))
            after = packed.run(x)
            assert bool(after.isfinite().all()) and torch.equal(after, before), (num_in, num_rows)


@pytest.fixture
def _fresh_tensors_are_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert bool(torch.empty(4).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", [{}, {"kv_cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("dim", [12, 20])
@pytest.mark.usefixtures("_fresh_tensors_are_nan")
def test_whole_steps_in_bfloat16(dim: int, kind: dict[str, Any]) -> None:
    pytest.importorskip("transformers")  # scripts/arm has none
    from tests.fakes.tiny_checkpoint import cached_tiny

    from radixlm import Engine

    folder = cached_tiny("Qwen3ForCausalLM", head_dim=dim, hidden_size=48)
    prompts = [[3 + (7 * i + n) % 250 for i in range(n)] for n in (1, 17, 33, 70)]
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    with Engine(
        model_path=str(folder), dtype="bfloat16", cpu_threads=2, max_total_tokens=1024,
        skip_tokenizer_init=True, **kind,
    ) as engine:  # fmt: skip
        replies = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    found = [row[0] for r in replies for row in r["meta_info"]["output_token_logprobs"]]
    assert len(found) == 16 and bool(torch.tensor(found).isfinite().all())
