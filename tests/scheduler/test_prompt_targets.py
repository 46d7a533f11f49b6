"""Which prompt tokens get log-probabilities, when the prompt is computed in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from radixlm.scheduler.hooks import Feature
from radixlm.step.plan import Item
from radixlm.wire.requests import LogprobParams
from tests.fakes.scheduler_harness import SchedulerHarness

PROMPT = [3, 9, 4, 8, 5, 7, 6, 2, 1, 11, 12]


class Targets(Feature):
    """Position -> the target that the plan gives for it."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self.num_chunks = 0

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        for item in items:
            self.num_chunks += item.tokens is not None
            first = item.start + item.targets_at + 1
            for position, target in enumerate(() if item.targets is None else item.targets, first):
                assert position not in self.found and item.start < position
                assert position <= item.start + item.count
                self.found[position] = int(target)
        return {}


@pytest.mark.parametrize("step_tokens", [3, 4, 64])
@pytest.mark.parametrize("prompt_from", [0, 1, 2, 5, 6, 10, 11, -1])
def test_each_prompt_token_is_a_target_once(prompt_from: int, step_tokens: int) -> None:
    targets = Targets()
    bench = SchedulerHarness(features=(targets,), step_tokens=step_tokens)
    bench.submit("a", PROMPT, 2, ignore_eos=True, logprobs=LogprobParams(prompt_from))
    bench.run()
    wanted = range(max(1, prompt_from), len(PROMPT)) if prompt_from >= 0 else ()
    assert targets.found == {position: PROMPT[position] for position in wanted}
    assert (targets.num_chunks > 1) == (step_tokens < 64)
