"""TokenRows: hidden states and chosen experts of a request's tokens, as they come to intake."""

from __future__ import annotations

import numpy as np

from radixlm.intake.facts import IntakeFacts
from radixlm.wire.replies import TokenDelta
from radixlm.wire.requests import TokenizedRequest


class TokenRows:
    """Of one sample."""

    def __init__(self, wire: TokenizedRequest, routed_from: int, facts: IntakeFacts) -> None:
        self._wants_hidden = wire.return_hidden_states
        self._wants_routed = wire.return_routed_experts
        layers, top_k = facts.routed_shape or (0, 0)
        self._row_bytes = 4 * facts.embed_dim, 4 * layers * top_k  # hidden states, experts
        self._num_hidden = 0  # bytes of its rows that have come
        self._skip_hidden = 0  # those that come a second time
        # bytes of experts of the first tokens, which nobody asked for
        self._skip_routed = routed_from * self._row_bytes[1]

    def begin_again(self) -> None:
        """A new engine starts at the first token."""
        self._skip_hidden = self._num_hidden

    def take(self, delta: TokenDelta) -> tuple[list[bytes] | None, list[bytes] | None]:
        """Hidden states and experts of tokens that have had none."""
        fresh = self._fresh_rows(delta)
        if not self._wants_routed or not fresh:
            return fresh or None, None
        hidden, routed = None, fresh
        if self._wants_hidden:
            pairs = [_split_rows(part, *self._row_bytes) for part in fresh]
            hidden, routed = [first for first, _ in pairs], [second for _, second in pairs]
        for place, part in enumerate(routed):
            unwanted = min(self._skip_routed, len(part))
            self._skip_routed -= unwanted
            routed[place] = part[unwanted:]
        return hidden, routed

    def _fresh_rows(self, delta: TokenDelta) -> list[bytes]:
        """The rows of tokens that have had none; a new engine starts again at the first token."""
        fresh: list[bytes] = []
        for part in delta.hidden_states or ():
            known = min(self._skip_hidden, len(part))
            self._skip_hidden -= known
            self._num_hidden += len(part) - known
            if known < len(part):
                fresh.append(part[known:])
        return fresh


def _split_rows(rows: bytes, first: int, second: int) -> tuple[bytes, bytes]:
    """The first and the second bytes of each row."""
    both = np.frombuffer(rows, np.uint8).reshape(-1, first + second)
    return both[:, :first].tobytes(), both[:, first:].tobytes()
