"""The variants of ``kernels/triton/logprob.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.logprob import _FEW_CHUNKS, logprob_kernel, sum_kernel


def variants() -> tuple[Variant, ...]:
    """Each dtype of logits and size of vocabulary."""
    found = []
    for pointer in POINTERS.values():
        common = {"logits_ptr": pointer, "sums_ptr": "*fp32"}
        numbers = dict.fromkeys(("logits_stride", "num_chunks"), "i32")
        signature = common | numbers | {"vocab": "i32"}
        found.append(Variant(f"sum-{pointer}", sum_kernel, signature, {}, 8, 3))
        signature = common | numbers
        signature |= {"tokens_ptr": "*i64", "out_ptr": "*fp32", "num_tokens": "i32"}
        for block in (_FEW_CHUNKS, 2 * _FEW_CHUNKS):
            constants = {"BLOCK": block, "TOKENS": 32}
            name = f"logprob-{pointer}-{block}"
            found.append(Variant(name, logprob_kernel, signature, constants, 4, 3))
    return tuple(sorted(found, key=lambda v: v.name))
