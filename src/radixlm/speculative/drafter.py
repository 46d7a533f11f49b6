"""HostDrafter: what the scheduler asks of a drafter that runs on the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.step.plan import Int32Array

Float32Array = NDArray[np.float32]


class Path(Record, eq=False):
    """Another path of a tree of drafts: the first ``num_shared`` of its tokens are those of a path
    before it; ``gain``: the accepted tokens that it is expected to add to these."""

    tokens: Int32Array
    num_shared: int
    gain: float


class Proposal(Record, eq=False):
    """Drafted tokens [k] and ``survival`` [k], the estimated chance that draft j and all before it
    are accepted: it never rises with j. ``others``: further paths, the best first."""

    tokens: Int32Array
    survival: Float32Array
    others: tuple[Path, ...] = ()


NOTHING = Proposal(np.zeros(0, np.int32), np.zeros(0, np.float32))


class HostDrafter(Protocol):
    """Drafts from tokens alone. A wrong draft costs time, never a token."""

    name: str

    def start(self, rid: str, namespace: Hashable, ids: Int32Array) -> None:
        """A request runs, with ``ids`` known. What it writes is proposed to requests of equal
        namespaces only. A known rid starts again."""

    def append(self, rid: str, tokens: Int32Array) -> None:
        """Tokens were committed; an unknown rid is ignored, here and below."""

    def propose(self, rid: str, max_tokens: int) -> Proposal:
        """At most ``max_tokens`` tokens that may follow."""

    def finish(self, rid: str) -> None:
        """The request is over."""

    def flush(self) -> None:
        """Forget what requests have written that are over."""
