"""Stage 5: whole engines without HTTP: throughput, what the device waits, what the host does."""

from __future__ import annotations

import numpy as np

from gpu.decode import SECONDS, shape_of
from gpu.drive import drive, flush, host_us, idle_share
from gpu.replica import Engine, opened
from gpu.requests import SEED, BenchRequest, requests
from gpu.roofline import MUST_HOST_US, MUST_IDLE, MUST_TOKENS_S
from gpu.session import Session


def run(s: Session) -> None:
    """The 0.6B with overlap and without, its prefix cache, and the 8B."""
    size = (6, 4, 20) if s.is_smoke else (256, 100, 1024)
    small = shape_of(s, "0.6B")
    wishes = requests(small.vocab, *size)
    limits = ["--max-running-requests", str(min(256, len(wishes)))]
    with opened(s, small, *limits) as engine:
        _load(s, engine, wishes, "overlap")
        _shared(s, engine, "cache")
    with opened(s, small, *limits, "--disable-overlap-schedule") as engine:
        _load(s, engine, wishes, "no overlap")
    with opened(s, small, *limits, "--disable-radix-cache") as engine:
        _shared(s, engine, "no cache")
    if s.is_smoke or s.left_s() > SECONDS["8B"]:
        _large(s)


def _warm(engine: Engine, wishes: list[BenchRequest]) -> None:
    drive(engine, [BenchRequest(wish.ids, min(4, wish.output)) for wish in wishes[:8]])
    flush(engine)


def _load(s: Session, engine: Engine, wishes: list[BenchRequest], way: str) -> None:
    _warm(engine, wishes)
    found = drive(engine, wishes, 2 if s.is_smoke else 32)
    assert [len(tokens) for tokens in found.tokens] == [wish.output for wish in wishes]
    flush(engine)
    # as many decodes as there may be, behind their prompts
    share = idle_share(engine, [BenchRequest(wish.ids[:256], 120) for wish in wishes], 50, 40)
    us = host_us(found, 2 if s.is_smoke else 200)
    rate = found.num_out / found.seconds
    s.add(
        what="requests", model="0.6B", way=way, requests=len(wishes), out=found.num_out,
        seconds=found.seconds, out_tok_s=rate, steps=found.num_steps, host_us=us,
        idle_by_events=found.gap_share, idle_by_profiler=share,
        goals={} if s.is_smoke else {
            "tok_s": rate >= MUST_TOKENS_S,
            "idle": None if found.gap_share is None else found.gap_share <= MUST_IDLE,
            "host": None if us is None else us <= MUST_HOST_US,
        },
    )  # fmt: skip


def _shared(s: Session, engine: Engine, way: str) -> None:
    """Groups of requests with a long prefix in common."""
    groups, each, prefix, rest, out = (2, 2, 48, 4, 3) if s.is_smoke else (32, 4, 2048, 128, 64)
    draw, wishes = np.random.default_rng(SEED + 1), list[BenchRequest]()
    starts = draw.integers(0, engine.vocab, (groups, prefix), np.int32)
    for _ in range(each):  # the members of a group do not arrive one behind another
        for start in starts:
            ids = np.concatenate([start, draw.integers(0, engine.vocab, rest, np.int32)])
            wishes.append(BenchRequest(ids, out))
    _warm(engine, wishes[:1])
    found = drive(engine, wishes)
    flush(engine)
    s.add(
        what="shared prefix", model="0.6B", way=way, groups=groups, each=each, prefix=prefix,
        seconds=found.seconds, cached_tokens=found.cached_tokens,
        prompt_tokens=sum(len(wish.ids) for wish in wishes),
    )  # fmt: skip


def _large(s: Session) -> None:
    shape, (count, num_in, out) = shape_of(s, "8B"), (3, 20, 5) if s.is_smoke else (64, 512, 256)
    draw = np.random.default_rng(SEED + 2)
    wishes = [
        BenchRequest(draw.integers(0, shape.vocab, num_in, np.int32), out) for _ in range(count)
    ]
    with opened(s, shape, "--max-running-requests", str(count)) as engine:
        _warm(engine, wishes)
        found = drive(engine, wishes, 2 if s.is_smoke else 32)
    s.add(
        what="requests", model="8B", way=f"{count} x ({num_in}, {out})", requests=count,
        out=found.num_out, seconds=found.seconds, out_tok_s=found.num_out / found.seconds,
        steps=found.num_steps, host_us=host_us(found, 1), idle_by_events=found.gap_share,
    )  # fmt: skip
