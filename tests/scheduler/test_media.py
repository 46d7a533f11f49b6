"""Bidirectional spans are computed in one step, and found in the cache as a whole or not at all."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from radixlm.wire.media import Array, Media
from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness

PROMPT = [1 + i % 29 for i in range(50)]


def media(*runs: tuple[int, int]) -> tuple[Media, ...]:
    return tuple(Media("image", bytes(32), (run,), {}, (run,)) for run in runs)


def parts(bench: SchedulerHarness, rid: str) -> list[tuple[int, int]]:
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
        (((10, 30),), [(0, 10), (10, 40), (40, 50)]),  # more than the step budget of 16
        (((0, 50),), [(0, 50)]),
        (((0, 16), (16, 16)), [(0, 16), (16, 32), (32, 48), (48, 50)]),
    ],
)
def test_chunks_end_at_span_borders(
    runs: tuple[tuple[int, int], ...], expected: list[tuple[int, int]]
) -> None:
    bench = SchedulerHarness()
    bench.submit("a", PROMPT, media=media(*runs))
    bench.run()
    assert parts(bench, "a") == expected
    assert bench.out["a"] == reference(PROMPT, 8)


@pytest.mark.parametrize(
    ("run", "hit"), [((20, 16), 20), ((21, 16), 21), ((2, 30), 2), ((4, 20), 49)]
)
def test_a_hit_ends_before_or_after_a_span(run: tuple[int, int], hit: int) -> None:
    """The other prompt has the first half of the run, or where hit = 49 all of it, in common."""
    bench = SchedulerHarness()
    other = PROMPT if hit == 49 else [*PROMPT[:28], *[30] * 20]
    bench.submit("a", other)
    bench.run()
    bench.submit("b", PROMPT, media=media(run))
    bench.run()
    assert bench.cached["b"] == hit
    assert bench.out["b"] == reference(PROMPT, 8)


def test_spans_are_validated() -> None:
    with pytest.raises(ValueError, match="empty span"):
        Media("image", bytes(32), ((0, 4),), {"x": Array("uint8", (1,), b"a")}, ((3, 0),))


def images(seed: int, *spans: tuple[int, int]) -> tuple[Media, ...]:
    """Images of different content without bidirectional spans."""
    return tuple(
        Media("image", bytes([seed, i]) + bytes(30), (span,), {}) for i, span in enumerate(spans)
    )


def begun(bench: SchedulerHarness, media: dict[str, tuple[Media, ...]]) -> list[int]:
    """The media positions that each step's chunks reach first."""
    steps, seen = [], set()
    for plan in bench.executor.steps:
        total = 0
        for item in plan.items:
            for one in media.get(item.rid, ()):
                start, count = one.spans[0]
                reached = start < item.start + item.count and item.start < start + count
                if reached and one.digest not in seen:
                    seen.add(one.digest)
                    total += count
        steps.append(total)
    return steps


def test_a_step_encodes_no_more_than_its_budget() -> None:
    """Six prompts whose images begin early: without a budget one step would reach them all."""
    media = {f"r{i}": images(i, (2, 12), (20, 9)) for i in range(6)}
    media["big"] = images(9, (1, 40))
    bench = SchedulerHarness(num_pages=200, step_tokens=16)
    prompts = {rid: [1 + (7 * i + j) % 29 for j in range(45)] for i, rid in enumerate(media)}
    for rid, prompt in prompts.items():
        bench.submit(rid, prompt, media=media[rid])
    bench.run()
    for rid, prompt in prompts.items():
        assert bench.out[rid] == reference(prompt, 8)
    steps = begun(bench, media)
    assert sum(steps) == 6 * 21 + 40
    assert max(steps) == 40 and sorted(steps)[-2] <= 16  # the large one runs alone


def whole_prompt(seed: int, num_tokens: int, *spans: tuple[int, int]) -> tuple[Media, ...]:
    """Images of a prompt whose tokens all attend to each other, as PaliGemma's do."""
    first, *others = images(seed, *spans)
    changes = {"bidirectional_spans": ((0, num_tokens),), "spans_ignore_window": True}
    return (msgspec.structs.replace(first, **changes), *others)


@pytest.mark.parametrize("spans", [((1, 12), (14, 12), (28, 12)), ((1, 30), (32, 2))])
def test_the_encoder_budget_does_not_cut_a_span(spans: tuple[tuple[int, int], ...]) -> None:
    """The second image passes the budget of 16, but its prompt has to be one step."""
    bench = SchedulerHarness(num_pages=200, step_tokens=16)
    prompts = {rid: [1 + (7 * i + j) % 29 for j in range(45)] for i, rid in enumerate("abc")}
    for i, (rid, prompt) in enumerate(prompts.items()):
        bench.submit(rid, prompt, media=whole_prompt(i, len(prompt), *spans))
    bench.run()
    for rid, prompt in prompts.items():
        assert parts(bench, rid) == [(0, 45)]
        assert bench.out[rid] == reference(prompt, 8)
    media = {rid: whole_prompt(i, 45, *spans) for i, rid in enumerate(prompts)}
    num_encoded = sum(count for _, count in spans)
    assert [n for n in begun_all(bench, media) if n] == [num_encoded] * 3  # one prompt a step


def begun_all(bench: SchedulerHarness, media: dict[str, tuple[Media, ...]]) -> list[int]:
    """Placeholders of each step's prompts, which are computed whole."""
    return [
        sum(
            one.num_placeholders
            for item in plan.items
            if item.tokens is not None
            for one in media[item.rid]
        )
        for plan in bench.executor.steps
    ]


def test_the_budget_cuts_before_a_span_of_several_images() -> None:
    first, second, third = images(1, (1, 8), (20, 8), (30, 8))
    second = msgspec.structs.replace(second, bidirectional_spans=((18, 22),))
    bench = SchedulerHarness(num_pages=200, step_tokens=44)
    bench.encoder_budget._num_tokens = 20
    bench.submit("a", PROMPT[:44], media=(first, second, third))
    bench.run()
    assert parts(bench, "a") == [(0, 18), (18, 44)]


def test_a_span_that_ignores_windows_ends_its_step() -> None:
    """After a retraction the output follows the prompt in one prefill."""
    bench = SchedulerHarness(num_pages=200, step_tokens=64)
    bench.submit("a", PROMPT, media=whole_prompt(0, 40, (1, 8)))
    bench.run()
    assert parts(bench, "a") == [(0, 40), (40, 50)]


def test_the_same_image_counts_once() -> None:
    """Two of 40 places leave no budget for a third, unless it is one of the two."""
    for third, count in ((1, 20), (2, 2)):
        bench = SchedulerHarness(num_pages=200, step_tokens=110, max_prefill_tokens=200)
        for first, seed in ((1, 0), (2, 1), (3, third)):
            bench.submit(str(first), [first, *PROMPT[1:45]], media=images(seed, (2, 40)))
        bench.run()
        assert [item.count for item in bench.executor.steps[0].items] == [45, 45, count]


def test_a_span_larger_than_the_window_pool_is_refused() -> None:
    # of 4 tokens, one is the null page
    bench = SchedulerHarness(num_pages=64, window=8, num_window=10)
    bench.submit("fits", PROMPT, media=media((4, 28)))
    bench.submit("never", [7, *PROMPT], media=media((4, 40)))
    bench.run()
    assert bench.out["fits"] == reference(PROMPT, 8)
    refused = bench.finish["never"]
    assert refused.status == 400 and "11 pages of the window layers' cache" in refused.message


@pytest.mark.parametrize("seed", [*range(8), 91, 370])  # the last two wait for each other
def test_spans_that_need_the_same_window_pages_take_turns(seed: int) -> None:
    """Each prompt holds its window and needs more for its next run than the others leave."""
    draw = Random(seed)
    bench = SchedulerHarness(
        300, window=8, num_window=draw.randint(14, 24), step_tokens=8, max_running=4
    )
    asked: dict[str, tuple[list[int], int]] = {}
    for i in range(5):
        runs, end = [], draw.randint(0, 10)
        for _ in range(3):
            runs.append((end, draw.randint(4, 32)))
            end += runs[-1][1] + draw.randint(0, 12)
        prompt = [draw.randint(1, 29) for _ in range(runs[-1][0] + runs[-1][1] + 3)]
        asked[f"r{i}"] = prompt, draw.choice([1, 8, 20])
        bench.submit(f"r{i}", prompt, asked[f"r{i}"][1], media=media(*runs))
    bench.run()
    for rid, (prompt, max_new) in asked.items():
        assert bench.out[rid] == reference(prompt, max_new)
