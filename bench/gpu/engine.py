"""Stage 5: whole engines without HTTP: throughput, device idle time, host time."""

from __future__ import annotations

import numpy as np

from gpu.decode import SECONDS, shape_of
from gpu.random_engine import Engine, opened
from gpu.requests import SEED, BenchRequest, requests
from gpu.roofline import MUST_HOST_US, MUST_IDLE, MUST_TOKENS_S
from gpu.scheduler_run import drive, flush, host_us, idle_share
from gpu.session import Session


def run(s: Session) -> None:
    """The 0.6B model with and without overlap, its prefix cache, and the 8B model."""
    size = (6, 4, 20) if s.is_smoke else (256, 100, 1024)
    small = shape_of(s, "0.6B")
    work = requests(small.vocab, *size)
    limits = ["--max-running-requests", str(min(256, len(work)))]
    with opened(s, small, *limits) as engine:
        _load(s, engine, work, "overlap")
        _shared(s, engine, "cache")
    with opened(s, small, *limits, "--disable-overlap-schedule") as engine:
        _load(s, engine, work, "no overlap")
    with opened(s, small, *limits, "--disable-radix-cache") as engine:
        _shared(s, engine, "no cache")
    if s.is_smoke or s.left_s() > SECONDS["8B"]:
        _large(s)


def _warm(engine: Engine, work: list[BenchRequest]) -> None:
    drive(engine, [BenchRequest(request.ids, min(4, request.output)) for request in work[:8]])
    flush(engine)


def _load(s: Session, engine: Engine, work: list[BenchRequest], way: str) -> None:
    _warm(engine, work)
    found = drive(engine, work, 2 if s.is_smoke else 32)
    assert [len(tokens) for tokens in found.tokens] == [request.output for request in work]
    flush(engine)
    # the maximum number of decodes, after their prompts
    share = idle_share(engine, [BenchRequest(request.ids[:256], 120) for request in work], 50, 40)
    us = host_us(found, 2 if s.is_smoke else 200)
    rate = found.num_out / found.seconds
    s.add(
        what="requests", model="0.6B", way=way, requests=len(work), out=found.num_out,
        seconds=found.seconds, out_tok_s=rate, steps=found.num_steps, host_us=us,
        idle_by_events=found.gap_share, idle_by_profiler=share,
        goals={} if s.is_smoke else {
            "tok_s": rate >= MUST_TOKENS_S,
            "idle": None if found.gap_share is None else found.gap_share <= MUST_IDLE,
            "host": None if us is None else us <= MUST_HOST_US,
        },
    )  # fmt: skip


def _shared(s: Session, engine: Engine, way: str) -> None:
    """Groups of requests with a long common prefix."""
    groups, each, prefix, rest, out = (2, 2, 48, 4, 3) if s.is_smoke else (32, 4, 2048, 128, 64)
    draw, work = np.random.default_rng(SEED + 1), list[BenchRequest]()
    starts = draw.integers(0, engine.vocab, (groups, prefix), np.int32)
    for _ in range(each):  # requests of a group do not arrive one after another
        for start in starts:
            ids = np.concatenate([start, draw.integers(0, engine.vocab, rest, np.int32)])
            work.append(BenchRequest(ids, out))
    _warm(engine, work[:1])
    found = drive(engine, work)
    flush(engine)
    s.add(
        what="shared prefix", model="0.6B", way=way, groups=groups, each=each, prefix=prefix,
        seconds=found.seconds, cached_tokens=found.cached_tokens,
        prompt_tokens=sum(len(request.ids) for request in work),
    )  # fmt: skip


def _large(s: Session) -> None:
    shape, (count, num_in, out) = shape_of(s, "8B"), (3, 20, 5) if s.is_smoke else (64, 512, 256)
    draw = np.random.default_rng(SEED + 2)
    work = [
        BenchRequest(draw.integers(0, shape.vocab, num_in, np.int32), out) for _ in range(count)
    ]
    with opened(s, shape, "--max-running-requests", str(count)) as engine:
        _warm(engine, work)
        found = drive(engine, work, 2 if s.is_smoke else 32)
    s.add(
        what="requests", model="8B", way=f"{count} x ({num_in}, {out})", requests=count,
        out=found.num_out, seconds=found.seconds, out_tok_s=found.num_out / found.seconds,
        steps=found.num_steps, host_us=host_us(found, 1), idle_by_events=found.gap_share,
    )  # fmt: skip
