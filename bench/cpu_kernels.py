"""The C++ kernels against the measured ceilings of this machine.

    python bench/cpu_kernels.py --formats bf16 w8a8

The ceilings are measured in the same run, before and after every kernel and with the same threads,
so that a busy machine slows both: bytes a second of reading a vector much larger than the caches,
operations a second of float32 multiply-adds, of int8 products, and of bfloat16 pairs where the
instruction set has them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from cpu_ceilings import Ceilings, large_memory, measure_ceilings
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.bench import report
from radixlm.bench.cli import run
from radixlm.bench.options import positive
from radixlm.config.verb_parser import VerbParser
from radixlm.kernels.cpu import available, isa, reason
from radixlm.kernels.cpu import linear as cpu_linear
from radixlm.kernels.cpu import lora as cpu_lora
from radixlm.kernels.cpu import norm as cpu_norm
from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.cache import CacheShape
from radixlm.kernels.cpu.extension import set_num_threads
from radixlm.kernels.cpu.moe import Experts
from radixlm.kernels.ops.lora import LoraPart

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("fp32", "bf16", "fp16", "int8wo", "w8a8", "int4-128", "w4a8-128")
_MEMORY_BYTES = 256 << 20
_WEIGHT_BYTES = 96 << 20  # of copies that are read in turn, so that no cache has the next one
_CHOICES = 64  # different sets of experts, so that no cache has the next one


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel at one shape. `num_bytes` must cross the memory bus at least once. Shares are of
    the ceilings measured around it (above 100 % if data stay in the caches or float32 does not
    limit the arithmetic)."""

    name: str
    arithmetic: str
    median_ms: float
    best_ms: float
    gb_per_s: float
    gflop_per_s: float
    share_of_bytes: float
    share_of_flops: float
    ceilings: Ceilings


@dataclass(frozen=True, slots=True)
class Case:
    """What to time: a call, the bytes and operations it needs, and the unit of its arithmetic
    ("fp32", "int8", or pairs of "bf16")."""

    name: str
    run: Callable[[], object]
    num_bytes: float
    num_flops: float
    arithmetic: str = "fp32"


def timed_s(run: Callable[[], object], budget_s: float) -> list[float]:
    """Seconds of each call for about `budget_s`, at least 3 calls, after one warm-up call."""
    run()
    times_s: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(times_s) < 3 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return times_s


def arithmetic_of(packed: cpu_linear.PackedLinear) -> str:
    """The arithmetic unit that multiplies many rows of this weight on this machine."""
    if packed.rounds_inputs:
        return "bf16"
    return "int8" if packed.byte_products else "fp32"


def linear_cases(num_out: int, num_in: int, formats: Sequence[str]) -> Iterator[Case]:
    """A decode step of one request, of a few rows (drafts), of a batch, and chunks of prompts.
    Activations of 16 bits are two bytes, so their products count twice."""
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in) * 0.02
    for fmt in formats:
        packed = cpu_linear.pack(weight, None, fmt)
        copies = [packed]
        while len(copies) * packed.num_bytes < _WEIGHT_BYTES:
            copies.append(cpu_linear.pack(weight, None, fmt))
        for rows in (1, 4, 8, 16, 64, 512):
            x, out = torch.randn(rows, num_in), torch.empty(rows, num_out)
            yield Case(
                f"linear {fmt}, {rows} rows, {num_in} -> {num_out}",
                _linear(itertools.cycle(copies), x, out),
                packed.num_bytes + x.nbytes + out.nbytes,
                2.0 * rows * num_in * num_out * max(1, packed.byte_products),
                arithmetic_of(packed),
            )


def _linear(
    turn: Iterator[cpu_linear.PackedLinear], x: Tensor, out: Tensor
) -> Callable[[], object]:
    return lambda: next(turn).run(x, out)


def attention_cases(shape: CacheShape, num_heads: int) -> Iterator[Case]:
    """Decodes of 1 and 64 sequences, drafts, whole prompts, and a chunk behind a long prefix."""
    for label, num_sequences, num_new, kv_len in (
        ("decode", 1, 1, 16384),
        ("decode", 64, 1, 1024),
        ("decode", 1, 4, 2048),
        ("extend", 1, 512, 512),
        ("extend", 1, 2048, 2048),
        ("extend", 1, 256, 4096),
    ):
        kind = "latents" if shape.is_latent else "attention"
        name = f"{kind} {label}, {num_sequences} x {num_new} new of {kv_len}"
        yield _attention(name, shape, num_heads, num_sequences, num_new, kv_len)


def _attention(
    name: str, shape: CacheShape, num_heads: int, num_sequences: int, num_new: int, kv_len: int
) -> Case:
    pages_each = -(-kv_len // shape.page_size)
    k, v = shape.allocate(num_sequences * pages_each + 1)
    k.normal_()
    v.normal_()
    # pages in random order, as in a busy pool
    order = torch.randperm(num_sequences * pages_each) + 1
    table = order.view(num_sequences, pages_each).to(torch.int32)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32) * num_new
    lengths = torch.full((num_sequences,), kv_len, dtype=torch.int32)
    q = torch.randn(num_sequences * num_new, num_heads, shape.k_dim)
    out = torch.empty(num_sequences * num_new, num_heads, shape.v_dim)
    attention = PagedAttention(num_heads, shape, scale=shape.k_dim**-0.5)
    own_values = 0 if shape.is_latent else shape.v_dim
    token_bytes = shape.kv_heads * (shape.k_dim + own_values) * shape.dtype.itemsize
    seen = sum(kv_len - num_new + i + 1 for i in range(num_new)) * num_sequences
    return Case(
        name,
        lambda: attention.run(q, k, v, table, starts, lengths, out),
        float(num_sequences * kv_len * token_bytes + q.nbytes + out.nbytes),
        2.0 * seen * num_heads * (shape.k_dim + shape.v_dim),
        "bf16" if attention.rounds_inputs else "fp32",
    )


def expert_cases(shape: tuple[int, int, int, int], formats: Sequence[str]) -> Iterator[Case]:
    """One layer of (experts, experts per token, width, inner width): decode steps of 1 and 16
    tokens. Bytes are those of the experts that are read."""
    num_experts, top_k, dim, inner = shape
    up, down = torch.randn(2 * inner, dim) * 0.02, torch.randn(dim, inner) * 0.02
    for fmt in formats:
        ups = [cpu_linear.pack(up, None, fmt, is_paired=True) for _ in range(num_experts)]
        downs = [cpu_linear.pack(down, None, fmt) for _ in range(num_experts)]
        experts = Experts(ups, downs, "silu")
        for rows in (1, 16):
            order = torch.rand(_CHOICES, rows, num_experts).argsort(-1)
            choices = order[:, :, :top_k].int().contiguous()
            read = statistics.mean(len(set(ids.flatten().tolist())) for ids in choices)
            yield Case(
                f"experts {fmt}, {rows} rows, {top_k} of {num_experts}, {dim} -> {inner}",
                _experts(experts, torch.randn(rows, dim), choices),
                read * (ups[0].num_bytes + downs[0].num_bytes),
                2.0 * rows * top_k * 3 * dim * inner * max(1, downs[0].byte_products),
                arithmetic_of(downs[0]),
            )


def _experts(experts: Experts, x: Tensor, choices: Tensor) -> Callable[[], object]:
    weights = torch.full(choices.shape[1:], 1.0 / choices.shape[2])
    turn = itertools.cycle(choices)
    return lambda: experts.run(x, weights, next(turn))


def lora_cases(num_out: int, num_in: int, rank: int) -> Iterator[Case]:
    """What bfloat16 adapters add to a layer: decode steps with one shared adapter, with one adapter
    each and with 16 requests an adapter; and a chunk of a prompt."""
    each = rank * (num_in + num_out)
    count = max(16, _MEMORY_BYTES // (each * torch.bfloat16.itemsize))
    a, b = (torch.full(s, 0.01, dtype=torch.bfloat16) for s in ((rank, num_in), (num_out, rank)))
    adapters = [
        cpu_lora.NativeAdapter({0: (LoraPart(a.clone(), b.clone(), 1.0),)}) for _ in range(count)
    ]
    for rows, used in ((1, 1), (16, 16), (64, 4), (512, 1)):
        order = torch.arange(rows, dtype=torch.int32) % used
        steps = [
            cpu_lora.NativeLoraRows(adapters[first : first + used], order)
            for first in range(0, count - used + 1, used)
        ]
        x, y = torch.randn(rows, num_in), torch.zeros(rows, num_out)
        yield Case(
            f"lora, {rows} rows of {used} adapters of rank {rank}, {num_in} to {num_out}",
            _add(x, y, itertools.cycle(steps)),
            float(used * each * 2 + x.nbytes + 2 * y.nbytes),
            2.0 * rows * each,
        )


def _add(x: Tensor, y: Tensor, steps: Iterator[cpu_lora.NativeLoraRows]) -> Callable[[], object]:
    return lambda: next(steps).add_(0, x, y)


def norm_cases(width: int) -> Iterator[Case]:
    """RMS norm with the residual added, of a decode step and of a chunk."""
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


def measure(
    cases: Iterable[Case], memory: Tensor, num_threads: int, budget_s: float
) -> list[Timing]:
    """Time each case, and the ceilings before and after it."""
    timings = []
    for case in cases:
        before = measure_ceilings(memory, num_threads, budget_s / 4)
        times_s = timed_s(case.run, budget_s)
        ceilings = before.best(measure_ceilings(memory, num_threads, budget_s / 4))
        best_s = min(times_s)
        gb, gflop = case.num_bytes / best_s / 1e9, case.num_flops / best_s / 1e9
        shares = gb / ceilings.gb_per_s, gflop / ceilings.rate(case.arithmetic)
        median_ms = statistics.median(times_s) * 1e3
        timings.append(
            Timing(
                case.name, case.arithmetic, median_ms, best_s * 1e3, gb, gflop, *shares, ceilings
            )
        )
    return timings


def build_parser() -> VerbParser:
    """All flags."""
    parser = VerbParser(
        "python bench/cpu_kernels.py", "The C++ kernels against this machine's measured ceilings."
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=["fp32", "bf16", "int8wo", "w8a8"],
        help="weight formats of the linear layers; those of 8 and 4 bits also of the experts",
    )  # fmt: skip
    for name, default, text in (
        ("--hidden-size", 2048, "inputs of the linear layers, width of the norms"),
        ("--intermediate-size", 5632, "outputs of the linear layers"),
        ("--num-heads", 16, "query heads"),
        ("--num-kv-heads", 4, "KV heads"),
        ("--head-dim", 128, "channels of a head"),
        ("--latent-rank", 512, "numbers of a latent (0: none are measured)"),
        ("--latent-rope-dim", 64, "rotated channels behind a latent"),
        ("--page-size", 16, "tokens of a page"),
        ("--num-experts", 128, "experts of a layer (0: none are measured)"),
        ("--experts-per-token", 8, "experts that a token uses"),
        ("--moe-intermediate-size", 768, "inner width of an expert"),
        ("--lora-rank", 16, "rank of adapters (0: none are measured)"),
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
    """0 when all is measured. ConfigError if the extension is not built."""
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
    threads = torch.get_num_threads()
    try:
        heads, dim = args.num_kv_heads, args.head_dim
        shape = CacheShape(heads, dim, dim, args.page_size, _DTYPES[args.kv_dtype])
        memory = large_memory(_MEMORY_BYTES)
        timings = measure(
            itertools.chain(
                linear_cases(args.intermediate_size, args.hidden_size, args.formats),
                attention_cases(shape, args.num_heads),
                _wanted_latents(args),
                _wanted_experts(args),
                _wanted_adapters(args),
                norm_cases(args.hidden_size),
            ),
            memory, threads, args.seconds,
        )  # fmt: skip
        alone = measure_ceilings(memory, 1, args.seconds)
    except ValueError as error:  # a size that no kernel supports
        raise ConfigError(str(error)) from error
    ceilings = functools.reduce(Ceilings.best, (timing.ceilings for timing in timings))
    result = {
        "isa": isa,
        "threads": threads,
        "ceilings": asdict(ceilings),
        "ceilings_of_a_thread": asdict(alone),
        "kernels": [asdict(timing) for timing in timings],
    }
    if args.output_file:
        report.append_jsonl(args.output_file, [result])
    sys.stdout.write(
        json.dumps(result, indent=2) + "\n"
        if args.json
        else render(threads, ceilings, alone, timings)
    )
    return 0


def _wanted_latents(args: argparse.Namespace) -> Iterator[Case]:
    if not args.latent_rank:
        return iter(())
    positive([args.latent_rank], "a size:")
    if args.latent_rope_dim < 0:
        raise ConfigError("--latent-rope-dim is less than 0")
    row, page_size, dtype = args.latent_rank + args.latent_rope_dim, args.page_size, args.kv_dtype
    shape = CacheShape(1, row, args.latent_rank, page_size, _DTYPES[dtype], is_latent=True)
    return attention_cases(shape, args.num_heads)


def _wanted_experts(args: argparse.Namespace) -> Iterator[Case]:
    if not args.num_experts:
        return iter(())
    positive([args.experts_per_token, args.moe_intermediate_size], "a size:")
    if args.experts_per_token > args.num_experts:
        raise ConfigError("--experts-per-token is more than --num-experts")
    shape = (args.num_experts, args.experts_per_token, args.hidden_size, args.moe_intermediate_size)
    return expert_cases(shape, [fmt for fmt in args.formats if "8" in fmt or "4" in fmt])


def _wanted_adapters(args: argparse.Namespace) -> Iterator[Case]:
    if not args.lora_rank:
        return iter(())
    positive([args.lora_rank], "--lora-rank")
    return lora_cases(args.intermediate_size, args.hidden_size, args.lora_rank)


def _ceilings_line(num_threads: int, ceilings: Ceilings) -> str:
    bf16, int8 = ceilings.bf16_gflop_per_s, ceilings.int8_gop_per_s
    pairs = f", {bf16:.0f} in bfloat16" if bf16 else ""
    return (
        f"{num_threads} thread{'s' if num_threads > 1 else ''}: {ceilings.gb_per_s:.1f} GB/s, "
        f"GFLOP/s {ceilings.fp32_gflop_per_s:.0f} in float32{pairs}, {int8:.0f} of int8\n"
    )


def render(num_threads: int, ceilings: Ceilings, alone: Ceilings, timings: Sequence[Timing]) -> str:
    """The table. Rates are of the best call; the last column names the ceiling."""
    heading = f"{isa}; ceilings measured here, with {_ceilings_line(num_threads, ceilings)}"
    if num_threads > 1:
        heading += f"with {_ceilings_line(1, alone)}"
    headings = (
        "kernel", "median ms", "best ms", "GB/s", "of ceiling", "GFLOP/s", "of ceiling", "unit",
    )  # fmt: skip
    rows = [
        (
            t.name,
            f"{t.median_ms:.4f}",
            f"{t.best_ms:.4f}",
            f"{t.gb_per_s:.1f}",
            f"{t.share_of_bytes:.0%}",
            f"{t.gflop_per_s:.1f}",
            f"{t.share_of_flops:.0%}",
            t.arithmetic,
        )
        for t in timings
    ]
    return f"{heading}\n{report.table(headings, rows)}\n"


if __name__ == "__main__":
    sys.exit(run("bench/cpu_kernels.py", main, sys.argv[1:]))
