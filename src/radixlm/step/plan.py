"""StepPlan: what the scheduler decides for a step, in numbers; the executor makes tensors of it.

A sequence of a step is an ``Item``: tokens [start, start + count) of the request in ``slot``.
A chunk carries its token values; a decode item (``tokens`` None) takes the value from the device's
token table, where the sampler wrote it, so that the host may plan ahead of the results. A decode
item with k drafted tokens to verify (``Drafts``) has count 1 + k.

Most steps decode the same sequences as the step before. These are held as columns
(``DecodeBatch``), and Items of them are made only when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record, field
from radixlm.wire.media import Media
from radixlm.wire.requests import LogprobParams, PoolingParams
from radixlm.wire.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence of a step. ``emit``: a token is sampled after its last place (of a decode item:
    after each of its places).

    Prompt log-probabilities are wanted of the ids ``targets``, which follow the item's places from
    ``targets_at`` (an offset into the item) on. ``page_row``: of a further path of drafts
    (``Drafts.paths``), the row of the page tables that has its pages; -1: that of its slot.
    """

    rid: str
    slot: int
    start: int
    count: int
    tokens: Int32Array | None
    emit: bool
    logprobs: LogprobParams | None = None
    targets_at: int = 0
    targets: Int32Array | None = None
    hidden_states: bool = False
    pooling: PoolingParams | None = None
    page_row: int = -1
    routed_experts: bool = False


class DecodeBatch(Record, eq=False):
    """Sequences that decode: each takes its one token from the token table and emits one. The same
    object comes step after step until somebody joins or leaves, so what is made of it may be kept.

    ``logprobs``: what is wanted besides tokens, by index; ``hidden`` and ``routed``: indices whose
    hidden states and chosen experts are wanted."""

    rids: tuple[str, ...]
    slots: NDArray[np.int64]
    logprobs: Mapping[int, LogprobParams] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()
    routed: frozenset[int] = frozenset()


_NO_TOKENS = np.zeros(0, np.int32)
EMPTY_DECODES = DecodeBatch((), np.zeros(0, np.int64))


class Drafts(Record, eq=False):
    """Drafted tokens of the rows of a DecodeBatch, in order. Row n verifies ``lens[n]`` of them (0:
    none), which stand one row after another in ``tokens``; None: those that the device's drafter
    has proposed last, which the host does not know yet.

    ``is_late``: rows of which a step with drafts is still in flight. Their starts count all of its
    drafts as accepted, and the device subtracts those that it has refused.

    ``continues``: no drafts, but tokens of the model itself: the step computes its rows up to
    ``lens[n] + 1`` times, one token each, and samples each time. ``tokens`` is None.

    ``paths``: further paths of trees of drafts, of which ``tokens`` has the first. Each is an item
    of its row's slot and start, with the row's token and the path's drafts as ``tokens``, in pages
    of its own (``page_row``); it is sampled after each of its places."""

    lens: Int32Array
    tokens: Int32Array | None
    is_late: NDArray[np.bool_] | None = None
    paths: tuple[Item, ...] = ()
    continues: bool = False


class Items(Sequence[Item]):
    """The sequences of a step: those that decode, then the ``prefills``, then further paths of
    drafts.

    The n-th that decodes computes the tokens at ``starts[n]`` to ``starts[n] + drafts.lens[n]``:
    the first from the device's token table, the others from ``drafts``. Each of these places has
    logits. Without ``drafts`` each row has one token."""

    __slots__ = ("_whole", "decodes", "drafts", "prefills", "starts")

    def __init__(
        self,
        decodes: DecodeBatch,
        starts: NDArray[np.int64],
        prefills: tuple[Item, ...] = (),
        drafts: Drafts | None = None,
    ) -> None:
        self.decodes, self.starts, self.prefills = decodes, starts, prefills
        self.drafts = drafts
        self._whole: tuple[Item, ...] | None = None if len(starts) else prefills

    @staticmethod
    def of(items: Sequence[Item]) -> Items:
        """The same items; those that decode and stand in front become columns."""
        if isinstance(items, Items):
            return items
        count = next((i for i, it in enumerate(items) if not _is_decode(it)), len(items))
        front = items[:count]
        decodes = DecodeBatch(
            tuple(item.rid for item in front),
            np.array([item.slot for item in front], np.int64),
            {i: item.logprobs for i, item in enumerate(front) if item.logprobs is not None},
            frozenset(i for i, item in enumerate(front) if item.hidden_states),
            frozenset(i for i, item in enumerate(front) if item.routed_experts),
        )
        starts = np.array([item.start for item in front], np.int64)
        return Items(decodes, starts, tuple(items[count:]))

    @property
    def num_tokens(self) -> int:
        num_drafted = 0 if self.drafts is None else int(self.drafts.lens.sum())
        return len(self.starts) + num_drafted + sum(item.count for item in self.others)

    @property
    def more_N(self) -> Int32Array | None:
        """Tokens behind the first that the rows compute one after another (``continues``)."""
        return self.drafts.lens if self.drafts is not None and self.drafts.continues else None

    def first_tokens(self) -> Items:
        """The same sequences with one token each."""
        return Items(self.decodes, self.starts, self.prefills)

    @property
    def paths(self) -> tuple[Item, ...]:
        """The further paths of drafts."""
        return () if self.drafts is None else self.drafts.paths

    @property
    def others(self) -> tuple[Item, ...]:
        """The sequences behind those that decode, which have tokens of their own."""
        return (*self.prefills, *self.paths) if self.paths else self.prefills

    def drafts_of(self, index: int) -> Int32Array:
        """The drafted tokens of an item, as far as the host knows them."""
        if index >= len(self) - len(self.paths):
            tokens = self[index].tokens
            return _NO_TOKENS if tokens is None else tokens[1:]
        if self.drafts is None or self.drafts.tokens is None or index >= len(self.drafts.lens):
            return _NO_TOKENS
        end = int(self.drafts.lens[: index + 1].sum())
        return self.drafts.tokens[end - int(self.drafts.lens[index]) : end]

    def __len__(self) -> int:
        return len(self.starts) + len(self.prefills) + len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        return self._made()[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._made())

    def _made(self) -> tuple[Item, ...]:
        if self._whole is None:
            them = self.decodes
            counts = [1] * len(self.starts)
            if self.drafts is not None:
                counts = (self.drafts.lens + 1).tolist()
            rows = zip(them.rids, them.slots.tolist(), self.starts.tolist(), counts, strict=True)
            decodes = [
                Item(
                    *row,
                    None,
                    True,
                    them.logprobs.get(i),
                    0,
                    None,
                    i in them.hidden,
                    routed_experts=i in them.routed,
                )
                for i, row in enumerate(rows)
            ]
            self._whole = (*decodes, *self.others)
        return self._whole


def _is_decode(item: Item) -> bool:
    return item.tokens is None and item.emit and item.count == 1 and item.pooling is None


class Admission(Record):
    """A request that enters ``slot`` in this step. ``output_ids``: tokens it has produced before
    (a retraction or a restart). ``embeds``: float32 [prompt, dim] instead of the table's rows.
    ``media`` and ``rope_ids`` [3, prompt]: as in the request. ``adapter``: number of the loaded
    LoRA adapter, -1 for none, which changes the tokens from ``adapter_start`` on.
    ``reasoning_bound``: custom_params of a thinking_budget that comes after ``processor``."""

    rid: str
    slot: int
    sampling: SamplingParams
    prompt_ids: Int32Array
    output_ids: Int32Array
    embeds: NDArray[np.float32] | None = None
    media: tuple[Media, ...] = ()
    rope_ids: Int32Array | None = None
    processor: str | None = None
    adapter: int = -1
    adapter_start: int = 0
    reasoning_bound: dict[str, Any] | None = None


class PageUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Row ``slot`` of the page table of ``group`` gets ``pages`` from column ``first`` on."""

    group: int
    slot: int
    first: int
    pages: Int32Array


class NewPages(Record, eq=False):
    """One page more for each of some rows of the page table of group 0: row ``slots[i]`` gets
    ``pages[i]`` in ``columns[i]``."""

    slots: NDArray[np.int64]
    columns: NDArray[np.int64]
    pages: Int32Array


class PageCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What page ``source`` of the page space ``group`` holds is copied to page ``target``, of the
    request in ``slot``."""

    group: int
    slot: int
    source: int
    target: int


class StepPlan(Record):
    """One step. Releases, admissions, pages and copies, in this order, take effect before the
    forward pass. All copies are read before one is written. ``items`` as the scheduler makes them
    are ``Items``. ``draft_lens``: how many tokens the device's drafter proposes after this step, by
    item that emits; None: it rests and sees nothing of the step."""

    index: int
    items: Sequence[Item]
    admissions: tuple[Admission, ...] = ()
    releases: tuple[int, ...] = ()
    pages: tuple[PageUpdate, ...] = ()
    feature_data: dict[str, Any] = field(default_factory=dict)
    new_pages: NewPages | None = None
    copies: tuple[PageCopy, ...] = ()
    draft_lens: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        return Items.of(self.items).num_tokens
