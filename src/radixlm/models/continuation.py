"""Continuation: steps whose rows decode several tokens in turn.

Legend: P places, S sequences, G KV groups.
"""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from radixlm.base.record import Record


class Continuation(Record, eq=False):
    """How a step whose S sequences decode goes on by itself: what it samples is computed at the
    next place, up to ``len(rows)`` tokens a sequence.

    counts_S  int32: tokens of each sequence
    rows      kernels.cpu.sample.ROW [P, S]: how the tokens are sampled
    store_GP  int32 [P - 1, S] for each group: where all tokens but the last are stored; 0 behind
              the last of a sequence
    ends      tokens behind which a sequence needs no others
    told      called with the tokens of each place, int64 [S], before those of the next are sampled:
              changes the masks that the rows point to
    """

    counts_S: np.ndarray
    rows: np.ndarray
    store_GP: tuple[np.ndarray, ...]
    ends: Sequence[int] = ()
    told: Callable[[Tensor], None] | None = None
