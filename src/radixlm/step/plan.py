"""StepPlan: what the scheduler decides, in numbers; the executor makes tensors of it.

A sequence of a step is an ``Item``: tokens [start, start + count) of the request in ``slot``.
A chunk carries its token values; a decode item (``tokens`` None, count 1) takes the value from the
device's token table, where the sampler wrote it, so that the host may plan ahead of the results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.wire.media import Media
from radixlm.wire.requests import LogprobNeed, PoolingNeed
from radixlm.wire.sampling_params import SamplingParams

Ids = NDArray[np.int32]


class Item(msgspec.Struct, frozen=True, gc=False):
    """One sequence of a step. ``emit``: a token is sampled after its last place.

    Prompt log-probabilities are wanted of the ids ``targets``, which follow the item's places from
    ``targets_at`` (an offset into the item) on.
    """

    rid: str
    slot: int
    start: int
    count: int
    tokens: Ids | None
    emit: bool
    logprobs: LogprobNeed | None = None
    targets_at: int = 0
    targets: Ids | None = None
    hidden_states: bool = False
    pooling: PoolingNeed | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that enters ``slot`` in this step. ``output_ids``: tokens it has produced before
    (a retraction or a restart). ``embeds``: float32 [prompt, dim] instead of the table's rows.
    ``media`` and ``rope_ids`` [3, prompt]: as in the request."""

    rid: str
    slot: int
    sampling: SamplingParams
    prompt_ids: Ids
    output_ids: Ids
    embeds: NDArray[np.float32] | None = None
    media: tuple[Media, ...] = ()
    rope_ids: Ids | None = None
    processor: str | None = None


class PageUpdate(msgspec.Struct, frozen=True, gc=False):
    """Row ``slot`` of the page table of ``group`` gets ``pages`` from column ``first`` on."""

    group: int
    slot: int
    first: int
    pages: Ids


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Updates, admissions and releases take effect before the forward pass."""

    index: int
    items: tuple[Item, ...]
    admissions: tuple[Admission, ...] = ()
    releases: tuple[int, ...] = ()
    pages: tuple[PageUpdate, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)
