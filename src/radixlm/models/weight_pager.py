"""Weights in a mapped file that is larger than memory: read ahead of the layer that computes, and
given up behind it."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from torch import Tensor

from radixlm.base.record import Record
from radixlm.layers.moe import MoeLayer
from radixlm.weights.packed_file import LayerEntry, MappedFile, Place

if TYPE_CHECKING:  # which imports this
    from radixlm.models.decoder import DecoderModel

# of Linux; Python's mmap module lacks them, and holds the GIL during madvise
MADV_WILLNEED: Final = 3
MADV_PAGEOUT: Final = 21
MADV_POPULATE_READ: Final = 22
AHEAD: Final = 2  # layers


class Span(Record):
    """Bytes [begin, end) of the process's memory."""

    begin: int
    end: int


class WeightPager:
    """The first layers stay in memory; of the others those are read that come next, and given up
    when they have computed. So a step reads what does not fit, once, while it computes: a file that
    is read from its beginning again and again would find nothing in the system's cache, which gives
    up what was used longest ago.

    A thread reads, so that layers wait for the disk only where they catch up with it. Experts are
    read when tokens have chosen them, and left to the system."""

    def __init__(self, layers: Sequence[Sequence[Span]], experts: dict[int, list[list[Span]]],
                 resident_bytes: int) -> None:  # fmt: skip
        """``layers``: what each layer reads in each step; ``experts``: of a layer, the spans of
        each expert. ``resident_bytes``: of the layers that stay."""
        self._layers, self._experts = layers, experts
        self.first = len(layers)  # the first layer that does not stay
        left = resident_bytes
        for layer, spans in enumerate(layers):
            left -= sum(span.end - span.begin for span in spans)
            if left < 0:
                self.first = layer
                break
        self._libc = ctypes.CDLL(None)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._asked = asked = SimpleQueue[tuple[int, Sequence[Span]] | None]()
        advise = partial(_advise, self._libc)  # not of self, whose end ends the thread
        args = (advise, asked)
        threading.Thread(target=_serve, args=args, name="weight pager", daemon=True).start()
        weakref.finalize(self, asked.put, None).atexit = False

    def before(self, layer: int) -> None:
        """The layer is about to compute."""
        coming = [layer + AHEAD] if layer else range(AHEAD + 1)
        for one in coming:
            if self.first <= one < len(self._layers):
                self._asked.put((MADV_POPULATE_READ, self._layers[one]))

    def after(self, layer: int) -> None:
        if layer >= self.first:
            self._asked.put((MADV_PAGEOUT, self._layers[layer]))

    def chosen(self, layer: int, ids: Tensor) -> None:
        """These experts are about to compute."""
        experts = self._experts.get(layer)
        for expert in sorted(set(ids.flatten().tolist())) if experts else ():
            if experts and expert < len(experts):
                _advise(self._libc, MADV_WILLNEED, experts[expert])


def _serve(
    advise: Callable[[int, Sequence[Span]], None],
    asked: SimpleQueue[tuple[int, Sequence[Span]] | None],
) -> None:
    while (one := asked.get()) is not None:
        advise(*one)


def _advise(libc: ctypes.CDLL, advice: int, spans: Sequence[Span]) -> None:
    page = mmap.PAGESIZE
    for span in spans:
        if advice == MADV_PAGEOUT:  # whole pages only: others are neighbours' too
            begin, end = -(-span.begin // page) * page, span.end // page * page
        else:
            begin, end = span.begin // page * page, -(-span.end // page) * page
        if end > begin and libc.madvise(begin, end - begin, advice) != 0:
            if advice == MADV_POPULATE_READ:  # before Linux 5.14
                libc.madvise(begin, end - begin, MADV_WILLNEED)


def make_pager(
    model: DecoderModel, file: MappedFile, entries: Mapping[str, LayerEntry], resident_bytes: int
) -> WeightPager:
    """The pager of a model that is mapped; what is not in its blocks stays in memory too."""
    places: list[list[Place]] = [[] for _ in model.decoder.blocks]
    experts: dict[int, list[list[Span]]] = {}
    layers = dict(model.layers())
    for path, entry in entries.items():
        packs = entry.packs
        if not path.startswith("blocks."):
            resident_bytes -= sum(p.num_bytes for pack in packs for p in pack.buffers.values())
            continue
        number, layer = int(path.split(".")[1]), layers[path]
        if isinstance(layer, MoeLayer) and layer.share is None and len(packs) > 2:
            count = layer.spec.experts
            pairs = zip(packs[:count], packs[count : 2 * count], strict=True)
            experts[number] = [
                joined(file, [*up.buffers.values(), *down.buffers.values()]) for up, down in pairs
            ]
            packs = packs[2 * count :]
        places[number] += [place for pack in packs for place in pack.buffers.values()]
        places[number] += entry.kept.values()
    pager = WeightPager([joined(file, one) for one in places], experts, resident_bytes)
    for path, layer in layers.items():
        if isinstance(layer, MoeLayer) and path.startswith("blocks."):
            layer.on_chosen = partial(pager.chosen, int(path.split(".")[1]))
    return pager


def joined(file: MappedFile, places: Sequence[Place]) -> list[Span]:
    """Where these lie in memory; gaps of less than a page are read with them."""
    spans: list[Span] = []
    for place in sorted(places, key=lambda place: place.at):
        begin = file.address + place.at
        if spans and begin - spans[-1].end < mmap.PAGESIZE:
            spans[-1] = Span(spans[-1].begin, begin + place.num_bytes)
        else:
            spans.append(Span(begin, begin + place.num_bytes))
    return spans
