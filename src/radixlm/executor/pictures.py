"""Pictures that layers attend to, by content: which of them each token of a step sees, and what
the layers have made of them.

Pictures of admitted requests are always held; of the others, as many as fit into a number of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

from torch import Tensor

from radixlm.executor.tables import SlotTables
from radixlm.step.batch import Picture, Sight
from radixlm.step.plan import StepPlan
from radixlm.wire.media import Media

CACHE_BYTES = 256 << 20


class Pictures:
    """``rows(media)``: what the tower makes of a picture, [1, N, D]."""

    def __init__(self, rows: Callable[[Media], Tensor], max_bytes: int = CACHE_BYTES) -> None:
        self._rows, self._max_bytes = rows, max_bytes
        self._held: OrderedDict[bytes, Picture] = OrderedDict()

    def sights(
        self, plan: StepPlan, tables: SlotTables, failed: Container[str]
    ) -> tuple[Sight, ...]:
        """Of the step's tokens whose prompts have pictures, but for requests that failed."""
        found, at = list[Sight](), 0
        for item in plan.items:
            media = tables.state(item.slot).media if item.rid not in failed else ()
            for start, end, seen in stretches([one.spans[0][0] for one in media]):
                first = max(start, item.start)
                last = item.start + item.count if end is None else min(end, item.start + item.count)
                if first < last:
                    pictures = tuple(self.of(media[i]) for i in seen)
                    where = at + first - item.start
                    found.append(Sight(where, last - first, pictures, start < media[0].spans[0][0]))
            at += item.count
        self._forget(tables)
        return tuple(found)

    def of(self, media: Media) -> Picture:
        """The picture; what the tower raises if it cannot read a new one."""
        picture = self._held.get(media.digest)
        if picture is None:
            self._rows(media)
            true, parts = _parts(media)
            picture = self._held[media.digest] = Picture(partial(self._first, media), true, parts)
        self._held.move_to_end(media.digest)
        return picture

    def _first(self, media: Media) -> Tensor:
        return self._rows(media)[0]

    def _forget(self, tables: SlotTables) -> None:
        """Drop what is least recently seen and of no admitted request."""
        num_bytes = {digest: _num_bytes(picture) for digest, picture in self._held.items()}
        total = sum(num_bytes.values())
        if total <= self._max_bytes:
            return
        needed = {one.digest for state in tables.states if state for one in state.media}
        for digest, size in num_bytes.items():
            if total > self._max_bytes and digest not in needed:
                del self._held[digest]
                total -= size


def stretches(places: Sequence[int]) -> Iterator[tuple[int, int | None, list[int]]]:
    """(first place, end, pictures seen there) all along a text with pictures at ``places``; the
    last end is None. Before the first picture, all of them."""
    if not places:
        return
    if places[0] > 0:
        yield 0, places[0], list(range(len(places)))
    seen: list[int] = []
    for i, place in enumerate(places):
        seen = [*seen, i] if i and places[i - 1] == place - 1 else [i]
        yield place, places[i + 1] if i + 1 < len(places) else None, seen


def _parts(media: Media) -> tuple[int, int]:
    """(parts of a picture that are there, parts that its tower makes): a picture is cut in few
    tiles or many, and the rest is filled up."""
    mask = media.inputs.get("aspect_ratio_mask")
    if mask is None:
        return 1, 1
    return int(mask.read().sum()), mask.read().size


def _num_bytes(picture: Picture) -> int:
    return sum(
        part.nbytes for made in picture.made.values() for part in made if isinstance(part, Tensor)
    )
