"""Free until the marker, then the grammar; rolled back across the marker and forward again."""

from __future__ import annotations

import numpy as np
import pytest

from radixlm.grammar.reasoning import ReasoningMatcher
from radixlm.grammar.spec import Mask

EOS = 9


class Exactly:
    """A toy grammar: tokens 1, 2, EOS in this order."""

    order = (1, 2, EOS)

    def __init__(self, position: int = 0) -> None:
        self.position = position

    @property
    def is_terminated(self) -> bool:
        return self.position == 3

    def fill_mask(self, out: Mask) -> None:
        out[:] = 0
        out[0] = 1 << self.order[min(self.position, 2)]

    def accept(self, token: int) -> bool:
        ok = self.position < 3 and token == self.order[self.position]
        self.position += ok
        return ok

    def rollback(self, num_tokens: int) -> None:
        self.position -= num_tokens

    def forced_tokens(self) -> list[int]:
        return [] if self.is_terminated else [self.order[self.position]]

    def copy(self) -> Exactly:
        return Exactly(self.position)


def mask(matcher: ReasoningMatcher) -> int:
    out = np.zeros(1, dtype=np.int32)
    matcher.fill_mask(out)
    return int(out.view(np.uint32)[0])


ALL = 0xFFFFFFFF


@pytest.mark.parametrize("end_ids", [[5], [5, 6]])
def test_the_grammar_starts_after_the_marker(end_ids: list[int]) -> None:
    matcher = ReasoningMatcher(Exactly(), end_ids, frozenset({EOS}))
    tokens = [1, 1, 7, *end_ids, 1, 2, EOS]
    masks = []
    for token in tokens:
        masks.append(mask(matcher))
        assert matcher.accept(token)
    masks.append(mask(matcher))
    assert masks == [ALL] * (3 + len(end_ids)) + [2, 4, 1 << EOS, 1 << EOS]
    assert matcher.is_terminated
    for target in (0, 4, len(tokens) - 1, 3, len(tokens)):
        twin = matcher.copy()
        twin.rollback(len(tokens) - target)
        assert mask(twin) == masks[target]
        assert twin.is_terminated == (target == len(tokens))
        assert all(twin.accept(token) for token in tokens[target:])
        assert mask(twin) == masks[-1]


def test_an_output_may_end_while_it_reasons_unless_strict() -> None:
    free = ReasoningMatcher(Exactly(), [5], frozenset({EOS}))
    assert free.accept(3)
    assert free.accept(EOS)
    assert free.is_terminated
    assert mask(free) == 1 << EOS
    assert not free.accept(3)
    free.rollback(1)
    assert not free.is_terminated
    assert mask(free) == ALL
    strict = ReasoningMatcher(Exactly(), [5], frozenset({EOS}), is_strict=True)
    assert mask(strict) == ALL & ~(1 << EOS)
    assert not strict.accept(EOS)


def test_without_a_marker_the_grammar_starts_at_once() -> None:
    matcher = ReasoningMatcher(Exactly(), [], frozenset({EOS}))
    assert mask(matcher) == 2
    assert matcher.forced_tokens() == [1]
    assert not matcher.accept(2)
