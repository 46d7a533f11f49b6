"""RoutedExperts: which experts the tokens of a step chose, for the requests that ask.

Legend: T tokens of a step, L layers of the model, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.distributed.record import RecordedLayer


class RoutedExperts:
    """Reads the choices of ``layers``; ``places``: of each its number in the model. ``shape``: L
    and K."""

    def __init__(
        self, layers: Sequence[RecordedLayer], places: Sequence[int], shape: tuple[int, int]
    ) -> None:
        self._layers, self._places, self._shape = layers, places, shape
        for layer in layers:
            layer.record(True)

    def take(self, num_tokens: int) -> Tensor:
        """What the tokens of the last step chose: int32 [T, L, K], 0 in layers without experts and
        where a layer chooses fewer than K."""
        chosen = [layer.take_chosen() for layer in self._layers]
        where = next((one.device for one in chosen if one is not None), None)
        routed_TLK = torch.zeros(num_tokens, *self._shape, dtype=torch.int32, device=where)
        for place, chosen_TK in zip(self._places, chosen, strict=True):
            if chosen_TK is not None:
                routed_TLK[:, place, : chosen_TK.shape[1]] = chosen_TK
        return routed_TLK
