"""A predicted text drafts what the output repeats of it, and is found again behind an edit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixlm.engine.features.grammar import GrammarFeature
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.speculative.drafting import Drafting
from radixlm.text.prediction import Prediction
from radixlm.wire.requests import pack_ids
from tests.engine.test_features_drafts import Bench, ends, num_computed
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness
from tests.speculative.test_drafting import oracle


def rounds(predicted: list[int], output: list[int], most: int = 4) -> int:
    """Steps in which the output is written, with drafts of at most ``most`` tokens."""
    prediction, done, count = Prediction(np.array(predicted, np.int32)), 0, 0
    while done < len(output):
        drafts = prediction.following(most)
        count += 1
        kept = 0
        while kept < len(drafts) and output[done + kept : done + kept + 1] == [drafts[kept]]:
            kept += 1
        prediction.follow(output[done : done + kept + 1])
        done += kept + 1
    return count


TEXT = [100 + i for i in range(50)]


@pytest.mark.parametrize(
    ("output", "most"),
    [
        (TEXT, 10),
        ([*TEXT[:20], 7, *TEXT[21:]], 10 + 3),  # a token replaced
        ([*TEXT[:20], 7, 8, 9, *TEXT[20:]], 10 + 6),  # tokens inserted
        ([*TEXT[:20], *TEXT[30:]], 8 + 3),  # and deleted
        ([1, 2, 3, 4, *TEXT], 10 + 6),  # reasoning before
        ([*TEXT[30:40], *TEXT[:10]], 4 + 5),  # sections in another order
    ],
)
def test_what_is_repeated_is_drafted(output: list[int], most: int) -> None:
    assert rounds(TEXT, output) <= most


def test_counts_of_accepted_tokens() -> None:
    prediction = Prediction(np.array(TEXT, np.int32))
    prediction.follow([*TEXT[:20], 7, *TEXT[23:]])
    assert prediction.num_accepted == 20 + 27 and prediction.num_seen == 48
    prediction.follow(TEXT[:30])  # a second time
    assert prediction.num_accepted == 50


def test_in_parts_or_at_once() -> None:
    rng = random.Random(3)
    for _ in range(50):
        text, output = ([rng.randint(0, 3) for _ in range(40)] for _ in range(2))
        whole, parts = (Prediction(np.array(text, np.int32)) for _ in range(2))
        whole.follow(output)
        while parts.num_seen < len(output):
            parts.follow(output[parts.num_seen :][: rng.randint(1, 4)])
        assert whole.num_accepted == parts.num_accepted <= len(text)
        assert whole.following(5) == parts.following(5)


class NoDrafter(ForcedDrafts):
    """A server without a drafter: only requests' own drafts."""

    def drafting(self, limits: Limits, kv_manager: KVCacheManager, hooks: Hooks) -> Drafting:
        return Drafting(limits, kv_manager, hooks, self)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_wrong", [0, 1, 40])
def test_a_request_with_a_prediction_takes_fewer_steps(num_wrong: int) -> None:
    prompt, count = [3, 1, 4], 40
    want = reference(prompt, count, ignore_eos=True)
    predicted = [30 - t if i < num_wrong else t for i, t in enumerate(want)]
    drafts = NoDrafter(oracle, most=4)
    harness = SchedulerHarness(drafts=drafts)
    harness.submit("a", prompt, count, ignore_eos=True, prediction=pack_ids(predicted))
    harness.run()
    assert harness.out["a"] == want
    assert len(harness.executor.steps) <= {0: 9, 1: 12, 40: count}[num_wrong]
    harness.submit("b", prompt, count, ignore_eos=True)
    num_before, num_timed = len(harness.executor.steps), len(drafts.steps)
    harness.run()
    plans = harness.executor.steps[num_before:]
    assert harness.out["b"] == want
    assert all(plan.items.drafts is None for plan in plans) and len(drafts.steps) == num_timed


def test_a_grammar_drafts_what_it_forces_without_a_drafter() -> None:
    bench = Bench("masks", True, 3)
    plain = bench.play(None)
    drafted = bench.play(NoDrafter(oracle, most=6))
    assert drafted.out == plain.out and ends(drafted) == ends(plain)
    assert num_computed(drafted) < num_computed(plain)
    assert isinstance(bench.features[0], GrammarFeature)
