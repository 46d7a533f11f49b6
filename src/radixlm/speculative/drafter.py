"""Proposal: what a drafter proposes for a request."""

from __future__ import annotations

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
