"""Places that see one another are computed in one step and found in the cache whole or not."""

from __future__ import annotations

import pytest

from radixlm.wire.media import Array, Media
from tests.fakes.engine import Bench
from tests.fakes.executor import reference

PROMPT = [1 + i % 29 for i in range(50)]


def media(*runs: tuple[int, int]) -> tuple[Media, ...]:
    return tuple(Media("image", bytes(32), (run,), {}, (run,)) for run in runs)


def parts(bench: Bench, rid: str) -> list[tuple[int, int]]:
    return [
        (item.start, item.start + item.count)
        for plan in bench.executor.steps
        for item in plan.items
        if item.rid == rid and item.tokens is not None
    ]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (((3, 7), (12, 10)), [(0, 12), (12, 28), (28, 44), (44, 50)]),
        (((10, 30),), [(0, 10), (10, 40), (40, 50)]),  # more than a step's budget of 16
        (((0, 50),), [(0, 50)]),
        (((0, 16), (16, 16)), [(0, 16), (16, 32), (32, 48), (48, 50)]),
    ],
)
def test_chunks_end_beside_runs(
    runs: tuple[tuple[int, int], ...], expected: list[tuple[int, int]]
) -> None:
    bench = Bench()
    bench.submit("a", PROMPT, media=media(*runs))
    bench.run()
    assert parts(bench, "a") == expected
    assert bench.out["a"] == reference(PROMPT, 8)


@pytest.mark.parametrize(
    ("run", "hit"), [((20, 16), 20), ((21, 16), 20), ((2, 30), 0), ((4, 20), 48)]
)
def test_a_hit_ends_before_or_behind_a_run(run: tuple[int, int], hit: int) -> None:
    """The other prompt has the first half of the run, or where hit = 48 all of it, in common."""
    bench = Bench()
    other = PROMPT if hit == 48 else [*PROMPT[:28], *[30] * 20]
    bench.submit("a", other)
    bench.run()
    bench.submit("b", PROMPT, media=media(run))
    bench.run()
    assert bench.cached["b"] == hit
    assert bench.out["b"] == reference(PROMPT, 8)


def test_runs_are_checked() -> None:
    with pytest.raises(ValueError, match="empty span"):
        Media("image", bytes(32), ((0, 4),), {"x": Array("uint8", (1,), b"a")}, ((3, 0),))
