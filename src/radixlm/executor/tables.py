"""What the device knows of each slot: its pages, its last token, its input embeddings.

A batch is a list of slots; nothing is ever merged or filtered. A slot's rows are overwritten by
its next owner, so that a release costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.step.plan import Admission, PageUpdate
from radixlm.wire.media import Media


@dataclass(slots=True)
class SlotState:
    """Of one admitted request: where its prompt ends, and embeddings that replace its tokens."""

    rid: str
    prompt_len: int
    embeds: NDArray[np.float32] | None
    media: tuple[Media, ...] = ()
    rope_ids: NDArray[np.int32] | None = None  # [3, prompt]


class SlotTables:
    """Page tables [spaces][slots, pages] and the token table [slots]."""

    def __init__(
        self, num_slots: int, max_pages: int, num_spaces: int, device: torch.device
    ) -> None:
        self.device = device
        self.pages = [np.zeros((num_slots, max_pages), np.int32) for _ in range(num_spaces)]
        self.next_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.states: list[SlotState | None] = [None] * num_slots

    def admit(self, admission: Admission) -> None:
        """The slot has a new owner."""
        self.states[admission.slot] = SlotState(
            admission.rid,
            len(admission.prompt_ids),
            admission.embeds,
            admission.media,
            admission.rope_ids,
        )

    def write(self, update: PageUpdate) -> None:
        end = update.first + len(update.pages)
        self.pages[update.group][update.slot, update.first : end] = update.pages

    def release(self, slot: int) -> None:
        """Drop what is large; the numbers stay until the next owner."""
        self.states[slot] = None

    def state(self, slot: int) -> SlotState:
        found = self.states[slot]
        assert found is not None, f"slot {slot} has no owner"
        return found

    def tokens_of(self, slots: Tensor) -> Tensor:
        """Last sampled token of each slot, on the device."""
        return self.next_token[slots]
