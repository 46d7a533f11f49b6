"""AdapterTable: the adapters that are loaded, by number, and which of them each slot uses."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.lora import LoraRows, PackedAdapter, Parts
from radixlm.step.plan import EMPTY_DECODES, DecodeBatch, Items

NONE = -1  # number of no adapter


class AdapterTable:
    """Outlives the schedulers of an engine; ``reset`` forgets the slots."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels, self._device = kernels, device
        self._adapters: dict[int, PackedAdapter] = {}
        self._by_slot: NDArray[np.int64] = np.zeros(0, np.int64)
        self._start: NDArray[np.int64] = np.zeros(0, np.int64)  # first tokens that they change
        self._num_used = 0  # slots with an adapter
        self._kept: tuple[DecodeBatch, LoraRows | None] = (EMPTY_DECODES, None)

    def pack(self, parts: Parts) -> PackedAdapter:
        """An adapter on the device; may be called by another thread."""
        moved = {site: tuple(p.to(self._device) for p in ps) for site, ps in parts.items()}
        return self._kernels.pack_adapter(moved)

    def put(self, number: int, adapter: PackedAdapter) -> None:
        """Serve an adapter from the next step on."""
        self._adapters[number] = adapter

    def drop(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        self._adapters.pop(number, None)
        self._kept = (EMPTY_DECODES, None)

    def __len__(self) -> int:
        return len(self._adapters)

    def reset(self, num_slots: int) -> None:
        """No slot uses any."""
        self._by_slot = np.full(num_slots + 1, NONE, np.int64)
        self._start = np.zeros(num_slots + 1, np.int64)
        self._num_used = 0

    def assign(self, slot: int, number: int, start: int = 0) -> None:
        """The slot's request uses an adapter from token ``start`` on, or none."""
        self._num_used += int(number >= 0) - int(self._by_slot[slot] >= 0)
        self._by_slot[slot], self._start[slot] = number, start

    def is_used(self, items: Items) -> bool:
        """Whether a sequence of the step has an adapter."""
        return bool(self._num_used) and bool((self._numbers(items) >= 0).any())

    def rows(self, items: Items) -> LoraRows | None:
        """The tokens of a step that have adapters; None if there are none. Steps that decode the
        same requests get the same object."""
        if not self._num_used:
            return None
        is_repeated = not items.others and items.num_tokens == len(items.decodes.slots)
        if is_repeated and self._kept[0] is items.decodes:
            return self._kept[1]
        rows = self._make(items)
        self._kept = (items.decodes if is_repeated else EMPTY_DECODES, rows)
        return rows

    def _make(self, items: Items) -> LoraRows | None:
        numbers = self._numbers(items)
        known = [n for n in dict.fromkeys(numbers.tolist()) if n in self._adapters]
        if not known:
            return None
        place = {number: index for index, number in enumerate(known)}
        of_item = np.array([place.get(n, NONE) for n in numbers.tolist()], np.int32)
        counts = np.ones(len(of_item), np.int64)
        if items.drafts is not None:
            counts[: len(items.starts)] += items.drafts.lens
        counts[len(items.decodes.slots) :] = [item.count for item in items.others]
        of_token = np.repeat(of_item, counts)
        first = len(of_token) - sum(item.count for item in items.others)
        for item in items.others:
            of_token[
                first : first + np.clip(self._start[item.slot] - item.start, 0, item.count)
            ] = NONE
            first += item.count
        adapter_T = torch.from_numpy(of_token).to(self._device)
        return self._kernels.lora_rows([self._adapters[n] for n in known], adapter_T)

    def _numbers(self, items: Items) -> NDArray[np.int64]:
        slots = np.append(items.decodes.slots, [item.slot for item in items.others])
        return self._by_slot[slots.astype(np.int64)]
