"""Stage 7: flashinfer's attention next to ours, one layer at a time on the same shapes."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from gpu.paged import Case, Heads
from gpu.session import Session, relative
from radixlm.kernels.triton.mode import interpreting

SHAPES = {
    "decode 1 x 1024": [(1, 1023)],
    "decode 64 x 1024": [(1, 1023)] * 64,
    "decode 256 x 1024": [(1, 1023)] * 256,
    "decode 16 x 32768": [(1, 32767)] * 16,
    "extend 2048 behind 6144": [(2048, 6144)],
    "extend 8 x 1024": [(1024, 0)] * 8,
}
TINY = {"decode 2 x 20": [(1, 19)] * 2, "extend 9 behind 20": [(9, 20)]}


def run(s: Session) -> None:
    """Does nothing without flashinfer; a smoke test compares two of our own backends."""
    if s.is_smoke:
        names = ["torch_native", *(["triton"] if interpreting() else [])]
    elif find_spec("flashinfer") is None:
        s.add(skipped="flashinfer is not installed")
        return
    else:
        names = ["triton", "flashinfer"]
    heads = Heads(4, 2, 16) if s.is_smoke else Heads()
    for label, shapes in (TINY if s.is_smoke else SHAPES).items():
        for name in names:
            try:
                _point(s, label, name, shapes, heads)
            except Exception as error:  # a failure of one must not hide the other
                s.add(what=label, backend=name, error=str(error)[:300])


def _point(s: Session, label: str, name: str, shapes: list[tuple[int, int]], heads: Heads) -> None:
    """GB/s of K and V for decodes, TFLOP/s of extends; the error if float64 fits."""
    case = Case(s, name, shapes, heads, torch.float32 if s.is_smoke else torch.bfloat16)
    case.begin()
    got = case.run()
    error = relative(got, case.expected()) if sum(map(sum, shapes)) <= 16384 else None
    # planned above, so that a graph may hold the launches: what the host takes is left out
    ms = s.graph_ms([case.run] * 10, 10)
    num_bytes = sum(map(sum, shapes)) * heads.kv_heads * heads.dim * 2 * 2
    pairs = sum(new * before + new * new / 2 for new, before in shapes)
    flops = 4 * pairs * heads.heads * heads.dim
    s.add(
        what=label, backend=name, us=1e3 * ms, GB_s=num_bytes / ms / 1e6, TF_s=flops / ms / 1e9,
        error=error,
    )  # fmt: skip
    del case, got
    s.free()
