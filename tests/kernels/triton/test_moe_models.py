"""Small mixture-of-experts models on the Triton kernels, against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.kernels.dispatch import bind
from radixlm.quant.load_time import make_scheme

IDS = {0: list(range(5, 16)), 1: [9, 8, 7]}
TRITON = {"pack_linear", "pack_gated", "pack_tied", "route", "pack_experts"}


@pytest.mark.parametrize(
    ("arch", "quantization"),
    [
        ("GptOssForCausalLM", None),
        pytest.param("Qwen3MoeForCausalLM", "fp8", marks=pytest.mark.slow),
        pytest.param("MixtralForCausalLM", "int8wo", marks=pytest.mark.slow),
    ],
)
def test_logits_and_a_decode_step(arch: str, quantization: str | None) -> None:
    folder = cached_tiny(arch, dtype=torch.float32)
    kernels = bind("cpu", dict.fromkeys(TRITON, "triton"))
    model = load_model(folder, kernels, scheme=make_scheme(quantization))
    reference = load_model(folder, scheme=make_scheme(quantization))
    got, want = PagedRunner(model), PagedRunner(reference)
    bound = 0.05 if quantization == "fp8" else 1e-3  # one value may round to the other side
    steps = [(got.prefill(IDS), want.prefill(IDS))]
    steps.append((got.step({0: [3], 1: [4]}), want.step({0: [3], 1: [4]})))
    for ours, theirs in steps:
        for sequence, logits in theirs.items():
            error = (ours[sequence] - logits).norm() / logits.norm()
            assert float(error) < bound
