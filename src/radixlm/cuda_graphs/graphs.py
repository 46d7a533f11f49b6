"""StepGraphs: steps recorded as CUDA graphs: one launch instead of hundreds.

Steps that only decode have a graph for some batch sizes; a smaller batch is padded with rows of the
dummy slot, which read and write page 0. Small steps with parts of prompts have a graph for some
numbers of tokens, and are padded with one sequence of the dummy slot. A graph reads the step's
buffer and the device tables at fixed addresses, and leaves its logits in one buffer that all graphs
of a kind share, as they run one after another.

Legend: B rows of a graph, V vocabulary.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from radixlm.base.record import Record
from radixlm.base.units import format_seconds
from radixlm.devices.device import Device, Graph

log = logging.getLogger(__name__)

SIZE_STEP = 16  # between the sizes of large batches
DRAFT_TOKENS = 64  # of a graph with drafts, whatever the batch sizes are
FEWEST_PROMPT_TOKENS = 32  # of a graph with parts of prompts
# the host launches a step of more tokens in about the time that the device needs for it
MOST_PROMPT_TOKENS = 1024
REPORT_S = 5.0  # between two log lines about a long recording


class GraphSizes(Record):
    """``decodes``: batch sizes of decode steps that get a graph; ``prompts``: numbers of tokens of
    steps with parts of prompts that get one. ``has_adapters``: steps with adapters get others."""

    decodes: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    has_adapters: bool = False

    @property
    def num_families(self) -> int:
        """Sets of graphs of all these sizes."""
        return 1 + self.has_adapters

    @property
    def max_tokens(self) -> int:
        """The most tokens of a step that is recorded, drafts included."""
        return max((*self.decodes, *self.prompts, DRAFT_TOKENS))


NO_GRAPHS = GraphSizes()


def graph_sizes(
    max_size: int,
    wanted: Sequence[int] | None = None,
    largest: int | None = None,
    pads: bool = True,
) -> tuple[int, ...]:
    """Batch sizes that get a graph, at most ``max_size``: ``wanted``, or 1, 2, 4, 8, 16, 24, 32 and
    then every 16th up to ``largest`` (or ``max_size``); without padding, every size up to 160."""
    top = min(max_size, largest or max_size)
    if wanted:
        return tuple(sorted({size for size in wanted if size <= max_size}))
    if not pads:
        return tuple(range(1, min(top, 160) + 1))
    sizes = {1, 2, 4, 8, 24, *range(16, top + 1, SIZE_STEP), top}
    return tuple(sorted(size for size in sizes if size <= top))


def prompt_sizes(
    step_tokens: int, wanted: Sequence[int] | None = None, largest: int | None = None
) -> tuple[int, ...]:
    """Numbers of tokens of steps with parts of prompts that get a graph, at most ``step_tokens``:
    ``wanted``, or powers of two and the middles between them from 32 to ``largest`` (1024)."""
    if wanted:
        return tuple(sorted({size for size in wanted if size <= step_tokens}))
    top = min(step_tokens, largest or MOST_PROMPT_TOKENS)
    sizes, size = {top}, FEWEST_PROMPT_TOKENS
    while size < top:
        sizes |= {size, min(top, size + size // 2)}
        size *= 2
    return tuple(sorted(sizes))


def prompt_rows(num_tokens: int, num_slots: int) -> int:
    """Sequences of a graph of steps with prompts: the most that such a step can have, and one for
    its padding."""
    return min(num_tokens, num_slots) + 1


def draft_widths(max_drafts: int) -> tuple[int, ...]:
    """Tokens of the decode rows with drafts that get graphs: powers of two, and the most."""
    most = 1 + max_drafts
    return tuple(sorted({width for width in (2, 4, 8, 16, most) if 1 < width <= most}))


class StepGraphs:
    def __init__(self, device: Device, sizes: Sequence[int], pads: bool = True) -> None:
        self._device, self._pads = device, pads
        self.sizes = tuple(sorted(sizes))
        self._graphs: dict[int, Graph] = {}
        self._logits_BV: Tensor | None = None
        self._num_rows: dict[int, int] = {}  # of logits

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else 0

    def size_for(self, count: int) -> int:
        """The size of the graph for ``count`` rows, 0 if there is none."""
        at = bisect.bisect_left(self.sizes, count)
        if at == len(self.sizes) or not (self._pads or self.sizes[at] == count):
            return 0
        return self.sizes[at] if self.sizes[at] in self._graphs else 0

    def capture(
        self, run: Callable[[int], Tensor], prepare: Callable[[int], None] | None = None
    ) -> None:
        """Record ``run``, which computes the logits of a step of a size, after ``prepare`` has
        filled its inputs; the largest size first, as the others use its memory again."""
        began_s = logged_s = time.perf_counter()
        for done, size in enumerate(reversed(self.sizes), 1):
            if prepare is not None:
                prepare(size)
            self._graphs[size] = self._device.capture(partial(self._run_and_store, run, size))
            now_s = time.perf_counter()
            if now_s - logged_s > REPORT_S or done == len(self.sizes):
                logged_s = now_s
                log.info(
                    "graphs: %d of %d sizes recorded in %s",
                    done,
                    len(self.sizes),
                    format_seconds(now_s - began_s),
                )

    def fitting(self, width: int) -> StepGraphs:
        """Graphs of rows of ``width`` tokens, none with more tokens than the largest of these, or
        than ``DRAFT_TOKENS``."""
        most = max(self.largest, DRAFT_TOKENS)
        sizes = tuple(size for size in self.sizes if size * width <= most)
        return StepGraphs(self._device, sizes, self._pads)

    def _run_and_store(self, run: Callable[[int], Tensor], size: int) -> None:
        logits_BV = run(size)
        if self._logits_BV is None or size == self.largest:
            # the largest graph's own result is the buffer
            self._logits_BV = logits_BV
        else:
            self._logits_BV[: len(logits_BV)].copy_(logits_BV)
        self._num_rows[size] = len(logits_BV)

    def replay(self, size: int) -> Tensor:
        """Launch the graph; its logits, valid until the next graph is launched."""
        self._graphs[size].replay()
        assert self._logits_BV is not None
        return self._logits_BV[: self._num_rows[size]]
