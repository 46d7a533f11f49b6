"""``radixlm bench kernels``: the C++ kernels beside what this machine can do at most.

The ceilings are measured in the same run, with the same threads: bytes a second of reading a
matrix much larger than the caches, and floating-point operations a second of a large product.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.bench import report
from radixlm.bench.options import Parser, positive
from radixlm.kernels.cpu import available, isa, reason
from radixlm.kernels.cpu import linear as cpu_linear
from radixlm.kernels.cpu import norm as cpu_norm
from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.cache import CacheShape
from radixlm.kernels.cpu.extension import set_num_threads

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CEILING_BYTES = 256 << 20
_CEILING_SIDE = 1536


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do: GB/s of reading, GFLOP/s in float32."""

    gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel at one shape. ``num_bytes`` must cross the memory bus at least once; shares are
    of the ceilings (above 100 % where data stay in the caches or the format is cheaper)."""

    name: str
    median_ms: float
    best_ms: float
    gb_per_s: float
    gflop_per_s: float
    share_of_bytes: float
    share_of_flops: float


@dataclass(frozen=True, slots=True)
class Case:
    """What to time: a call, the bytes that it must touch and the operations that it must do."""

    name: str
    run: Callable[[], object]
    num_bytes: float
    num_flops: float


def timed_s(run: Callable[[], object], budget_s: float) -> list[float]:
    """Seconds of each call, after one that is not counted, for about ``budget_s``; 3 at least."""
    run()
    times_s: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(times_s) < 3 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return times_s


def measure_ceilings(budget_s: float) -> Ceilings:
    """The best of several ways to read and to multiply."""
    num_floats = _CEILING_BYTES // 4
    big = torch.ones(num_floats // 4096, 4096)
    vector = torch.ones(4096)
    copy = torch.empty_like(big)
    ways: list[tuple[Callable[[], object], int]] = [
        (lambda: torch.mv(big, vector), _CEILING_BYTES),
        (lambda: big.sum(), _CEILING_BYTES),
        (lambda: copy.copy_(big), 2 * _CEILING_BYTES),
    ]
    rates = [size / min(timed_s(run, budget_s)) for run, size in ways]
    side = _CEILING_SIDE
    a, b, c = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    best_s = min(timed_s(lambda: torch.mm(a, b, out=c), budget_s))
    return Ceilings(max(rates) / 1e9, 2 * side**3 / best_s / 1e9)


def linear_cases(num_out: int, num_in: int, formats: Sequence[str]) -> Iterator[Case]:
    """A decode step alone, of a batch, and a chunk of a prompt."""
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in) * 0.02
    for fmt in formats:
        packed = cpu_linear.pack(weight, None, fmt)
        for rows in (1, 16, 512):
            x, out = torch.randn(rows, num_in), torch.empty(rows, num_out)
            yield Case(
                f"linear {fmt}, {rows} rows, {num_in} -> {num_out}",
                _linear(packed, x, out),
                packed.num_bytes + x.nbytes + out.nbytes,
                2.0 * rows * num_in * num_out,
            )


def _linear(packed: cpu_linear.PackedLinear, x: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: packed.run(x, out)


def attention_cases(shape: CacheShape, num_heads: int) -> Iterator[Case]:
    """Decoding of one and of 16 sequences, a whole prompt, and a chunk behind a long prefix."""
    for label, num_sequences, num_new, kv_len in (
        ("decode", 1, 1, 4096),
        ("decode", 16, 1, 1024),
        ("extend", 1, 512, 512),
        ("extend", 1, 256, 4096),
    ):
        name = f"attention {label}, {num_sequences} x {num_new} new of {kv_len}"
        yield _attention(name, shape, num_heads, num_sequences, num_new, kv_len)


def _attention(
    name: str, shape: CacheShape, num_heads: int, num_sequences: int, num_new: int, kv_len: int
) -> Case:
    pages_each = -(-kv_len // shape.page_size)
    k, v = shape.allocate(num_sequences * pages_each + 1)
    k.normal_()
    v.normal_()
    order = torch.randperm(num_sequences * pages_each) + 1  # pages as a busy pool gives them
    table = order.view(num_sequences, pages_each).to(torch.int32)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32) * num_new
    lengths = torch.full((num_sequences,), kv_len, dtype=torch.int32)
    q = torch.randn(num_sequences * num_new, num_heads, shape.k_dim)
    out = torch.empty(num_sequences * num_new, num_heads, shape.v_dim)
    attention = PagedAttention(num_heads, shape, scale=shape.k_dim**-0.5)
    token_bytes = shape.kv_heads * (shape.k_dim + shape.v_dim) * shape.dtype.itemsize
    seen = sum(kv_len - num_new + i + 1 for i in range(num_new)) * num_sequences
    return Case(
        name,
        lambda: attention.run(q, k, v, table, starts, lengths, out),
        float(num_sequences * kv_len * token_bytes + q.nbytes + out.nbytes),
        2.0 * seen * num_heads * (shape.k_dim + shape.v_dim),
    )


def norm_cases(width: int) -> Iterator[Case]:
    """RMS norm with the residual added, of a step and of a chunk."""
    weight = torch.ones(width)
    for rows in (1, 16, 512):
        x, residual = torch.randn(rows, width), torch.zeros(rows, width)
        out = torch.empty(rows, width)
        yield Case(
            f"add + RMS norm, {rows} x {width}",
            _norm(x, residual, weight, out),
            3.0 * x.nbytes + out.nbytes,  # x and the residual in, the residual and out back
            4.0 * x.numel(),
        )


def _norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: cpu_norm.add_rms_norm(x, residual, weight, 1e-6, out=out)


def measure(cases: Iterator[Case], ceilings: Ceilings, budget_s: float) -> list[Timing]:
    """Time each case."""
    timings = []
    for case in cases:
        times_s = timed_s(case.run, budget_s)
        best_s = min(times_s)
        gb, gflop = case.num_bytes / best_s / 1e9, case.num_flops / best_s / 1e9
        timings.append(
            Timing(
                case.name,
                statistics.median(times_s) * 1e3,
                best_s * 1e3,
                gb,
                gflop,
                gb / ceilings.gb_per_s,
                gflop / ceilings.gflop_per_s,
            )
        )
    return timings


def build_parser() -> Parser:
    """All flags."""
    parser = Parser(
        "radixlm bench kernels", "The C++ kernels beside this machine's measured ceilings."
    )
    formats = ("fp32", "bf16", "fp16", "int8wo", "w8a8", "int4-128", "w4a8-128")
    parser.add_argument(
        "--formats", nargs="+", choices=formats, default=["fp32", "bf16", "int8wo"],
        help="weight formats of the linear layers",
    )  # fmt: skip
    for name, default, text in (
        ("--hidden-size", 2048, "inputs of the linear layers, width of the norms"),
        ("--intermediate-size", 5632, "outputs of the linear layers"),
        ("--num-heads", 16, "query heads"),
        ("--num-kv-heads", 4, "KV heads"),
        ("--head-dim", 128, "channels of a head"),
        ("--page-size", 16, "tokens of a page"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)
    parser.add_argument("--cpu-threads", type=int, metavar="N", help="threads (all cores)")
    parser.add_argument(
        "--kv-dtype", choices=tuple(_DTYPES), default="bf16", help="element of the KV cache"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, metavar="X", help="time for each kernel"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output-file", metavar="FILE", help="append a line of JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """0 when all was measured; ConfigError where the extension is not built."""
    args = build_parser().parse_args(argv)
    sizes = (args.hidden_size, args.intermediate_size, args.num_heads, args.num_kv_heads)
    positive([*sizes, args.head_dim], "a size:")
    report.check_writable(args.output_file)
    if not available:
        raise ConfigError(reason)
    if args.cpu_threads is not None:
        positive([args.cpu_threads], "--cpu-threads")
        torch.set_num_threads(args.cpu_threads)
        set_num_threads(args.cpu_threads)
    try:
        heads, dim = args.num_kv_heads, args.head_dim
        shape = CacheShape(heads, dim, dim, args.page_size, _DTYPES[args.kv_dtype])
        ceilings = measure_ceilings(args.seconds)
        timings = [
            *measure(linear_cases(args.intermediate_size, args.hidden_size, args.formats),
                     ceilings, args.seconds),
            *measure(attention_cases(shape, args.num_heads), ceilings, args.seconds),
            *measure(norm_cases(args.hidden_size), ceilings, args.seconds),
        ]  # fmt: skip
    except ValueError as error:  # a size that the kernels do not have
        raise ConfigError(str(error)) from error
    result = {
        "isa": isa,
        "threads": torch.get_num_threads(),
        "ceilings": asdict(ceilings),
        "kernels": [asdict(timing) for timing in timings],
    }
    if args.output_file:
        report.append_jsonl(args.output_file, [result])
    sys.stdout.write(
        json.dumps(result, indent=2) + "\n" if args.json else render(ceilings, timings)
    )
    return 0


def render(ceilings: Ceilings, timings: Sequence[Timing]) -> str:
    """The table; rates are of the best call."""
    heading = (
        f"{isa}, {torch.get_num_threads()} threads; ceilings measured here: "
        f"{ceilings.gb_per_s:.1f} GB/s, {ceilings.gflop_per_s:.0f} GFLOP/s (float32)\n\n"
    )
    headings = ("kernel", "median ms", "best ms", "GB/s", "of ceiling", "GFLOP/s", "of ceiling")
    rows = [
        (
            t.name,
            f"{t.median_ms:.4f}",
            f"{t.best_ms:.4f}",
            f"{t.gb_per_s:.1f}",
            f"{t.share_of_bytes:.0%}",
            f"{t.gflop_per_s:.1f}",
            f"{t.share_of_flops:.0%}",
        )
        for t in timings
    ]
    return heading + report.table(headings, rows) + "\n"
