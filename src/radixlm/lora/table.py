"""AdapterTable: the adapters that are loaded, by number, and which of them each slot uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.lora import LoraLayout, LoraRows, LoraSlots, PackedAdapter, Parts
from radixlm.step.plan import EMPTY_DECODES, DecodeBatch, Items

NONE = -1  # number of no adapter
EMPTY = 1 << 62  # number of an adapter that changes nothing


class AdapterTable:
    """Outlives the schedulers of an engine; ``reset`` forgets the slots."""

    def __init__(self, kernels: Kernels, layout: LoraLayout) -> None:
        self._kernels, self._layout = kernels, layout
        self._adapters: dict[int, PackedAdapter] = {}
        self._by_slot: NDArray[np.int64] = np.zeros(0, np.int64)
        self._start: NDArray[np.int64] = np.zeros(0, np.int64)  # first tokens that they change
        self._num_used = 0  # slots with an adapter
        self.version = 0  # of what the numbers mean
        self._kept: tuple[DecodeBatch, LoraRows | None] = (EMPTY_DECODES, None)

    def pack(self, parts: Parts) -> PackedAdapter:
        """An adapter on the device; may be called by another thread."""
        where = self._layout.where
        moved = {site: tuple(p.to(where) for p in ps) for site, ps in parts.items()}
        return self._kernels.pack_adapter(moved, self._layout)

    def put(self, number: int, adapter: PackedAdapter) -> None:
        """Serve an adapter from the next step on."""
        self._adapters[number] = adapter
        self.version += 1

    def drop(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        self._adapters.pop(number, None)
        self.version += 1
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

    @contextmanager
    def empty_one(self) -> Iterator[int]:
        """The number of an adapter that changes nothing in every linear layer, to try steps."""
        self.put(EMPTY, self.pack(dict.fromkeys(self._layout.sites, ())))
        try:
            yield EMPTY
        finally:
            self.drop(EMPTY)

    def is_used(self, items: Items) -> bool:
        """Whether a sequence of the step has an adapter."""
        return bool(self._num_used) and bool((self._numbers(items) >= 0).any())

    def of(self, items: Items) -> dict[int, PackedAdapter]:
        """The loaded adapters of a step, by number."""
        found = dict.fromkeys(self._numbers(items).tolist())
        return {n: self._adapters[n] for n in found if n in self._adapters}

    def make_slots(self, max_tokens: int) -> LoraSlots | None:
        """Slots for recorded steps of at most so many tokens; None where kernels have none."""
        return self._kernels.lora_slots(self._layout, max_tokens)

    def rows(self, items: Items) -> LoraRows | None:
        """The tokens of a step that have adapters; None if there are none. Steps that decode the
        same requests get the same object."""
        if not self._num_used:
            return None
        is_repeated = is_steady(items)
        if is_repeated and self._kept[0] is items.decodes:
            return self._kept[1]
        rows = self._make(items)
        self._kept = (items.decodes if is_repeated else EMPTY_DECODES, rows)
        return rows

    def _make(self, items: Items) -> LoraRows | None:
        known = self.of(items)
        if not known:
            return None
        adapter_T = torch.from_numpy(self.places(items, {n: i for i, n in enumerate(known)}))
        return self._kernels.lora_rows(list(known.values()), adapter_T, self._layout.where)

    def places(self, items: Items, place: dict[int, int], width: int = 0) -> NDArray[np.int32]:
        """``place`` of the adapter of each token of a step, -1 without one. ``width``: tokens of
        each row with drafts, void ones included, if not as many as it has drafts."""
        of_item = np.array([place.get(n, NONE) for n in self._numbers(items).tolist()], np.int32)
        counts = np.ones(len(of_item), np.int64)
        if items.drafts is not None:
            counts[: len(items.starts)] = width or 1 + items.drafts.lens
        counts[len(items.decodes.slots) :] = [item.count for item in items.others]
        of_token = np.repeat(of_item, counts)
        first = len(of_token) - sum(item.count for item in items.others)
        for item in items.others:
            of_token[
                first : first + np.clip(self._start[item.slot] - item.start, 0, item.count)
            ] = NONE
            first += item.count
        return of_token

    def _numbers(self, items: Items) -> NDArray[np.int64]:
        slots = np.append(items.decodes.slots, [item.slot for item in items.others])
        return self._by_slot[slots.astype(np.int64)]


def is_steady(items: Items) -> bool:
    """Whether a step has one token of each sequence, as steps of the same decodes have."""
    return not items.others and items.num_tokens == len(items.decodes.slots)
