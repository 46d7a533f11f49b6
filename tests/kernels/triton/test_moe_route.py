"""The router's kernel against the reference, for every kind of score."""

from __future__ import annotations

import pytest
import torch

from radixlm.arch.spec import Moe
from radixlm.kernels.ops import moe as reference
from radixlm.kernels.triton.moe_route import route, takes

SPECS = {
    "softmax": Moe(60, 4, 8, "silu"),
    "renorm": Moe(128, 8, 8, "silu", renorm=True),
    "sigmoid": Moe(24, 6, 8, "silu", "sigmoid", renorm=True, scale=2.5, correction=True),
    "groups": Moe(
        64, 8, 8, "silu", "sigmoid", renorm=True, correction=True, groups=(8, 3), scale=1.5
    ),
    "group_max": Moe(60, 3, 8, "silu", groups=(5, 2), group_score="max"),
    "chosen": Moe(32, 4, 8, "swiglu_oai", "softmax_topk", bias=True),
    "sigmoid_chosen": Moe(16, 1, 8, "silu", "sigmoid_topk"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    torch.manual_seed(3)
    # no two logits of a row are equal, so that only one choice is right
    logits = torch.stack([torch.randperm(spec.experts) for _ in range(17)]).to(dtype) / 16 - 2
    correction = torch.randn(spec.experts) / 64 if spec.correction else None
    weights, ids = route(logits, correction, spec)
    want_weights, want_ids = reference.route(logits, correction, spec)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    order, want_order = ids.argsort(1), want_ids.argsort(1)
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want_weights.gather(1, want_order))


def test_rows_with_a_stride_and_no_rows() -> None:
    spec = SPECS["softmax"]
    logits = torch.randn(5, 100)[:, :60]
    torch.testing.assert_close(route(logits, None, spec), reference.route(logits, None, spec))
    assert route(logits[:0], None, spec)[1].shape == (0, 4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_ids_stay_in_range_with_nan_scores() -> None:
    logits = torch.full((2, 60), float("nan"))
    ids = route(logits, None, SPECS["softmax"])[1]
    assert int(ids.min()) >= 0 and int(ids.max()) < 60


def test_rare_routers_use_the_reference() -> None:
    spec = Moe(16, 2, 8, "silu", "sparsemixer", jitter=0.01)
    logits = torch.randn(3, 16)
    assert not takes(logits, spec)
    torch.testing.assert_close(route(logits, None, spec), reference.route(logits, None, spec))
