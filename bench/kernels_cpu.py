"""Every CPU kernel against what this machine can do at most, measured beside it.

    PYTHONPATH=src python bench/kernels_cpu.py [--threads 2] [--rounds 15] [--only linear,attention]

Prints for each op the best of several rounds: GB/s over the read bandwidth, or GFLOP/s over the
multiply-add rate. A ceiling is measured before every op, so that a busy machine slows both alike.
One thread is measured in seconds of CPU, which others on the machine disturb less.
Shapes: a 0.6 B model's layers (1024 channels, 16 heads, 8 KV heads, inner 3072).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from radixlm.kernels.cpu import activation, cache, describe, linear, norm
from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.extension import native

READ, FMA = 0, 1
DIM, HEADS, KV_HEADS, HEAD_DIM, INNER = 1024, 16, 8, 128, 3072


@dataclass(frozen=True, slots=True)
class Case:
    """One op: its bytes and FLOP say which ceiling bounds it."""

    name: str
    run: Callable[[], object]
    num_bytes: float
    flop: float


@dataclass(frozen=True, slots=True)
class Row:
    """One result. ``share`` is of the bounding ceiling."""

    name: str
    us: float
    gb_s: float
    gflop_s: float
    bound: str
    share: float


def linears(threads: int) -> Iterator[Case]:
    for num_out, num_in in ((4096, DIM), (2 * INNER, DIM), (DIM, INNER)):
        weight = torch.randn(num_out, num_in)
        for fmt in ("fp32", "bf16", "fp16", "int8wo", "w8a8", "int4-128", "w4a8-128"):
            packed = linear.pack(weight, None, fmt)
            for rows in (1, 4, 16, 64, 512):
                x, y = torch.randn(rows, num_in), torch.empty(rows, num_out)
                yield Case(
                    f"linear {fmt} {num_out}x{num_in} M={rows}",
                    lambda p=packed, x=x, y=y: p.run(x, y, num_threads=threads),
                    packed.num_bytes + 4 * x.numel() + 4 * y.numel(),
                    2.0 * rows * num_out * num_in,
                )


def attentions(threads: int) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        shape = cache.CacheShape(KV_HEADS, HEAD_DIM, HEAD_DIM, 16, dtype)
        for seqs, kv_len, queries in ((1, 16384, 1), (64, 1024, 1), (1, 512, 512), (1, 2048, 2048)):
            pages = kv_len // 16
            k, v = shape.allocate(seqs * pages)
            k.normal_(), v.normal_()
            layer = PagedAttention(HEADS, shape, HEAD_DIM**-0.5)
            table = torch.randperm(seqs * pages).int().view(seqs, pages)
            q = torch.randn(seqs * queries, HEADS, HEAD_DIM)
            starts = torch.arange(0, seqs * queries + 1, queries, dtype=torch.int32)
            lens = torch.full((seqs,), kv_len, dtype=torch.int32)
            seen = queries * kv_len - queries * (queries - 1) / 2
            yield Case(
                f"attention {str(dtype)[6:]} S={seqs} kv={kv_len} q={queries}",
                lambda a=(layer, q, k, v, table, starts, lens): a[0].run(
                    *a[1:], num_threads=threads
                ),
                seqs * kv_len * KV_HEADS * 2 * HEAD_DIM * dtype.itemsize,
                4.0 * seqs * seen * HEADS * HEAD_DIM,
            )


def rows_ops(threads: int) -> Iterator[Case]:
    weight = torch.randn(DIM)
    for rows in (1, 512):
        x, out = torch.randn(rows, DIM), torch.empty(rows, DIM)
        yield Case(
            f"rms_norm T={rows}", lambda x=x, o=out: norm.rms_norm(x, weight, 1e-6, out=o),
            8.0 * x.numel(), 4.0 * x.numel(),
        )  # fmt: skip
        h, act = torch.randn(rows, 2 * INNER), torch.empty(rows, INNER)
        yield Case(
            f"silu_mul T={rows}", lambda h=h, o=act: activation.silu_mul(h, o),
            12.0 * act.numel(), 25.0 * act.numel(),
        )  # fmt: skip


GROUPS = {"linear": linears, "attention": attentions, "rows": rows_ops}


def ceilings(threads: int, memory: torch.Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """(bytes/s, FLOP/s) that all threads reach now, by the clock."""
    rates = []
    for kind, address, size in ((READ, memory.data_ptr(), memory.nbytes), (FMA, 0, 100_000)):
        wall, start = time.perf_counter(), clock()
        work = native().measure(kind, address, size, threads) * (time.perf_counter() - wall)
        rates.append(work / (clock() - start))
    return rates[0], rates[1]


def measure_case(case: Case, rounds: int, threads: int, memory: torch.Tensor) -> Row:
    case.run()
    best_s, best_read, best_fma = 1e9, 0.0, 0.0
    clock = time.process_time if threads == 1 else time.perf_counter
    for _ in range(rounds):
        read, fma = ceilings(threads, memory, clock)
        best_read, best_fma = max(best_read, read), max(best_fma, fma)
        start = clock()
        case.run()
        best_s = min(best_s, clock() - start)
    byte_share = case.num_bytes / best_s / best_read
    flop_share = case.flop / best_s / best_fma
    return Row(
        case.name, best_s * 1e6, case.num_bytes / best_s / 1e9, case.flop / best_s / 1e9,
        "read" if byte_share > flop_share else "fma", max(byte_share, flop_share),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    memory = torch.ones(32 << 20)  # 128 MB
    if not options.json:
        print(describe())
    for group in options.only.split(","):
        for case in GROUPS[group](options.threads):
            row = measure_case(case, options.rounds, options.threads, memory)
            if options.json:
                print(json.dumps(asdict(row)), flush=True)
                continue
            print(
                f"{row.name:40} {row.us:10.0f} us {row.gb_s:7.1f} GB/s {row.gflop_s:7.1f} GFLOP/s"
                f"  {row.share:5.0%} of {row.bound}",
                flush=True,
            )


if __name__ == "__main__":
    main()
