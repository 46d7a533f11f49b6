"""ExpertChoices: hands the experts that tokens choose to those who ask: the recorder, and requests.

Every rank of a pipeline stage chooses for all tokens. The first rank of a later stage sends what
its layers chose to rank 0, which counts alone and tells requests. The others read what they chose
and drop it: they, too, must know whether somebody asks, as this changes what a step computes.

Legend: T tokens of a step, L layers of the model, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.distributed.record import (
    ChoiceReader,
    Choices,
    ExpertRecorder,
    StepTokens,
    pack_choices,
)
from radixlm.executor.results import StepHandle
from radixlm.step.plan import Items


class RoutedExperts(Record):
    """How requests are told. ``places``: of each layer with experts, its number in the model;
    ``shape``: L and K."""

    places: Sequence[int]
    shape: tuple[int, int]

    def table(self, chosen: Choices, num_tokens: int) -> Tensor:
        """int32 [T, L, K], 0 in layers without experts and where a layer chooses fewer than K."""
        where = next((one.device for one in chosen if one is not None), None)
        routed_TLK = torch.zeros(num_tokens, *self.shape, dtype=torch.int32, device=where)
        for place, chosen_TK in zip(self.places, chosen, strict=True):
            if chosen_TK is not None:
                routed_TLK[:, place, : chosen_TK.shape[1]] = chosen_TK
        return routed_TLK


class ExpertChoices:
    """``recorder`` and ``routed``: None where the options do not ask for them. ``is_first``: of
    rank 0; ``send``: of the first rank of a later stage, to rank 0."""

    def __init__(
        self,
        reader: ChoiceReader,
        recorder: ExpertRecorder | None,
        routed: RoutedExperts | None,
        is_first: bool,
        send: Callable[[Tensor], None] | None,
    ) -> None:
        self._reader, self.recorder, self._routed = reader, recorder, routed
        self._is_first, self._send = is_first, send
        # of each token of the step, its row among those that ran; None where they are the same
        self.rows_T: Tensor | None = None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the last layer, too, must see the tokens that need no logits."""
        return self.recorder is not None and self.recorder.needs_all_tokens

    def due_moves(self) -> dict[str, Any] | None:
        """Experts that should move before the next step: arguments of the command move_experts."""
        source = None if self.recorder is None else self.recorder.rebalancer
        return None if source is None else source.due()

    def are_wanted(self, items: Items) -> bool:
        """Whether somebody asks what the tokens of a step choose."""
        is_recorded = self.recorder is not None and self.recorder.is_on
        return is_recorded or (self._routed is not None and _wants_routed(items))

    def begin(self) -> None:
        """A step is about to run whose choices are wanted; nobody has asked for those before."""
        self._reader.take()

    def take(self) -> Choices | None:
        """What the tokens of the step that has run chose, for rank 0 to ``tell``; else None."""
        chosen = self._reader.take()
        if self.rows_T is not None:
            chosen = [None if one_TK is None else one_TK[self.rows_T] for one_TK in chosen]
        if self._send is not None:
            self._send(pack_choices(chosen))
        return chosen if self._is_first else None

    def tell(self, step: StepHandle, chosen: Choices, tokens: Callable[[], StepTokens]) -> None:
        """Hand on what the tokens of a step chose in the layers of all stages."""
        if self.recorder is not None and self.recorder.is_on:
            self.recorder.count(chosen, tokens)
        if self._routed is not None and _wants_routed(step.items):
            step.routed_TLK = self._routed.table(chosen, step.shape.num_tokens)


def _wants_routed(items: Items) -> bool:
    """Whether an item asks for the experts that its tokens choose."""
    return bool(items.decodes.routed) or any(item.routed_experts for item in items.prefills)
