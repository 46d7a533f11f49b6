"""Masks: the tokens that a step may sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


class Follow(Protocol):
    """Writes the masks of further tokens of a step that decodes several in turn.

    ``rows``: those of the step that have masks at any place."""

    @property
    def rows(self) -> Sequence[int]: ...

    def __call__(self, tokens_N: Sequence[int], masks_NW: Mask) -> None:
        """Each of the N sequences has sampled its next token: write the masks of those after these
        into the rows that go on and have masks. To be called in the order of the places, by the
        process that planned the step."""


class Masks(dict[int, Mask]):
    """Index of the item -> packed bitmask [W = ceil(vocab / 32)] of the allowed tokens, bit i of
    word w for token 32 w + i. Where the item has drafts, one for each place [drafts + 1, W].

    ``follow``: None where masks of further tokens are not known, or there are none."""

    follow: Follow | None = None
