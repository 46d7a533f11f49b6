"""GrammarState: where the output of one constrained request stands in its grammar, and walks along
tokens that are not known yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import InvalidRequest, RequestError
from radixlm.scheduler.request import Request
from radixlm.step.masks import Mask

if TYPE_CHECKING:
    from radixlm.grammar.compile import GrammarFuture
    from radixlm.grammar.spec import Matcher


class GrammarState:
    """Of one constrained request: first a ticket, then a matcher.

    ``vocab``: tokens that have logits. ``jumps``: forced tokens are appended unsampled.
    ``token_bytes``: of a token, where a marker before the grammar is looked for."""

    __slots__ = (
        *("after", "committed", "error", "errors", "forced", "jumps", "matcher", "pending"),
        *("request", "tail", "takes_drafts", "ticket", "token_bytes", "vocab", "walk"),
    )

    def __init__(
        self,
        request: Request,
        ticket: GrammarFuture,
        jumps: bool,
        vocab: int,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self.request, self.ticket, self.jumps = request, ticket, jumps
        self.vocab, self.token_bytes = vocab, token_bytes
        self.matcher: Matcher | None = None
        self.takes_drafts = True
        self.error: RequestError | None = None  # a grammar can prove too complex while it runs
        # by the tokens before one that is being sampled: what must follow it, and why it cannot be
        # sampled (the first one's is ``error``); which of the tokens were committed
        self.forced: dict[tuple[int, ...], list[int]] = {}
        self.errors: dict[tuple[int, ...], RequestError] = {}
        self.committed: tuple[int, ...] = ()
        self.walk: Walk | None = None  # that the matcher has not come back from

    def start(self) -> None:
        """Make a matcher; InvalidRequest for a grammar that was refused."""
        after = self.request.wire.grammar.after if self.request.wire.grammar else None
        self.after = after.encode() if after else None  # None: the grammar has begun
        self.tail = b""  # the last bytes, in which the marker is looked for
        self.pending: list[int] = self.request.whole_output.tolist()  # not shown to the matcher
        self.walk = None
        self.matcher = self.ticket.matcher()

    def begin_step(self) -> None:
        """Forget what is known of the tokens of the last step."""
        self.forced, self.errors, self.committed = {}, {}, ()

    def advance(self) -> None:
        """Show the matcher what has become known."""
        assert self.matcher is not None
        if self.walk is not None:
            self.walk.back()
        pending, self.pending = self.pending, []
        for token in pending:
            if self.after is not None:
                self._look_for_marker(token)
            elif not self.matcher.is_terminated and not self.matcher.accept(token):
                raise InvalidRequest(f"token {token} does not fit the grammar", param="grammar")

    def step(self, token: int) -> int | None:
        """Go one token ahead; how many the matcher accepted, None if the token is refused."""
        assert self.matcher is not None
        if self.after is not None:
            self._look_for_marker(token)
            return 0
        return 1 if not self.matcher.is_terminated and self.matcher.accept(token) else None

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next."""
        assert self.matcher is not None
        return self.matcher.forced_tokens() if self.after is None else []

    def fill(self, row: Mask) -> list[int]:
        """Write the mask of the next token; what must follow that. A forced token is alone in the
        mask also where it is sampled: log-probabilities, say, change no token."""
        matcher = self.matcher
        assert matcher is not None
        if matcher.masks_forced:
            matcher.fill_mask(row)
            if not self.jumps or not allows_one(row):
                return []
        forced = matcher.forced_tokens()
        if forced and forced[0] < self.vocab:
            allow_alone(row, forced[0])
            return forced[1:] if self.jumps else []
        if not matcher.masks_forced:
            matcher.fill_mask(row)
        return []

    def fail(self, path: tuple[int, ...], error: RequestError) -> bool:
        """The matcher has failed behind these tokens, and the request with it once they are
        committed. False where an earlier walk has got on there."""
        is_first = path not in self.forced
        if is_first and not path:
            self.error = error
            return True
        if is_first:
            self.errors[path] = error
        self.takes_drafts = False  # a matcher that failed cannot go back
        self.start()
        return is_first

    def _look_for_marker(self, token: int) -> None:
        assert self.after is not None
        self.tail += self.token_bytes(token)
        if self.after in self.tail:
            self.after = None
        else:
            self.tail = self.tail[-len(self.after) :]


class Walk:
    """Along tokens that are not committed, drafts or those that a step decodes in turn, and back.
    ``path``: the tokens so far."""

    def __init__(self, state: GrammarState) -> None:
        self.state, self.path = state, tuple[int, ...]()
        self._start = state.after, state.tail
        self._num_accepted = 0
        self._carried: list[int] = []  # what must come next, as an earlier mask has decided
        state.walk = self

    def go(self, token: int) -> bool:
        """One token on; False if the grammar refuses it."""
        before, self.path = self.path, (*self.path, token)
        num_accepted = self.state.step(token)
        if num_accepted is None:
            self.path = before
            return False
        self._num_accepted += num_accepted
        return True

    def fill(self, row: Mask) -> None:
        """Write the mask of the token that comes next."""
        if self._carried:
            allow_alone(row, self._carried[0])
            self._carried = self._carried[1:]
        elif self.state.after is None:
            self._carried = self.state.fill(row)
        self.state.forced[self.path] = self._carried

    def back(self) -> None:
        """The matcher is where it began."""
        state = self.state
        if state.walk is self:
            state.walk = None
            if self._num_accepted:
                assert state.matcher is not None
                state.matcher.rollback(self._num_accepted)
            state.after, state.tail = self._start


def fill_along(state: GrammarState, drafts: Sequence[int], rows: Mask) -> None:
    """Write the masks of the next token, and of those after each draft. Without drafts the walk
    stays open, for tokens that follow. An error is kept until what is before it is committed."""
    walk = None
    try:
        state.advance()
        walk = Walk(state)
        walk.fill(rows[0])
        for row, token in zip(rows[1:], drafts, strict=True):
            if not walk.go(token):
                break
            walk.fill(row)
        if drafts:
            walk.back()
    except RequestError as error:
        path = () if walk is None else walk.path
        if not state.fail(path, error):  # this path ends where it failed
            for row, token in zip(rows[len(path) :], (*drafts[len(path) :], 0), strict=True):
                allow_alone(row, (token + 1) % state.vocab)


class GrammarFollower:
    """``Masks.follow`` of rows with a grammar: the open walks go on with what a step samples."""

    def __init__(self, walks: Mapping[int, Walk], more_N: NDArray[np.int32]) -> None:
        """``walks`` by row; ``more_N``: further tokens of each row of the step."""
        self._walks = {row: walk for row, walk in walks.items() if more_N[row]}
        self._more_N = more_N
        self.rows = tuple(walks)

    def __call__(self, tokens_N: Sequence[int], masks_NW: Mask) -> None:
        """See ``Masks.follow``."""
        for row, walk in list(self._walks.items()):
            mask, token = masks_NW[row], tokens_N[row]
            mask[:] = 0
            is_over = len(walk.path) + 1 == self._more_N[row]
            try:
                if walk.go(token):
                    walk.fill(mask)
                else:  # the output was complete before it
                    is_over = True
            except RequestError as error:
                walk.state.fail(walk.path, error)
                mask[:], is_over = 0, True
            if not mask.any():  # before the grammar, or what is sampled is dropped
                mask[:] = -1
            if is_over:
                del self._walks[row]


def allow_alone(row: Mask, token: int) -> None:
    """Let the mask leave no choice."""
    row[:] = 0
    row.view("u4")[token // 32] = 1 << (token % 32)


def allows_one(row: Mask) -> bool:
    """Whether the mask leaves no choice."""
    words = row.nonzero()[0]
    return len(words) == 1 and int(row.view("u4")[words[0]]).bit_count() == 1
