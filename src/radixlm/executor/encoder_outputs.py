"""Images that layers attend to, by content: which of them each token of a step sees, and what
the layers have made of them.

Images of admitted requests are always held; of the others, as many as fit into a number of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.step.batch import CrossAttentionSpan, EncoderOutput
from radixlm.step.plan import StepPlan
from radixlm.wire.media import Media

CACHE_BYTES = 256 << 20


class EncoderOutputs:
    """``rows(media)``: what the encoder makes of an image, [1, N, D]."""

    def __init__(self, rows: Callable[[Media], Tensor], max_bytes: int = CACHE_BYTES) -> None:
        self._rows, self._max_bytes = rows, max_bytes
        self._held: OrderedDict[bytes, EncoderOutput] = OrderedDict()

    def cross_attention_spans(
        self, plan: StepPlan, tables: DeviceTables, failed: Container[str]
    ) -> tuple[CrossAttentionSpan, ...]:
        """Of the step's tokens whose prompts have images, but for requests that failed."""
        found, at = list[CrossAttentionSpan](), 0
        for item in plan.items:
            media = tables.state(item.slot).media if item.rid not in failed else ()
            for start, end, seen in stretches([one.spans[0][0] for one in media]):
                first = max(start, item.start)
                last = item.start + item.count if end is None else min(end, item.start + item.count)
                if first < last:
                    images = tuple(self.of(media[i]) for i in seen)
                    where = at + first - item.start
                    found.append(
                        CrossAttentionSpan(
                            where, last - first, images, start < media[0].spans[0][0]
                        )
                    )
            at += item.count
        self._forget(tables)
        return tuple(found)

    def of(self, media: Media) -> EncoderOutput:
        """The image; what the encoder raises if it cannot read a new one."""
        image = self._held.get(media.digest)
        if image is None:
            self._rows(media)
            true, parts = _parts(media)
            image = self._held[media.digest] = EncoderOutput(
                partial(self._first, media), true, parts
            )
        self._held.move_to_end(media.digest)
        return image

    def _first(self, media: Media) -> Tensor:
        return self._rows(media)[0]

    def _forget(self, tables: DeviceTables) -> None:
        """Drop what is least recently seen and of no admitted request."""
        num_bytes = {digest: _num_bytes(image) for digest, image in self._held.items()}
        total = sum(num_bytes.values())
        if total <= self._max_bytes:
            return
        needed = {one.digest for state in tables.states if state for one in state.media}
        for digest, size in num_bytes.items():
            if total > self._max_bytes and digest not in needed:
                del self._held[digest]
                total -= size


def stretches(places: Sequence[int]) -> Iterator[tuple[int, int | None, list[int]]]:
    """(first place, end, images seen there) all along a text with images at ``places``; the
    last end is None. Before the first image, all of them."""
    if not places:
        return
    if places[0] > 0:
        yield 0, places[0], list(range(len(places)))
    seen: list[int] = []
    for i, place in enumerate(places):
        seen = [*seen, i] if i and places[i - 1] == place - 1 else [i]
        yield place, places[i + 1] if i + 1 < len(places) else None, seen


def _parts(media: Media) -> tuple[int, int]:
    """(parts of an image that are there, parts that its encoder makes): an image is cut in few
    tiles or many, and the rest is filled up."""
    mask = media.inputs.get("aspect_ratio_mask")
    if mask is None:
        return 1, 1
    return int(mask.read().sum()), mask.read().size


def _num_bytes(image: EncoderOutput) -> int:
    return sum(
        part.nbytes for made in image.made.values() for part in made if isinstance(part, Tensor)
    )
