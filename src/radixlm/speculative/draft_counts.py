"""DraftCounts: what became of drafts, of each request and of all."""

from __future__ import annotations

from radixlm.wire.replies import DraftTotals


class DraftCounts:
    """A round is a step that verified drafts of a request. Without ``has_drafter`` only requests
    with a prediction or a grammar draft, and have no counts of their own."""

    def __init__(self, has_drafter: bool) -> None:
        self._has_drafter = has_drafter
        self._accepted: dict[str, list[int]] = {}
        self._drafted: dict[str, int] = {}
        self.totals = DraftTotals()
        self._rounds_before, self._accepted_before = 0, 0  # the last flush

    def add(self, rid: str, drafted: int, accepted: int) -> None:
        """A round of a request."""
        rounds = self._accepted.setdefault(rid, [])
        rounds.extend([0] * (accepted + 1 - len(rounds)))
        rounds[accepted] += 1
        self._drafted[rid] = self._drafted.get(rid, 0) + drafted
        self.totals.num_rounds += 1
        self.totals.num_drafted += drafted
        self.totals.num_accepted += accepted

    def of(self, rid: str) -> tuple[list[int] | None, int]:
        """(rounds by the number of accepted drafts, drafted tokens) of a request; (None, 0)
        without a drafter."""
        if not self._has_drafter:
            return None, 0
        return list(self._accepted.get(rid, ())), self._drafted.get(rid, 0)

    def forget(self, rid: str) -> None:
        """The request is over."""
        self._accepted.pop(rid, None)
        self._drafted.pop(rid, None)

    @property
    def accept_len(self) -> float:
        """Mean tokens of a round since the last flush: accepted drafts and the token after them."""
        rounds = self.totals.num_rounds - self._rounds_before
        accepted = self.totals.num_accepted - self._accepted_before
        return 1 + accepted / rounds if rounds else 0.0

    def flush(self) -> None:
        """Begin the mean again."""
        self._rounds_before = self.totals.num_rounds
        self._accepted_before = self.totals.num_accepted
