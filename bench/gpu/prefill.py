"""Stage 4: prompts in one step, against the operations that they need."""

from __future__ import annotations

from gpu import roofline
from gpu.decode import each_model, flags_of
from gpu.random_engine import Engine
from gpu.roofline import Shape
from gpu.session import Session
from gpu.steps import kernels_of, time_steps

# (prompts, tokens, cached tokens before them)
POINTS = ((1, 8192, 0), (8, 1024, 0), (1, 2048, 6144), (1, 128, 0))
TINY_POINTS = ((1, 64, 0), (2, 16, 0), (1, 16, 48))


def run(s: Session) -> None:
    """Measure every model that fits device and time."""
    room = ("--max-total-tokens", "16384")
    for engine, shape, weights in each_model(
        s, lambda weights: [*flags_of(s, weights, (8,)), *room]
    ):
        for point in TINY_POINTS if s.is_smoke else POINTS:
            _point(s, engine, shape, weights, *point)


def _point(
    s: Session, engine: Engine, shape: Shape, weights: str, batch: int, count: int, prefix: int
) -> None:
    where = {"model": shape.name, "weights": weights, "batch": batch, "count": count}
    enter, items = engine.enter(batch, prefix + count), engine.prompts(batch, count, prefix)
    ms = time_steps(s, engine, enter, items, 5 if count * batch > 4096 else 10).gpu_ms
    weight_bytes = 1 if weights == "fp8" else 2
    least_ms = 1e3 * roofline.prefill_s(shape, batch, count, prefix, s.ceilings, weight_bytes)
    is_goal = (batch, count, prefix) == POINTS[0]
    s.add(
        **where,
        prefix=prefix,
        gpu_ms=ms,
        tok_s=1e3 * batch * count / ms,
        roofline_ms=least_ms,
        share=least_ms / ms,
        goal=roofline.verdict(shape, weights, "prefill", least_ms / ms) if is_goal else "",
    )
    if is_goal or (batch, count, prefix) == TINY_POINTS[0]:
        found = kernels_of(s, lambda: time_steps(s, engine, enter, items, 1))
        s.add(**where, kernels=found)
