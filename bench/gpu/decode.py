"""Stage 3: decode steps over random KV caches, without prefill, against the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from gpu import roofline
from gpu.random_engine import Engine, opened
from gpu.roofline import CONTEXT, SHAPES, TINY, Shape
from gpu.session import Session
from gpu.steps import kernels_of, time_steps
from radixlm.cuda_graphs.recorded import RecordedSteps

MODELS = (("0.6B", "bf16"), ("8B", "bf16"), ("8B", "fp8"), ("30B-A3B", "bf16"), ("30B-A3B", "fp8"))
BATCHES = (1, 8, 64, 256)
LONG = 32768
SPARE = (
    1.25  # memory besides the weights: KV of the smaller batches, and one layer while it is packed
)
# weights are drawn in 16 bits, one layer at a time, and kept in 8 bits for fp8
SECONDS = {"0.6B": 10, "8B": 15, "30B-A3B": 25}  # estimated time of a model


def shape_of(s: Session, name: str) -> Shape:
    """The published shape, or a tiny one of its kind in a smoke test."""
    return TINY[name] if s.is_smoke else SHAPES[name]


def weights_fit(s: Session, shape: Shape, weights: str) -> bool:
    """Whether the weights fit the device."""
    if s.device.type != "cuda":
        return weights == "bf16"
    total = s.record["device_facts"]["memory"]
    ffn = 3 * shape.dim * shape.inner * (shape.experts or 1)
    inner = shape.layers * (shape.mixer + ffn) * (1 if weights == "fp8" else 2)
    return bool((inner + 4 * shape.dim * shape.vocab) * SPARE < total)


def flags_of(s: Session, weights: str, batches: tuple[int, ...]) -> list[str]:
    """Server options of a measured model."""
    flags = ["--max-running-requests", str(max(batches)), "--disable-radix-cache"]
    if weights == "fp8":
        flags += ["--quantization", "fp8"]
    if s.is_smoke:
        return [*flags, "--chunked-prefill-size", "128"]
    return [*flags, "--chunked-prefill-size", "8192", "--cuda-graph-bs", *map(str, batches)]


def models_of(s: Session) -> tuple[tuple[str, str], ...]:
    """The models that a stage measures."""
    return MODELS[:2] if s.quick else MODELS


def each_model(
    s: Session, flags: Callable[[str], list[str]]
) -> Iterator[tuple[Engine, Shape, str]]:
    """Open the stage's models that fit device and time, one after another, with random caches:
    (engine, shape, weights). `flags`: server options for such weights."""
    for name, weights in models_of(s):
        shape = shape_of(s, name)
        if not weights_fit(s, shape, weights):
            s.add(model=name, weights=weights, skipped="does not fit the device")
        elif not s.is_smoke and s.left_s() < SECONDS[name]:
            s.add(model=name, weights=weights, skipped="no time is left")
        else:
            with opened(s, shape, *flags(weights)) as engine:
                engine.fill_cache()
                yield engine, shape, weights


def run(s: Session) -> None:
    """Measure every model that fits device and time."""
    batches = (1, 3) if s.is_smoke else BATCHES
    for engine, shape, weights in each_model(s, lambda weights: flags_of(s, weights, batches)):
        _model(s, engine, shape, weights, batches)


def _model(
    s: Session, engine: Engine, shape: Shape, weights: str, batches: tuple[int, ...]
) -> None:
    context = 48 if s.is_smoke else CONTEXT
    for batch in batches:
        _point(s, engine, shape, weights, batch, context)
        if batch in (1, 3, 64):
            _profile(s, engine, shape, weights, batch)
    if shape.name == "8B" and weights == "bf16":
        for batch in (1, 16) if not s.is_smoke else (1,):
            _point(s, engine, shape, weights, batch, 200 if s.is_smoke else LONG)


def _point(
    s: Session, engine: Engine, shape: Shape, weights: str, batch: int, context: int
) -> None:
    where = {"model": shape.name, "weights": weights, "batch": batch, "context": context}
    if not engine.takes(batch, context):
        s.add(**where, skipped=f"the cache holds {engine.num_tokens} tokens")
        return
    runner = engine.runner
    runner.tables.next_token.random_(0, engine.vocab)
    times = time_steps(s, engine, engine.enter(batch, context), engine.decodes(batch, context))
    replay = _replay(engine, batch)
    graph_ms = s.median_ms(replay) if replay is not None else None
    least_ms = 1e3 * roofline.decode_s(
        shape, batch, context, s.ceilings, 1 if weights == "fp8" else 2
    )
    share = least_ms / times.gpu_ms
    goal = roofline.verdict(shape, weights, batch, share) if context == CONTEXT else ""
    s.add(
        **where,
        gpu_ms=times.gpu_ms,
        graph_ms=graph_ms,
        draw_ms=times.draw_ms,
        period_ms=times.period_ms,
        host_us=times.host_us,
        tok_s=1e3 * batch / times.period_ms,
        roofline_ms=least_ms,
        share=share,
        goal=goal,
    )


def _replay(engine: Engine, batch: int) -> Callable[[], object] | None:
    """Launches the graph of a step that decodes ``batch`` sequences; None if it has none."""
    graphs = engine.runner.recorded
    if not isinstance(graphs, RecordedSteps):
        return None
    size = graphs.plain.decodes.size_for(batch)
    return partial(graphs.plain.decodes.replay, size) if size else None


def _profile(s: Session, engine: Engine, shape: Shape, weights: str, batch: int) -> None:
    """Kernels of one replay; the step's numbers stay those of the step before."""
    replay = _replay(engine, batch)
    if replay is not None:
        found = kernels_of(s, replay)
    else:
        items = engine.decodes(batch, 2)
        found = kernels_of(s, partial(time_steps, s, engine, engine.enter(batch, 2), items, 1))
    s.add(model=shape.name, weights=weights, batch=batch, kernels=found)
