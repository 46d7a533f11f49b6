"""Matrix products and experts on a GPU, each next to its alternatives.

    PYTHONPATH=src python bench/gpu_gemm.py [--budget 120] [--out gemm.json] [--only formats]

formats   every weight format beside bfloat16, 1 to 4,096 rows; errors against float32
experts   Qwen3-30B-A3B's experts: the three ways at 1 to 4,096 tokens, GB/s of the experts read
tiles     the same at 64 to 1,024 tokens with other tiles than ``gemm.TABLES`` would take

Times are medians of graph replays between events, over weights that do not fit the cache. Under
TRITON_INTERPRET=1 on a CPU everything runs once in tiny shapes: a test of this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixlm.kernels.triton import gemm, linear, moe
from radixlm.kernels.triton.mode import interpreting
from radixlm.kernels.triton.moe_align import align

DEVICE = torch.device("cpu" if interpreting() else "cuda")
DTYPE = torch.float32 if interpreting() else torch.bfloat16
REPLAYS, WARM = 20, 3
CACHE_BYTES = 256 << 20  # bytes of the weights that are used in turn
DENSE: tuple[tuple[int, int], ...] = (
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (6144, 4096),
    (4096, 14336),
)
FORMATS = ("", "fp8", "fp8-128", "int8wo", "w8a8", "int4-128")

if interpreting():
    DENSE, REPLAYS, WARM, CACHE_BYTES = ((64, 128),), 1, 0, 1


def microseconds(runs: Sequence[Callable[[], object]]) -> float:
    """Median time of one of `runs`, replayed one after another from one graph."""
    if interpreting():
        began = time.perf_counter()
        runs[0]()
        return (time.perf_counter() - began) * 1e6
    for run in runs[:WARM]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(REPLAYS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    return float(statistics.median(times))


def copies(num_bytes: int) -> int:
    """Weights of `num_bytes` whose sum exceeds the cache."""
    return max(1, min(64, -(-CACHE_BYTES // num_bytes)))


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_()


def bench_formats() -> Iterator[dict[str, Any]]:
    for num_out, num_in in DENSE[-2:]:
        weight = normal(num_out, num_in) / num_in**0.5
        for fmt in FORMATS:
            first = linear.pack_linear(weight, None, fmt)
            packed = [first] + [
                linear.pack_linear(weight, None, fmt) for _ in range(copies(num_out * num_in) - 1)
            ]
            for rows in (1, 3) if interpreting() else (1, 16, 64, 256, 1024, 4096):
                x = normal(rows, num_in)
                want = x.float() @ weight.float().T
                error = float((first.run(x).float() - want).norm() / want.norm())
                spent = microseconds([partial(p.run, x) for p in packed])
                yield {"N": num_out, "K": num_in, "rows": rows, "fmt": fmt or "bf16",
                       "us": spent, "error": error,
                       "tflops": 2e-6 * rows * num_out * num_in / spent}  # fmt: skip


def experts(fmt: str) -> tuple[moe.TritonExperts, int, int, int]:
    """(experts, their number, experts per token, channels)."""
    count, top_k, dim, inner = (4, 2, 64, 32) if interpreting() else (128, 8, 2048, 768)
    up, down = normal(count, 2 * inner, dim) / dim**0.5, normal(count, dim, inner) / inner**0.5
    packed = moe.pack_experts(up, down, None, None, "silu", (fmt, fmt))
    assert isinstance(packed, moe.TritonExperts)
    return packed, count, top_k, dim


def choices(tokens: int, count: int, top_k: int) -> tuple[Tensor, Tensor]:
    scores = torch.rand(tokens, count, device=DEVICE)
    weights, ids = scores.topk(top_k)
    return weights / weights.sum(-1, keepdim=True), ids


def bench_experts() -> Iterator[dict[str, Any]]:
    for fmt in ("", "fp8", "fp8-128"):
        packed, count, top_k, dim = experts(fmt)
        size = packed.up.data[0].nbytes + packed.down.data[0].nbytes
        for tokens in (1, 9) if interpreting() else (1, 2, 4, 8, 16, 64, 256, 1024, 2048, 4096):
            x, chosen = normal(tokens, dim), choices(tokens, count, top_k)
            ways: dict[str, Callable[..., Tensor]] = {"sorted": packed.run_sorted}
            if tokens <= 16:
                ways["few"] = packed.run_few
            if not fmt and tokens >= 256:
                ways["grouped_mm"] = packed.run_grouped_mm
            read = len(set(chosen[1].flatten().tolist())) * size
            for name, way in ways.items():
                spent = microseconds([partial(way, x, *chosen)])
                yield {"fmt": fmt or "bf16", "tokens": tokens, "way": name, "us": spent,
                       "GB_s": read / spent / 1e3}  # fmt: skip


def bench_tiles() -> Iterator[dict[str, Any]]:
    packed, count, top_k, dim = experts("")
    sizes = (16,) if interpreting() else (64, 128, 256, 512, 1024)
    tiles = [
        gemm.Tile(m, n, k, warps, stages, turn)
        for m, n, k in ((16, 64, 64), (16, 64, 128), (16, 128, 128), (32, 64, 128), (32, 128, 64),
                        (64, 64, 64), (64, 128, 64), (128, 128, 64), (128, 256, 64))
        for warps in ((8,) if m == 128 else (4, 8))
        for stages in (3, 4)
        for turn in (1, 8)
        if (m + n) * k * 2 * stages <= 220 * 1024
    ]  # fmt: skip
    for tokens in sizes:
        x, (_, ids) = normal(tokens, dim), choices(tokens, count, top_k)
        out = x.new_empty(tokens * top_k, packed.up.width)
        for tile in tiles[:1] if interpreting() else tiles:
            aligned = align(ids, count, tile.m)
            run = partial(gemm.product_by_expert, x, packed.up, aligned, tile, out, top_k=top_k)
            yield {"tokens": tokens, "tile": str(tile), "us": microseconds([run])}


def main() -> None:
    stages = {
        "formats": bench_formats,
        "experts": bench_experts,
        "tiles": bench_tiles,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=stages)
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    results: dict[str, list[dict[str, Any]]] = {}
    for name, stage in stages.items():
        if options.only not in (None, name):
            continue
        rows = results.setdefault(name, [])
        for row in stage():
            rows.append(row)
            print(name, json.dumps(row), flush=True)
            if time.monotonic() > end:
                break
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
