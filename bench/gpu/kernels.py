"""Stage 1: every kernel against torch in float32 or float64, on ragged shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.decode import models_of
from gpu.paged import Case, Heads
from gpu.session import Row, Session, relative
from gpu.workers import ask, say
from radixlm.arch.spec import Moe
from radixlm.attention.select import default_backend
from radixlm.kernels.ops import activation as ops_activation
from radixlm.kernels.ops import linear as ops_linear
from radixlm.kernels.ops import lora as ops_lora
from radixlm.kernels.ops import moe as ops_moe
from radixlm.kernels.ops import norm as ops_norm
from radixlm.kernels.ops import rope as ops_rope
from radixlm.kernels.ops.lora import LoraLayout, LoraPart, Parts
from radixlm.kernels.triton import activation, linear, lora, moe, ops, rope, sample
from radixlm.kernels.triton.mode import interpreting
from radixlm.kernels.triton.moe_route import route
from radixlm.sampling.sampler import threshold

BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# chi-square limit for 99.9 % of draws at 6 degrees of freedom
MOST_CHI_SQUARE = 22.5
LIMIT_S = 120.0  # time limit of all checks, which run in parallel
PROBS = (0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01)


def run(s: Session) -> None:
    """Attention with its store, norms, ropes, gates, draws, products, experts. Raises at the end if
    a kernel is wrong. Meanwhile the kernels of later stages are compiled (warm_up.py)."""
    if s.is_smoke:
        for check in CHECKS:
            for row in rows_of(s, check):
                s.add(**row)
    else:
        specs = [{"work": "kernels", "check": name} for name in CHECKS]
        specs += [{"work": "warm_up", "model": m, "weights": w} for m, w in models_of(s)]
        names = [*CHECKS, *(f"start of {m} {w}" for m, w in models_of(s))]
        limit_s = max(30.0, min(LIMIT_S, s.left_s()))
        for name, rows in zip(names, ask(s, specs, limit_s), strict=True):
            for row in rows:
                s.add(**({"kernel": name, "ok": False} | row))
            s.rows.extend([] if rows else [{"kernel": name, "ok": False, "error": "no result"}])
    off = [row["kernel"] for row in s.rows if not row["ok"]]
    if off:
        raise AssertionError(f"off: {', '.join(off)}")


def rows_of(s: Session, name: str) -> Iterator[Row]:
    """The results of one check, with an error if it fails."""
    torch.manual_seed(1)
    try:
        for kernel, error, bound in CHECKS[name](s):
            yield {"kernel": kernel, "error": error, "bound": bound, "ok": error <= bound}
    except Exception as error:  # the others still run
        yield {"kernel": name, "error": str(error)[:300], "ok": False}


def work(given: dict[str, Any]) -> None:
    """Run one check; called in a worker process."""
    device = torch.device(given["device"])
    s = Session(device, 0.0, Path("unused"), is_smoke=given["is_smoke"])
    for row in rows_of(s, given["check"]):
        say(**row)


Found = Iterator[tuple[str, float, float]]


def _dtype(s: Session) -> torch.dtype:
    """float32 in Triton's interpreter, which multiplies 16-bit floats wrongly."""
    return torch.float32 if s.is_smoke else torch.bfloat16


def _attention(s: Session) -> Found:
    name = "triton" if s.device.type == "cuda" or interpreting() else default_backend(s.device)
    if s.is_smoke:
        cases = {
            "decode": ([(1, 16), (1, 40)], Heads(4, 2, 16)),
            "extend": ([(9, 20)], Heads(2, 1, 16)),
        }
    else:
        cases = {
            f"decode, {h}:{k} heads": ([(1, n - 1) for n in (1, 17, 1000, 4097)], Heads(h, k))
            for h, k in ((8, 8), (16, 8), (32, 8), (28, 4), (64, 8))
        }
        ragged = torch.randint(0, 3000, (64,)).tolist()
        cases |= {
            "decode of 64": ([(1, n) for n in ragged], Heads()),
            "decode, window": ([(1, 4096), (1, 5)], Heads(window=1000)),
            "decode, 64 channels": ([(1, 999), (1, 16)], Heads(14, 2, 64)),
            "decode, 256 channels": ([(1, 999), (1, 16)], Heads(8, 4, 256)),
            "extend": ([(1000, 0), (17, 0), (1, 0)], Heads()),
            "extend behind a prefix": ([(300, 4097), (17, 1000), (1, 17), (64, 1)], Heads()),
            "extend, window": ([(700, 800)], Heads(window=512)),
        }
    for label, (shapes, heads) in cases.items():
        case = Case(s, name, shapes, heads, _dtype(s))
        case.begin()
        got = case.run()
        yield f"attention, {label}", relative(got, case.expected()), BOUND[_dtype(s)]
        same = all(torch.equal(a, b) for a, b in zip(case.stored(), case.rows[1:], strict=True))
        yield f"store, {label}", float(not same), 0.0


def _sizes(s: Session) -> tuple[int, ...]:
    return (3,) if s.is_smoke else (1, 3, 64, 1000)


def _norms(s: Session) -> Found:
    for tokens in _sizes(s):
        for dim in (32,) if s.is_smoke else (128, 1024, 4096):
            x, delta = (s.normal(tokens, dim, dtype=_dtype(s)) for _ in "xd")
            weight, bound = s.normal(dim, dtype=torch.float32), BOUND[_dtype(s)]
            want = ops_norm.rms_norm(x.double(), weight.double(), 1e-6)
            yield f"rms_norm {tokens} x {dim}", relative(ops.rms_norm(x, weight, 1e-6), want), bound
            total = (x + delta).double()
            got = ops.add_rms_norm(x, delta, weight, 1e-6)
            want = ops_norm.rms_norm(total, weight.double(), 1e-6)
            yield f"add_rms_norm {tokens} x {dim}", relative(got, want), bound
            yield f"sum of add_rms_norm {tokens} x {dim}", relative(x, total), bound


def _rope(s: Session) -> Found:
    """Head norms, ropes and the KV store in one kernel; stored and returned values are equal."""
    heads, kv_heads, dim = (4, 2, 16) if s.is_smoke else (16, 8, 128)
    for tokens in _sizes(s):
        q, k, v = (s.normal(tokens, n, dim, dtype=_dtype(s)) for n in (heads, kv_heads, kv_heads))
        weights = (s.normal(dim, dtype=torch.float32) for _ in "qk")
        norm = ops_rope.QkNorm("head", False, 1e-6, *weights)
        angles = torch.rand(tokens, dim // 2, device=s.device) * 6
        cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        wide_q, wide_k = q.double(), k.double()
        ops_rope.prepare_qk(wide_q, wide_k, norm, cos_sin.double(), False)
        k_cache, v_cache = (v.new_zeros(tokens + 9, kv_heads, dim) for _ in "kv")
        slots = torch.randperm(tokens + 9, device=s.device)[:tokens]
        rope.prepare(q, k, norm, cos_sin, False, rope.Store(v, k_cache, v_cache, slots))
        yield f"norm + rope of {tokens}, q", relative(q, wide_q), BOUND[_dtype(s)]
        yield f"norm + rope of {tokens}, k", relative(k, wide_k), BOUND[_dtype(s)]
        same = torch.equal(k_cache[slots], k) and torch.equal(v_cache[slots], v)
        yield f"norm + rope of {tokens}, store", float(not same), 0.0


def _gates(s: Session) -> Found:
    for act in ("silu",) if s.is_smoke else ("silu", "gelu_tanh"):
        x = s.normal(*((5, 64) if s.is_smoke else (65, 2 * 3072)), dtype=_dtype(s))
        want = ops_activation.activate_gated(x.double(), act)
        yield f"gate {act}", relative(activation.activate_gated(x, act), want), BOUND[_dtype(s)]


def _draws(s: Session) -> Found:
    """Frequencies of a known distribution, and filters that keep to their sets."""
    count = 12 if s.is_smoke else 100_000
    probs = torch.tensor(PROBS, device=s.device)
    floats = torch.tensor([1.0, 1.0, 0.0], device=s.device).repeat(count, 1)
    top_k = torch.full((count,), len(PROBS), device=s.device)
    params = sample.pack_params(floats, top_k, top_k * 0 + 3, top_k * 0)
    positions = torch.arange(count, dtype=torch.int32, device=s.device)
    tokens, _ = sample.draw(probs.log().repeat(count, 1), params, positions)
    seen = torch.bincount(tokens, minlength=len(PROBS))
    distance = float(((seen - count * probs) ** 2 / (count * probs)).sum())
    yield f"chi-square of {count} draws", distance, MOST_CHI_SQUARE
    rows, vocab = (2, 300) if s.is_smoke else (512, 151936)
    logits = s.normal(1, vocab, dtype=torch.float32).repeat(rows, 1) * 2.5
    for label, (top_p, min_p, k) in {
        "top_p": (0.8, 0.0, vocab), "top_k": (1.0, 0.0, 50), "min_p": (1.0, 0.05, vocab),
    }.items():  # fmt: skip
        floats = torch.tensor([1.0, top_p, min_p], device=s.device).repeat(rows, 1)
        top_k = torch.full((rows,), k, device=s.device)
        lowest = threshold(logits.softmax(-1), floats, top_k)
        seeds = torch.arange(rows, device=s.device)
        params = sample.pack_params(floats, top_k, seeds, top_k * 0)
        places = torch.zeros(rows, dtype=torch.int32, device=s.device)
        tokens, bad = sample.draw(logits.clone(), params, places)
        chosen = logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
        outside = int((chosen < lowest.view(-1) * (1 - 1e-5)).sum()) + int(bad.sum())
        yield f"draws outside of {label}", float(outside), 0.0


def _products(s: Session) -> Found:
    """Each weight format against its own dequantized weights; fp8 also rounds activations."""
    out, num_in = (128, 128) if s.is_smoke else (4096, 2048)
    bounds = {"": BOUND[_dtype(s)], "fp8": 0.05, "fp8-128": 0.05, "int8wo": 0.02}
    for fmt, bound in bounds.items():
        weight = s.normal(out, num_in, dtype=_dtype(s)) / num_in**0.5
        packed = linear.pack_linear(weight, None, fmt)
        for rows in (3,) if s.is_smoke else (1, 16, 65, 1000):
            x = s.normal(rows, num_in, dtype=_dtype(s))
            want = x.double() @ weight.double().T
            yield f"linear {fmt or 'plain'}, {rows} rows", relative(packed.run(x), want), bound
    weight = s.normal(2 * out, num_in, dtype=_dtype(s)) / num_in**0.5
    gated, x = linear.pack_gated(weight, None, "", "silu"), s.normal(17, num_in, dtype=_dtype(s))
    want = ops_linear.pack_gated(weight.double(), None, "", "silu").run(x.double())
    yield "gated linear", relative(gated.run(x), want), BOUND[_dtype(s)]


def _experts(s: Session) -> Found:
    experts, top_k, dim, inner = (4, 2, 64, 32) if s.is_smoke else (64, 8, 2048, 768)
    up = s.normal(experts, 2 * inner, dim, dtype=_dtype(s)) / dim**0.5
    down = s.normal(experts, dim, inner, dtype=_dtype(s)) / inner**0.5
    exact = ops_moe.pack_experts(up.float(), down.float(), None, None, "silu")
    spec = Moe(experts, top_k, inner, "silu", renorm=True)
    for fmt, bound in {"": 1e-2, "fp8": 0.08}.items():
        packed = moe.pack_experts(up, down, None, None, "silu", (fmt, fmt))
        for tokens in (3,) if s.is_smoke else (1, 8, 9, 64, 300, 2500):
            x = s.normal(tokens, dim, dtype=_dtype(s))
            chosen = route(s.normal(tokens, experts, dtype=_dtype(s)), None, spec)
            error = relative(packed.run(x, *chosen), exact.run(x.float(), *chosen))
            yield f"experts {fmt or 'plain'}, {tokens} tokens", error, bound


def _adapters(s: Session) -> Found:
    """Three adapters of ranks 8, 16 and 64, and rows without one, against float32."""
    num_in, num_out = (100, 60) if s.is_smoke else (4096, 6144)
    layout = LoraLayout(s.device, frozenset({0}), _dtype(s))
    parts: list[Parts] = []
    for rank in (8, 16, 64):
        a_RI, b_OR = s.normal(rank, num_in) / num_in**0.5, s.normal(num_out, rank) / rank**0.5
        parts.append({0: (LoraPart(a_RI, b_OR, 2.0),)})
    packed = [lora.TritonAdapter(one, layout) for one in parts]
    for rows in (3,) if s.is_smoke else (1, 16, 100, 1000):
        of_T = torch.arange(rows, dtype=torch.int32) % 4 - int(rows > 1)
        x, y = (s.normal(rows, width, dtype=_dtype(s)) for width in (num_in, num_out))
        want = y.float().clone()
        exact = [ops_lora.pack_adapter(one) for one in parts]
        ops_lora.lora_rows(exact, of_T, s.device).add_(0, x.float(), want)
        lora.TritonLoraRows(packed, of_T, s.device).add_(0, x, y)
        yield f"adapters, {rows} rows", relative(y, want), BOUND[_dtype(s)]


CHECKS: dict[str, Callable[[Session], Found]] = {
    "attention": _attention,
    "norms": _norms,
    "ropes": _rope,
    "gates": _gates,
    "draws": _draws,
    "products": _products,
    "experts": _experts,
    "adapters": _adapters,
}
