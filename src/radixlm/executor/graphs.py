"""Steps that only decode, recorded as graphs: one launch instead of hundreds.

A graph is made for some numbers of rows; a smaller batch is filled up with rows of the dummy slot,
which read and write page 0. It reads the step's numbers and the device's tables at their fixed
places and leaves its logits in one buffer that all graphs share: they run one after another.

Legend: B rows of a graph, V vocabulary.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from radixlm.base.units import format_seconds
from radixlm.executor.device import Device, Graph

log = logging.getLogger(__name__)

STEP_UP = 16  # between the sizes of large batches
REPORT_S = 5.0  # between two lines about a long recording


def graph_sizes(
    most: int, asked: Sequence[int] | None = None, largest: int | None = None, pads: bool = True
) -> tuple[int, ...]:
    """Batch sizes that get a graph, of at most ``most`` rows: ``asked``, or 1, 2, 4, 8, 16, 24,
    32 and then every 16th up to ``largest`` (or ``most``); without padding every size up to 160
    is worth one where none are asked for."""
    top = min(most, largest or most)
    if asked:
        return tuple(sorted({size for size in asked if size <= most}))
    if not pads:
        return tuple(range(1, min(top, 160) + 1))
    sizes = {1, 2, 4, 8, 24, *range(16, top + 1, STEP_UP), top}
    return tuple(sorted(size for size in sizes if size <= top))


class DecodeGraphs:
    """Graphs by size."""

    def __init__(self, device: Device, sizes: Sequence[int], pads: bool = True) -> None:
        self._device, self._pads = device, pads
        self.sizes = tuple(sorted(sizes))
        self._graphs: dict[int, Graph] = {}
        self._logits_BV: Tensor | None = None

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else 0

    def size_for(self, count: int) -> int:
        """The size of the graph that takes so many rows, 0 if there is none."""
        at = bisect.bisect_left(self.sizes, count)
        if at == len(self.sizes) or not (self._pads or self.sizes[at] == count):
            return 0
        return self.sizes[at] if self.sizes[at] in self._graphs else 0

    def capture(self, run: Callable[[int], Tensor]) -> None:
        """Record ``run``, which makes the logits of so many rows; the largest first, whose memory
        the others use again."""
        began_s = told_s = time.perf_counter()
        for done, size in enumerate(reversed(self.sizes), 1):
            self._graphs[size] = self._device.capture(partial(self._keep, run, size))
            now_s = time.perf_counter()
            if now_s - told_s > REPORT_S or done == len(self.sizes):
                told_s = now_s
                log.info(
                    "graphs: %d of %d sizes recorded in %s",
                    done,
                    len(self.sizes),
                    format_seconds(now_s - began_s),
                )

    def _keep(self, run: Callable[[int], Tensor], size: int) -> None:
        logits_BV = run(size)
        if self._logits_BV is None or size == self.largest:
            # the largest graph's own result is the buffer
            self._logits_BV = logits_BV
        else:
            self._logits_BV[:size].copy_(logits_BV)

    def replay(self, size: int) -> Tensor:
        """Launch the graph; its logits [size, V], to be used before the next one is launched."""
        self._graphs[size].replay()
        assert self._logits_BV is not None
        return self._logits_BV[:size]
