"""A grammar that waits: free text until the marker that ends the reasoning, then the grammar."""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.grammar.spec import Mask, Matcher


class ReasoningMatcher:
    """A Matcher (see ``spec.Matcher``) whose inner matcher starts after ``end_ids``.

    ``end_ids`` are the token ids of the marker ("</think>"). With ``strict`` an EOS is not allowed
    before the marker; without, an output may end while it still reasons.
    """

    def __init__(
        self,
        inner: Matcher,
        end_ids: Sequence[int],
        eos_ids: frozenset[int],
        is_strict: bool = False,
    ) -> None:
        self._inner = inner
        self._end_ids = list(end_ids)
        self._eos_ids = eos_ids
        self._is_strict = is_strict
        self._free: list[int] = []  # tokens before the grammar, the marker included
        self._has_ended = False  # whether EOS came before the marker
        self._num_inner = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the marker has not come yet."""
        size = len(self._end_ids)
        return size > 0 and self._free[-size:] != self._end_ids

    @property
    def is_terminated(self) -> bool:
        """See Matcher."""
        return self._has_ended or (not self.is_reasoning and self._inner.is_terminated)

    def fill_mask(self, out: Mask) -> None:
        """See Matcher. While it reasons everything is allowed."""
        if not self.is_reasoning:
            self._inner.fill_mask(out)
            return
        out[:] = 0 if self._has_ended else -1
        bits = out.view("u4")
        for token in self._eos_ids:
            if token // 32 < len(out):
                if self._has_ended:
                    bits[token // 32] |= 1 << (token % 32)
                elif self._is_strict:
                    bits[token // 32] &= ~(1 << (token % 32)) & 0xFFFFFFFF

    def accept(self, token: int) -> bool:
        """See Matcher."""
        if self._has_ended:
            return False
        if not self.is_reasoning:
            is_accepted = self._inner.accept(token)
            self._num_inner += is_accepted
            return is_accepted
        if token in self._eos_ids:
            if self._is_strict:
                return False
            self._has_ended = True
        self._free.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See Matcher."""
        num_inner = min(num_tokens, self._num_inner)
        self._inner.rollback(num_inner)
        self._num_inner -= num_inner
        num_free = num_tokens - num_inner
        if num_free > 0:
            del self._free[-num_free:]
            self._has_ended = False

    def forced_tokens(self) -> list[int]:
        """See Matcher."""
        return [] if self.is_reasoning else self._inner.forced_tokens()

    def copy(self) -> ReasoningMatcher:
        """See Matcher."""
        twin = ReasoningMatcher(self._inner.copy(), self._end_ids, self._eos_ids, self._is_strict)
        twin._free = list(self._free)
        twin._has_ended = self._has_ended
        twin._num_inner = self._num_inner
        return twin
