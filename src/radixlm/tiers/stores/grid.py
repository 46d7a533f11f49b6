"""Grid: which part of a page an object of a store has, so that servers whose ranks have other parts
find each other's pages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.tiers.base import Payload
from radixlm.tiers.manifest import Manifest, Rectangle
from radixlm.tiers.stores.base import FLAG, StoreOptions


class Box(Record):
    """Some layers and heads of one tensor of a page: bytes [start, end) of the page are [layers,
    outer, heads, inner]."""

    start: int
    end: int
    shape: tuple[int, int, int, int]
    layers: tuple[int, int]
    heads: tuple[int, int]

    def view(self, page: Payload) -> NDArray[np.uint8]:
        part = page[self.start : self.end].reshape(self.shape)
        return part[slice(*self.layers), :, slice(*self.heads)]


class Cell(Record):
    """What one object has of a page; no ``boxes``: all that the rank has."""

    name: str
    num_bytes: int
    boxes: tuple[Box, ...] = ()

    def copy(self, page: Payload) -> Payload:
        """The cell's bytes of ``page``, uint8 [n]; the page itself where that is all."""
        if not self.boxes:
            return page
        return np.concatenate([box.view(page).reshape(-1) for box in self.boxes])

    def paste(self, data: Payload, page: Payload) -> None:
        """The inverse of ``copy``."""
        at = 0
        for box in self.boxes:
            view = box.view(page)
            view[:] = data[at : at + view.size].reshape(view.shape)
            at += view.size


class Grid:
    """The cells of the pages of ``manifest``. ``digest``: of all that a cell's bytes depend on
    besides its place; equal for servers that share objects."""

    def __init__(self, manifest: Manifest, options: StoreOptions | None = None) -> None:
        self._page_bytes = manifest.page_bytes
        options = options or StoreOptions()
        if options.head_group or options.layer_group:
            layout, self._cells = _cut(manifest, options.head_group, options.layer_group)
        else:
            layout = f"{manifest.layout} {manifest.page_bytes}"
            name = manifest.rectangle.name
            self._cells = tuple((Cell(name, size),) for size in manifest.page_bytes)
        fields = (manifest.digest, layout, manifest.numerics)
        self.digest = hashlib.sha256(msgspec.msgpack.encode(fields)).digest()
        self.names = tuple(cell.name for cell in self._cells[0])

    def cells(self, num_bytes: int) -> tuple[Cell, ...]:
        """The cells of a page of so many bytes; () if no page has that length."""
        return self._cells[self._page_bytes.index(num_bytes)] if self.is_page(num_bytes) else ()

    def is_page(self, num_bytes: int) -> bool:
        return num_bytes > 0 and num_bytes in self._page_bytes


def _cut(
    manifest: Manifest, head_group: int, layer_group: int
) -> tuple[str, tuple[tuple[Cell, ...], ...]]:
    """(layout of a cell, the cells of each space); ConfigError if the pages cannot be cut so."""
    part = manifest.rectangle
    tensors, heads = _tensors(manifest), part.end_head - part.first_head
    layers = part.end_layer - part.first_layer
    head_group, layer_group = head_group or heads, layer_group or layers
    for name, group, edges in (
        ("head_group", head_group, (part.first_head, part.end_head)),
        ("layer_group", layer_group, (part.first_layer, part.end_layer)),
    ):
        if any(edge % group for edge in edges):
            raise ConfigError(f"{FLAG}: {name} {group} must divide {edges[0]} and {edges[1]}")
    cells = []
    for first_layer, end_layer in _steps(layers, layer_group):
        for first_head, end_head in _steps(heads, head_group):
            place = Rectangle(
                0, 1, part.first_layer + first_layer, part.first_layer + end_layer,
                part.first_head + first_head, part.first_head + end_head,
            )  # fmt: skip
            span = (first_layer, end_layer), (first_head, end_head)
            boxes = tuple(Box(start, end, shape, *span) for _, start, end, shape in tensors)
            size = sum(
                layer_group * outer * head_group * inner
                for _, _, _, (_, outer, _, inner) in tensors
            )
            cells.append(Cell(place.name.rpartition("_R")[0], size, boxes))
    layout = f"{[text for text, *_ in tensors]} {head_group} {layer_group}"
    return layout, (tuple(cells), ())


def _tensors(manifest: Manifest) -> list[tuple[str, int, int, tuple[int, int, int, int]]]:
    """(text without layers and heads, start, end, [layers, outer, heads, inner]) of each tensor."""
    part, found, at = manifest.rectangle, [], 0
    layers, heads = part.end_layer - part.first_layer, part.end_head - part.first_head
    tensors = manifest.tensors(0)
    is_tiled = any(len(one.shape) == 4 for one in tensors)  # heads first, else tokens
    for one in tensors:
        axis = int(not is_tiled and one.shape[1:2] == (heads,))
        if one.layers != layers or one.shape[axis] != heads:
            break
        outer, inner = math.prod(one.shape[:axis]), list(one.shape[axis + 1 :])
        shape, at = (layers, outer, heads, math.prod(inner) * one.item_bytes), one.end
        found.append((f"{one.dtype} {outer} {inner}", one.start, one.end, shape))
    if not found or at != manifest.page_bytes[0] or manifest.page_bytes[1]:
        raise ConfigError(
            f"{FLAG}: pages of {manifest.layout!r} have no parts for head_group and layer_group; "
            "leave both out"
        )
    return found


def _steps(length: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, start + step) for start in range(0, length, step))


def batches(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of items whose sizes add up to ``limit`` at most, or of one item."""
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > limit:
            yield start, number
            start, total = number, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
