"""Encoder outputs that cross-attention layers attend to, by content: which of them each token of a
step attends to, and the keys and values that the layers have computed of them.

Those of admitted requests are always kept; of the others, as many as fit into a number of bytes.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.layers.cross_attention import CrossAttentionSpan, EncoderOutput
from radixlm.step.plan import StepPlan
from radixlm.wire.media import Media

CACHE_BYTES = 256 << 20


class EncoderOutputs:
    """The outputs of one model's encoder."""

    def __init__(self, rows: Callable[[Media], Tensor]) -> None:
        """``rows(media)``: the encoder's output, [1, N, D]."""
        self._rows = rows
        self._outputs: OrderedDict[bytes, EncoderOutput] = OrderedDict()

    def spans(
        self, plan: StepPlan, tables: DeviceTables, failed: Container[str]
    ) -> tuple[CrossAttentionSpan, ...]:
        """Of the step's tokens whose prompts have media, without those of ``failed`` requests."""
        spans, at = list[CrossAttentionSpan](), 0
        for item in plan.items:
            media = tables.state(item.slot).media if item.rid not in failed else ()
            for start, end, visible in stretches([one.spans[0][0] for one in media]):
                first = max(start, item.start)
                last = item.start + item.count if end is None else min(end, item.start + item.count)
                if first < last:
                    images = tuple(self.of(media[i]) for i in visible)
                    where = at + first - item.start
                    spans.append(
                        CrossAttentionSpan(
                            where, last - first, images, start < media[0].spans[0][0]
                        )
                    )
            at += item.count
        self._forget(tables)
        return tuple(spans)

    def of(self, media: Media) -> EncoderOutput:
        """The output of one media; the encoder's error if it cannot read it."""
        image = self._outputs.get(media.digest)
        if image is None:
            self._rows(media)
            used, tiles = _tiles(media)
            image = self._outputs[media.digest] = EncoderOutput(
                partial(self._first, media), used, tiles
            )
        self._outputs.move_to_end(media.digest)
        return image

    def _first(self, media: Media) -> Tensor:
        return self._rows(media)[0]

    def _forget(self, tables: DeviceTables) -> None:
        """Drop the least recently used ones that no admitted request has."""
        num_bytes = {digest: _num_bytes(image) for digest, image in self._outputs.items()}
        total = sum(num_bytes.values())
        if total <= CACHE_BYTES:
            return
        needed = {one.digest for state in tables.states if state for one in state.media}
        for digest, size in num_bytes.items():
            if total > CACHE_BYTES and digest not in needed:
                del self._outputs[digest]
                total -= size


def stretches(places: Sequence[int]) -> Iterator[tuple[int, int | None, list[int]]]:
    """(start, end, indices of visible images) along a text with images at ``places``; the last end
    is None. Tokens before the first image attend to all."""
    if not places:
        return
    if places[0] > 0:
        yield 0, places[0], list(range(len(places)))
    visible: list[int] = []
    for i, place in enumerate(places):
        visible = [*visible, i] if i and places[i - 1] == place - 1 else [i]
        yield place, places[i + 1] if i + 1 < len(places) else None, visible


def _tiles(media: Media) -> tuple[int, int]:
    """(tiles that the image fills, tiles that the encoder makes): the rest is padding."""
    mask = media.inputs.get("aspect_ratio_mask")
    if mask is None:
        return 1, 1
    return int(mask.read().sum()), mask.read().size


def _num_bytes(image: EncoderOutput) -> int:
    return sum(
        part.nbytes for parts in image.made.values() for part in parts if isinstance(part, Tensor)
    )
