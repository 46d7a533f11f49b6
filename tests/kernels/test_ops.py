"""Every implementation of every op against its reference, and the references against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.kernels.dispatch import OPS, REFERENCES, Implementation, implementations
from radixlm.kernels.ops import activation, moe, norm, rope
from radixlm.kernels.ops.lora import LoraLayout, LoraPart, Parts
from radixlm.kernels.ops.quantized import FORMATS, ReferenceQuantized
from radixlm.kernels.ops.rope import QkNorm

GATED = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "tanh", "swiglu_oai")
Run = Callable[[Callable[..., Any]], Tensor | tuple[Tensor, ...]]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """Activations that the weights' dtype represents exactly, because a kernel may round to it."""
    return rand(*shape).to(dtype).float()


def norm_cases(op: str) -> list[Run]:
    """One token, a batch, heads of a strided projection, and weights for each head."""
    is_layer, is_add = "layer" in op, op.startswith("add")

    def case(x: Tensor, shape: tuple[int, ...], with_bias: bool) -> Run:
        weight, bias = rand(*shape) + 1, rand(*shape, seed=1) if with_bias else None
        args = (weight, bias, 1e-5) if is_layer else (weight, 1e-6)
        if not is_add:
            return lambda op: op(x.clone() if x.is_contiguous() else x, *args)

        def add(op: Callable[..., Any]) -> tuple[Tensor, ...]:
            changed = x.clone()
            return op(changed, rand(*x.shape, seed=5), *args), changed

        return add

    cases = [case(rand(t, 64), (64,), b) for t in (1, 5, 33) for b in (False, True)]
    if not is_add:
        heads = rand(7, 160)[:, :96].view(7, 4, 24)
        cases += [case(heads, (24,), False), case(heads, (4, 24), False)]
    return cases


def rope_cases() -> list[Run]:
    def case(tokens: int, dim: int, turned: int, interleaved: bool) -> Run:
        cos_sin = rand(tokens, turned)

        def run(op: Callable[..., Any]) -> Tensor:
            row = rand(tokens, 3 * dim + 8)
            op(row[:, 8:].view(tokens, 3, dim), cos_sin, interleaved)
            op(row[:, 8:].view(tokens, 3, dim)[..., dim - turned :], cos_sin, interleaved)
            return row

        return run

    shapes = [(1, 16, 16), (6, 24, 24), (5, 32, 8), (3, 80, 80), (9, 128, 128)]
    return [case(*shape, interleaved) for shape in shapes for interleaved in (False, True)]


def prepare_cases() -> list[Run]:
    def case(kind: str, is_layer: bool, with_bias: bool, turned: int, interleaved: bool) -> Run:
        heads, dim, tokens = {"q": 6, "k": 2}, 24, 5
        cos_sin = rand(tokens, turned) if turned else None
        shapes = {"head": lambda h: (dim,), "each": lambda h: (h, dim), "row": lambda h: (h * dim,)}
        norm = None
        if kind:
            shape = [shapes[kind](h) for h in heads.values()]
            weights = [rand(*s) + 1 for s in shape]
            biases = [rand(*s, seed=3) if with_bias else None for s in shape]
            norm = QkNorm(kind, is_layer, 1e-5, *weights, *biases)  # type: ignore[arg-type]

        def run(op: Callable[..., Any]) -> Tensor:
            row = rand(tokens, 10 * dim)
            q, k, _ = row.split_with_sizes((6 * dim, 2 * dim, 2 * dim), -1)
            op(q.view(tokens, 6, dim), k.view(tokens, 2, dim), norm, cos_sin, interleaved)
            return row

        return run

    kinds = [("", False), ("head", False), ("row", False), ("head", True), ("each", True)]
    kinds += [("each", False), ("row", True)]
    cases = [
        case(*kind, False, turned, i) for kind in kinds for turned, i in ((24, False), (8, True))
    ]
    return [*cases, case("head", True, True, 24, False), case("head", False, False, 0, False)]


def linear_cases() -> list[Run]:
    def case(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, with_bias: bool) -> Run:
        weight = (rand(outputs, inputs) / inputs**0.5).to(dtype)
        bias = rand(outputs) if with_bias else None

        def run(op: Callable[..., Any]) -> tuple[Tensor, ...]:
            packed = op(weight.clone(), bias, "")
            strided = rows(tokens, inputs + 8, dtype=dtype)[:, :inputs]
            assert packed.out_features == outputs
            x = rows(tokens, inputs, dtype=dtype)
            return packed.run(x), packed.run(strided), packed.unpack().float()

        return run

    shapes = [(1, 64, 96), (3, 64, 100), (17, 40, 33), (70, 96, 64), (2, 24, 1), (4, 1, 5)]
    kinds = [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)]
    return [case(*shape, *kind) for shape in shapes for kind in kinds]


SPECS = (
    Moe(8, 2, 16, "silu"),
    Moe(8, 2, 16, "silu", renorm=True),
    Moe(8, 3, 16, "silu", score="sigmoid", correction=True, groups=(4, 2), scale=2.5),
    Moe(8, 2, 16, "silu", groups=(4, 2), group_score="max", scale=1.5),
    Moe(8, 4, 16, "swiglu_oai", score="softmax_topk", bias=True),
)


def quantized_linear_cases() -> list[Run]:
    def case(fmt: str, tokens: int, dtype: torch.dtype, with_bias: bool) -> Run:
        weight = (rand(40, 256) / 16).to(dtype)
        weight[3] = 0.0
        bias = rand(40) if with_bias else None

        def run(op: Callable[..., Any]) -> tuple[Tensor, ...]:
            packed = op(weight.clone(), bias, fmt)
            return packed.run(rand(tokens, 256)), packed.unpack().float()

        return run

    dtypes = ((torch.float32, True), (torch.bfloat16, False))
    return [case(fmt, t, *d) for fmt in FORMATS for t in (1, 5, 30) for d in dtypes]


def gated_cases() -> list[Run]:
    def case(act: str, tokens: int, dtype: torch.dtype, with_bias: bool) -> Run:
        weight = (rand(2 * 40, 24) / 5).to(dtype)
        bias = rand(2 * 40) if with_bias else None

        def run(op: Callable[..., Any]) -> tuple[Tensor, ...]:
            packed = op(weight.clone(), bias, "", act)
            assert packed.out_features == 40
            return packed.run(rows(tokens, 30, dtype=dtype)[:, :24]), packed.unpack().float()

        return run

    return [
        case(act, tokens, dtype, act == "gelu")
        for act in GATED
        for tokens in (1, 15)
        for dtype in (torch.float32, torch.bfloat16)
    ]


def tied_cases() -> list[Run]:
    def case(dtype: torch.dtype) -> Run:
        table = rand(70, 40).to(dtype)

        def run(op: Callable[..., Any]) -> tuple[Tensor, ...]:
            tied = op(table.clone())
            found = tied.rows(torch.tensor([0, 69, 31, 32]), 2.0, torch.float32)
            return found, tied.run(rows(3, 40, dtype=dtype)), tied.unpack().float()

        return run

    return [case(d) for d in (torch.float32, torch.bfloat16, torch.float16)]


def head_cases() -> list[Run]:
    def case(tokens: int, dtype: torch.dtype) -> Run:
        weight = rand(3, 10, 16).to(dtype)
        return lambda op: op(weight.clone()).run(rows(tokens, 3, 24, dtype=dtype)[..., 4:20])

    return [case(t, d) for t in (1, 6) for d in (torch.float32, torch.bfloat16)]


def route_cases() -> list[Run]:
    def case(spec: Moe, tokens: int) -> Run:
        correction = rand(spec.experts) * 0.1 if spec.correction else None

        def run(op: Callable[..., Any]) -> Tensor:
            weights, ids = op(rand(tokens, spec.experts), correction, spec)
            # Ties and order among the chosen experts do not matter: compare a dense table.
            return torch.zeros(tokens, spec.experts).scatter_(1, ids.long(), weights)

        return run

    return [case(spec, tokens) for spec in SPECS for tokens in (1, 9)]


def expert_cases() -> list[Run]:
    def case(act: str, tokens: int, with_bias: bool, dtype: torch.dtype) -> Run:
        up, down = (rand(6, 40, 24) / 5).to(dtype), (rand(6, 24, 20) / 5).to(dtype)
        biases = (rand(6, 40), rand(6, 24)) if with_bias else (None, None)
        ids = torch.stack(
            [
                torch.randperm(6, generator=torch.Generator().manual_seed(t))[:3]
                for t in range(tokens)
            ]
        )
        weights = rand(tokens, 3).abs()
        return lambda op: op(up.clone(), down.clone(), *biases, act).run(
            rand(tokens, 24), weights, ids
        )

    kinds = [("silu", False), ("swiglu_oai", True), ("gelu_tanh", False)]
    dtypes = (torch.float32, torch.float16)  # bfloat16: see tests/kernels/cpu/test_moe.py
    return [case(a, t, b, d) for a, b in kinds for t in (1, 5, 40) for d in dtypes]


def activation_cases(gated: bool) -> list[Run]:
    acts = GATED if gated else activation.POINTWISE
    return [lambda op, act=act, t=t: op(3 * rand(t, 96), act) for act in acts for t in (1, 7)]


def embedding_cases() -> list[Run]:
    ids = torch.tensor([0, 5, 5, 30])
    return [
        lambda op, d=d, s=s: op(ids, rand(31, 40).to(d), s, torch.float32)
        for d in (torch.float32, torch.bfloat16, torch.float16)
        for s in (1.0, 8.0)
    ]


def state_cases(op: str) -> list[Run]:
    """One token of many sequences and many tokens of one; heads that share inputs."""

    def case(b: int, t: int) -> Run:
        x, log, beta = rand(b, t, 3, 20), -rand(b, t, 3).abs(), rand(b, t, 3).sigmoid()
        q, k = rand(b, t, 3, 12), F.normalize(rand(b, t, 1, 12), dim=-1).expand(b, t, 3, 12)
        if op == "delta_rule":
            return lambda op: op(q, k, x, log[..., None], beta, rand(b, 3, 12, 20))
        if op == "decayed_attention":
            return lambda op: op(x, log, k, q, rand(b, 3, 20, 12))
        wide, dt, a = x.flatten(2), rand(b, t, 60).abs(), -rand(60, 12).abs()
        return lambda op: op(wide, dt, a, k[:, :, 0], q[:, :, 0], rand(b, 60, 12))

    return [case(5, 1), case(1, 40), case(2, 7)]


def adapter_cases() -> list[Run]:
    """Tokens with one of two adapters or none, of an op that packs adapters, or makes rows or
    slots."""
    part = LoraPart(rand(6, 37), rand(20, 6), 0.5, 3, rand(20))
    adapters: list[Parts] = [{2: (part,)}, {2: (LoraPart(rand(1, 37), rand(50, 1), 2.0),)}]
    layout, of_T = LoraLayout(sites=frozenset({2})), torch.tensor([1, -1, 0, 0, 1]).int()

    def case(op: Any) -> torch.Tensor:
        name = next((one.name for one in implementations("cpu") if one.function is op), "")
        ops = {one.op: one.function for one in implementations("cpu") if one.name == name}
        ops = ops or REFERENCES
        packed = [ops["pack_adapter"](parts, layout) for parts in adapters]
        slots = ops["lora_slots"](layout, 5) if op is ops.get("lora_slots") else None
        if slots is None:
            rows = ops["lora_rows"](packed, of_T)
        else:
            for slot, adapter in enumerate(packed):
                slots.put(slot, adapter)
            slots.fill(of_T.numpy(), slots.ints)
            rows = slots.rows(5)
        y = rand(5, 50)
        rows.add_(2, rand(5, 37), y)
        return y

    return [case]


CASES: dict[str, list[Run]] = {
    **{op: norm_cases(op) for op in OPS if op.endswith("norm")},
    "rope": rope_cases(),
    "rope_angles": [lambda op: op(torch.arange(9), rand(8).abs(), 1.25)],
    "prepare_qk": prepare_cases(),
    "sigmoid": [lambda op: op(torch.cat((rand(5, 7) * 20, torch.zeros(1, 7)))[:, :6])],
    "softcap": [lambda op: op(rand(5, 7) * 20, 3.0)],
    "activate": activation_cases(gated=False),
    "activate_gated": activation_cases(gated=True),
    "embedding": embedding_cases(),
    "pack_linear": [*linear_cases(), *quantized_linear_cases()],
    "pack_gated": gated_cases(),
    "pack_tied": tied_cases(),
    "pack_head_linear": head_cases(),
    "route": route_cases(),
    "pack_experts": expert_cases(),
    "decayed_sum": [
        lambda op, b=b, t=t: op(-rand(b, t, 37).abs(), rand(b, t, 37), rand(b, 37))
        for b, t in ((5, 1), (1, 40), (2, 7))
    ],
    "decayed_max": [lambda op: op(-rand(2, 70, 5).abs(), rand(2, 70, 5), rand(2, 5))],
    "fading_mean": [
        lambda op, t=t: op(
            rand(2, t, 9), rand(2, t, 9), rand(9), -rand(9).abs(), rand(2, 3, 9).exp()
        )
        for t in (1, 40)
    ],
    **{op: adapter_cases() for op in ("pack_adapter", "lora_rows", "lora_slots")},
    **{op: state_cases(op) for op in ("selective_scan", "decayed_attention", "delta_rule")},
}


def test_every_op_has_cases() -> None:
    assert CASES.keys() == set(OPS)


@pytest.mark.parametrize("implementation", implementations("cpu"), ids=lambda i: f"{i.op}-{i.name}")
def test_equals_the_reference(implementation: Implementation) -> None:
    # int8wo may round inputs to 16 bits relative to their row's largest.
    bound = 1e-4 if implementation.op == "pack_linear" else 2e-5
    for number, run in enumerate(CASES[implementation.op]):
        got, want = run(implementation.function), run(REFERENCES[implementation.op])
        torch.testing.assert_close(
            got, want, rtol=2e-5, atol=bound, msg=lambda m, n=number: f"case {n}: {m}"
        )


def test_norms_are_torch_norms() -> None:
    x, weight, bias = rand(5, 64), rand(64), rand(64, seed=1)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), F.rms_norm(x, (64,), weight, 1e-6))
    torch.testing.assert_close(
        norm.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (64,), weight, bias, 1e-5)
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_a_rotation_by_the_angle(interleaved: bool) -> None:
    """As complex numbers, each pair is multiplied by exp(i * angle)."""
    angles = rand(5, 6)
    x = rand(5, 3, 16)
    got = x.clone()
    rope.rope(got, torch.cat((angles.cos(), angles.sin()), -1), interleaved)
    pairs = x[..., :12].view(5, 3, 6, 2) if interleaved else x[..., :12].view(5, 3, 2, 6).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    want = torch.view_as_real(turned)
    want = want.flatten(-2) if interleaved else want.mT.flatten(-2)
    torch.testing.assert_close(got[..., :12], want)
    assert torch.equal(got[..., 12:], x[..., 12:])


def test_experts_are_the_weighted_sum_of_small_networks() -> None:
    up, down, x = rand(4, 12, 8), rand(4, 8, 6), rand(5, 8)
    ids, weights = torch.tensor([[0, 3]] * 5), rand(5, 2)
    got = moe.pack_experts(up, down, None, None, "silu").run(x, weights, ids)
    want = torch.zeros_like(x)
    for choice, expert in enumerate((0, 3)):
        gate, value = (x @ up[expert].T).chunk(2, -1)
        want += weights[:, choice, None] * ((F.silu(gate) * value) @ down[expert].T)
    torch.testing.assert_close(got, want)


def test_the_score_correction_changes_the_choice_only() -> None:
    spec = Moe(4, 1, 8, "silu", score="sigmoid", correction=True)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, ids = moe.route(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), spec)
    assert ids.tolist() == [[3]]
    assert float(weights) == pytest.approx(float(torch.sigmoid(torch.tensor(-1.0))))


def test_experts_of_unchosen_groups_are_never_picked() -> None:
    spec = Moe(6, 2, 8, "silu", score="sigmoid", groups=(3, 1))
    logits = torch.tensor([[9.0, -9.0, 2.0, 2.0, 0.0, 0.0]])  # the best single expert is in group 0
    _, ids = moe.route(logits, None, spec)
    assert sorted(ids.tolist()[0]) == [2, 3]


@pytest.mark.parametrize(("fmt", "step"), [("int8wo", 1 / 127), ("int4-32", 1 / 8)])
def test_quantized_weights_are_within_half_a_step(fmt: str, step: float) -> None:
    weight = rand(12, 64)
    group = 32 if "-" in fmt else 64
    largest = weight.view(12, -1, group).abs().amax(-1, keepdim=True)
    error = (ReferenceQuantized(weight, None, fmt).unpack() - weight).view(12, -1, group).abs()
    # The int4 range is one step shorter on one side, where a value may be clipped by a step.
    slack = 1.0 if fmt.startswith("int4") else 0.5
    assert bool((error <= largest * step * slack * 1.0001).all())
    assert float(error.mean()) < float(largest.mean()) * step * 0.3


def test_activations_are_quantized_row_by_row() -> None:
    weight, x = rand(8, 64), rand(3, 64)
    x[1] *= 1000.0
    x[2] = 0.0
    got = ReferenceQuantized(weight, None, "w8a8").run(x)
    want = x @ ReferenceQuantized(weight, None, "int8wo").unpack().T
    assert float((got - want)[0].abs().max()) < 0.02 * float(want[0].abs().max())
    assert float((got - want)[1].abs().max()) < 0.02 * float(want[1].abs().max())
    assert not got[2].any()
