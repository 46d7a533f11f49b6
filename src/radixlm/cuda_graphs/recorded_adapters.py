"""RecordedAdapters: which adapter each token of a recorded step has, where graphs read it."""

from __future__ import annotations

import weakref
from functools import partial

import torch

from radixlm.devices.copies import PinnedRing
from radixlm.devices.device import Device
from radixlm.executor.step_inputs import RING
from radixlm.kernels.ops.lora import LoraRows, LoraSlots, PackedAdapter
from radixlm.lora.table import AdapterTable, is_steady
from radixlm.step.plan import EMPTY_DECODES, DecodeBatch, Items

Held = weakref.ReferenceType[PackedAdapter]


class RecordedAdapters:
    """Adapters get one of a few slots when a step first has them, and stay until another one needs
    it. Graphs read slots, not adapters, so they stay valid."""

    def __init__(self, device: Device, adapters: AdapterTable, slots: LoraSlots) -> None:
        self._device, self._adapters, self._slots = device, adapters, slots
        self._ring = PinnedRing(device, len(slots.ints), RING)
        self._held: list[Held | None] = [None] * slots.num_slots
        self._filled: tuple[DecodeBatch, int, int] = (EMPTY_DECODES, 0, 0)

    def takes(self, items: Items) -> bool:
        """Whether a recorded step can run all adapters of the step."""
        known = self._adapters.of(items).values()
        return len(known) <= len(self._held) and all(map(self._slots.takes, known))

    def rows(self, num_tokens: int) -> LoraRows:
        """The tokens of a step, while it is recorded."""
        return self._slots.rows(num_tokens)

    def fill(self, items: Items, width: int) -> None:
        """Launch what a step of rows of ``width`` tokens needs besides its graph. Steps that decode
        the same requests one after another need nothing new."""
        is_repeated = is_steady(items)
        version = self._adapters.version
        if is_repeated and self._filled == (items.decodes, width, version):
            return
        place = self._places(self._adapters.of(items))
        host = self._ring.take()
        self._slots.fill(self._adapters.places(items, place, width), host)
        self._device.upload(host, self._slots.ints)
        self._ring.mark(self._device.record())
        self._filled = (items.decodes if is_repeated else EMPTY_DECODES, width, version)

    def _places(self, known: dict[int, PackedAdapter]) -> dict[int, int]:
        """The slot of each adapter, by its number; those that have none get one."""
        held = [None if ref is None else ref() for ref in self._held]
        place = {n: held.index(one) for n, one in known.items() if one in held}
        free = [slot for slot in range(len(held)) if slot not in place.values()]
        free.sort(key=lambda slot: held[slot] is not None)
        for number, adapter in known.items():
            if number not in place:
                place[number] = slot = free.pop(0)
                self._held[slot] = weakref.ref(adapter)
                self._device.launch(partial(self._put, slot, adapter))
        return place

    @torch.inference_mode()
    def _put(self, slot: int, adapter: PackedAdapter) -> None:
        self._slots.put(slot, adapter)
