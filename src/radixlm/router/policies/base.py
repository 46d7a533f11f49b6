"""The interface of the policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixlm.router.call import Call
from radixlm.router.worker import Worker


class Policy(Protocol):
    """Chooses among workers of one model and one type. One object serves one such pool."""

    name: str

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        """One of ``workers``, which are available, at least one, and not yet tried for ``call``.
        Ties are drawn at random."""

    def joined(self, worker: Worker) -> None:
        """A worker became a member of the pool."""

    def left(self, worker: Worker) -> None:
        """A worker is gone for good."""

    def ended(self, call: Call, worker: Worker, *, cached_tokens: int | None) -> None:
        """An answer is complete. ``cached_tokens``: what the worker found cached, None if it did
        not tell."""

    def tick(self, now_s: float) -> None:
        """Called about once a second: evict, adjust bounds."""
