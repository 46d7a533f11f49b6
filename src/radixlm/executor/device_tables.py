"""DeviceTables: what the device has of each slot: its pages, its last token, its input embeddings.

A batch is a list of slots; rows are never merged or filtered. A slot's rows are overwritten by its
next request, so releasing it costs nothing. The page tables are on the host and on the device.
Where the device is the host, they are the same memory; elsewhere each step carries the entries that
it changes (``changes``).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixlm.step.plan import Admission, NewPages, PageUpdate
from radixlm.wire.media import Media


@dataclass(slots=True)
class SlotInputs:
    """The inputs of an admitted request besides its token ids."""

    rid: str
    prompt_len: int
    embeds: NDArray[np.float32] | None
    media: tuple[Media, ...] = ()
    rope_ids: NDArray[np.int32] | None = None  # [3, prompt]

    @property
    def is_plain(self) -> bool:
        """Whether there are none."""
        return self.embeds is None and not self.media and self.rope_ids is None


class DeviceTables:
    """Page tables [spaces][slots, pages] and the token table: ``known[0]`` (``next_token``) has the
    sampled token of each slot, ``known[j]`` the j-th draft behind it of the device's drafter.
    ``num_refused``: drafts of the slot's last step with drafts that were refused.

    One slot more than ``num_slots``, the dummy slot, is for rows that pad a step to the size of a
    graph. Its pages are all page 0, which no request uses: its rows write there and read nothing.
    The ``max_paths`` rows of the page tables behind it are for further paths of drafts.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        num_spaces: int,
        device: torch.device,
        is_shared: bool = True,
        max_drafts: int = 0,
        max_paths: int = 0,
    ) -> None:
        """``is_shared``: the device is the host, and reads the host's tables."""
        self.device, self.is_shared = device, is_shared
        self.num_slots, self.max_pages = num_slots, max_pages
        rows = num_slots + 1 + max_paths
        self.pages: NDArray[np.int32] = np.zeros((num_spaces, rows, max_pages), np.int32)
        self.prompt_len: NDArray[np.int32] = np.zeros(num_slots + 1, np.int32)
        if is_shared:
            self.device_pages = torch.from_numpy(self.pages)
        else:
            self.device_pages = torch.zeros(self.pages.shape, dtype=torch.int32, device=device)
        self.known = torch.zeros((1 + max_drafts, rows), dtype=torch.int64, device=device)
        self.next_token = self.known[0]
        self.num_refused = torch.zeros(rows, dtype=torch.int32, device=device)
        self.states: list[SlotInputs | None] = [None] * num_slots
        self.num_with_extras = 0  # slots with inputs besides token ids
        self._changed: list[NDArray[np.int64]] = []

    @property
    def dummy(self) -> int:
        return self.num_slots

    def admit(self, admission: Admission) -> None:
        """Set the slot's inputs for a new request."""
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
        """Write pages, on the host at once and on the device with the next step."""
        end = update.first + len(update.pages)
        self.pages[update.group, update.slot, update.first : end] = update.pages
        if not self.is_shared:
            row = (update.group * self.pages.shape[1] + update.slot) * self.max_pages
            self._changed.append(np.arange(row + update.first, row + end))

    def add(self, new: NewPages) -> None:
        """Write one page for each of some rows, likewise."""
        self.pages[0, new.slots, new.columns] = new.pages
        if not self.is_shared:
            self._changed.append(new.slots * self.max_pages + new.columns)

    def changes(self) -> NDArray[np.int64]:
        """Indices into the flat tables that were written since the last call. An index may come
        twice; its value is the one in ``pages``."""
        changed, self._changed = self._changed, []
        return np.concatenate(changed) if changed else np.zeros(0, np.int64)

    def release(self, slot: int) -> None:
        """Drop the slot's inputs; its pages stay until the next request."""
        state = self.states[slot]
        self.num_with_extras -= state is not None and not state.is_plain
        self.states[slot] = None

    def state(self, slot: int) -> SlotInputs:
        """The inputs of the request in the slot."""
        state = self.states[slot]
        assert state is not None, f"no request has slot {slot}"
        return state
