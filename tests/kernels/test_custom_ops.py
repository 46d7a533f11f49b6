"""The custom ops that hide kernels from torch.compile: schema and fake implementation agree with
the real one, and plain calls equal the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.kernels.custom_ops import OPS, FunctionHandle, flat_norm, norm_of, with_custom_ops
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops import activation, embedding, linear, moe, norm, rope
from radixlm.kernels.ops.rope import QkNorm

T, D, H = 3, 8, 2
QK_NORM = QkNorm("head", False, 1e-6, torch.rand(D), torch.rand(D))
ROUTER = ("softmax", 1, 1, 2, "top2", True, 1.0, 0.0)


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (T, D)))


def prepare(q: Tensor, k: Tensor, *rest: Any) -> None:
    rope.prepare_qk(q, k, norm_of(rest[:7]), *rest[7:])


def rows(ids: Tensor, width: int, scale: float, dtype: torch.dtype) -> Tensor:
    return torch.full((len(ids), width), scale, dtype=dtype)


def attend(q: Tensor, k: Tensor | None, v: Tensor | None, width: int) -> Tensor:
    return q.flatten(1)[:, :width] * 2.0


def prepare_and_attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    prepare(q, k, *rest[:-1])
    return attend(q, k, v, rest[-1])


def route(logits: Tensor, correction: Tensor | None, *spec: Any) -> tuple[Tensor, Tensor]:
    return moe.route(logits, correction, Moe(4, spec[3], 8, "silu", spec[0], renorm=spec[5]))


TURN = (rope.rope_angles(torch.arange(T), torch.rand(D // 2), 1.0), False)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rms_norm": (norm.rms_norm, (x(), x(D), 1e-6)),
    "add_rms_norm": (norm.add_rms_norm, (x(), x(), x(D), 1e-6)),
    "layer_norm": (norm.layer_norm, (x(), x(D), None, 1e-6)),
    "add_layer_norm": (norm.add_layer_norm, (x(), x(), x(D), x(D), 1e-6)),
    "rope": (rope.rope, (x(T, H, D), *TURN)),
    "prepare_qk": (prepare, (x(T, H, D), x(T, 1, D), *flat_norm(QK_NORM), *TURN)),
    "sigmoid": (activation.sigmoid, (x(),)),
    "softcap": (activation.softcap, (x(), 3.0)),
    "activate": (activation.activate, (x(), "gelu")),
    "activate_gated": (activation.activate_gated, (x(), "silu")),
    "embedding": (embedding.embedding, (torch.arange(T), x(9, D), 2.0, torch.bfloat16)),
    "route": (route, (x(T, 4), None, *ROUTER)),
    "linear": (lambda y, width: y @ torch.ones(D, width), (x(), 5)),
    "rows": (rows, (torch.arange(T), 4, 1.0, torch.half)),
    "experts": (lambda y, *_: y * 2, (x(), x(T, 2), torch.zeros(T, 2, dtype=torch.int64))),
    "attend": (attend, (x(T, H, D), None, None, D)),
    "prepare_and_attend": (
        prepare_and_attend,
        (x(T, H, D), x(T, 1, D), x(T, 1, D), *flat_norm(None), *TURN, D),
    ),
}  # fmt: skip


def test_every_custom_op_has_a_case() -> None:
    assert CALLS.keys() == OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_schema_and_fake_agree_with_the_op(name: str) -> None:
    function, args = CALLS[name]
    held = FunctionHandle(function)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS[name], (held.number, *args), test_utils=checks)


@pytest.mark.parametrize("name", ["reference", ""])
def test_plain_calls_are_those_of_the_kernels(name: str) -> None:
    kernels = bind("cpu", {"all": name} if name else {})
    hidden = with_custom_ops(kernels)
    y, weight = x(), x(D)
    assert torch.equal(hidden.rms_norm(y, weight, 1e-6), kernels.rms_norm(y, weight, 1e-6))
    logits, spec = x(T, 4), Moe(4, 2, 8, "silu", "sigmoid", renorm=True)
    for ours, theirs in zip(
        hidden.route(logits, None, spec), kernels.route(logits, None, spec), strict=True
    ):
        assert torch.equal(ours, theirs)
    matrix = x(6, D)
    made, plain = (one.pack_linear(matrix, None, "") for one in (hidden, kernels))
    assert type(made) is type(plain) and torch.equal(made.run(y), plain.run(y))


def test_a_traced_call_reaches_the_object_that_it_was_traced_with() -> None:
    kernels = with_custom_ops(bind("cpu", {"all": "reference"}))
    up, down = x(4, 2 * 6, D), x(4, D, 6)
    packs = [kernels.pack_experts(up * n, down, None, None, "silu", ("", "")) for n in (1, 2)]
    ids = torch.tensor([[0, 1], [2, 3], [1, 3]])
    weights = torch.rand(T, 2)
    y = x()

    def run() -> list[Tensor]:
        return [pack.run(y, weights, ids) for pack in packs]

    for ours, theirs in zip(
        torch.compile(run, fullgraph=True, backend="eager")(), run(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert isinstance(packs[0], moe.ReferenceExperts)
    assert isinstance(kernels.pack_linear(x(6, D), None, ""), linear.ReferenceLinear)
