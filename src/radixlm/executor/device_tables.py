"""What the device knows of each slot: its pages, its last token, its input embeddings.

A batch is a list of slots; nothing is ever merged or filtered. A slot's rows are overwritten by
its next owner, so that a release costs nothing. The page tables stand on the host and on the
device; where the device is the host they are the same memory, elsewhere each step carries the
entries that it changes (``changes``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixlm.step.plan import Admission, NewPages, PageUpdate
from radixlm.wire.media import Media


@dataclass(slots=True)
class SlotInputs:
    """Of one admitted request: where its prompt ends, and embeddings that replace its tokens."""

    rid: str
    prompt_len: int
    embeds: NDArray[np.float32] | None
    media: tuple[Media, ...] = ()
    rope_ids: NDArray[np.int32] | None = None  # [3, prompt]

    @property
    def is_plain(self) -> bool:
        """Whether the slot's tokens are token ids and nothing else."""
        return self.embeds is None and not self.media and self.rope_ids is None


class DeviceTables:
    """Page tables [spaces][slots, pages] and the token table [slots].

    One slot more than ``num_slots``, whose pages are all page 0, stands for the rows that fill a
    step up to the size of a graph: they write to page 0, which is nobody's, and read nothing.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        num_spaces: int,
        device: torch.device,
        is_shared: bool = True,
    ) -> None:
        """``is_shared``: the device reads the host's tables (it is the host)."""
        self.device, self.is_shared = device, is_shared
        self.num_slots, self.max_pages = num_slots, max_pages
        self.pages: NDArray[np.int32] = np.zeros((num_spaces, num_slots + 1, max_pages), np.int32)
        self.prompt_len: NDArray[np.int32] = np.zeros(num_slots + 1, np.int32)
        if is_shared:
            self.device_pages = torch.from_numpy(self.pages)
        else:
            self.device_pages = torch.zeros(self.pages.shape, dtype=torch.int32, device=device)
        self.next_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.states: list[SlotInputs | None] = [None] * num_slots
        self.num_with_extras = 0  # slots that hold more than token ids
        self._changed: list[NDArray[np.int64]] = []

    @property
    def dummy(self) -> int:
        """The slot that nobody owns."""
        return self.num_slots

    def admit(self, admission: Admission) -> None:
        """The slot has a new owner."""
        self.release(admission.slot)
        state = SlotInputs(
            admission.rid,
            len(admission.prompt_ids),
            admission.embeds,
            admission.media,
            admission.rope_ids,
        )
        self.states[admission.slot] = state
        self.prompt_len[admission.slot] = state.prompt_len
        self.num_with_extras += not state.is_plain

    def write(self, update: PageUpdate) -> None:
        """Enter pages, on the host at once and on the device with the next step."""
        end = update.first + len(update.pages)
        self.pages[update.group, update.slot, update.first : end] = update.pages
        if not self.is_shared:
            row = (update.group * (self.num_slots + 1) + update.slot) * self.max_pages
            self._changed.append(np.arange(row + update.first, row + end))

    def add(self, new: NewPages) -> None:
        """Enter a page for each of some rows, likewise."""
        self.pages[0, new.slots, new.columns] = new.pages
        if not self.is_shared:
            self._changed.append(new.slots * self.max_pages + new.columns)

    def changes(self) -> NDArray[np.int64]:
        """Places of the flat tables written since the last call; a place may come twice, and has
        its last value in ``pages``."""
        changed, self._changed = self._changed, []
        return np.concatenate(changed) if changed else np.zeros(0, np.int64)

    def release(self, slot: int) -> None:
        """Drop what is large; the numbers stay until the next owner."""
        state = self.states[slot]
        self.num_with_extras -= state is not None and not state.is_plain
        self.states[slot] = None

    def state(self, slot: int) -> SlotInputs:
        found = self.states[slot]
        assert found is not None, f"slot {slot} has no owner"
        return found
