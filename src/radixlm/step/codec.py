"""PlanCodec: a StepPlan as bytes for the ranks that compute it but do not sample.

Left out is what only rank 0 needs: request ids, sampling parameters, prompts (chunks carry their
tokens), log-probabilities and the drafter's lengths. Added is what only rank 0 knows: the tokens
that it has sampled for the rows that decode. Arrays are little-endian int32.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import InvariantError
from radixlm.step.plan import (
    EMPTY_DECODES,
    Admission,
    DecodeBatch,
    Drafts,
    Int32Array,
    Item,
    Items,
    NewPages,
    PageCopy,
    PageUpdate,
    StepPlan,
)
from radixlm.wire.media import Media
from radixlm.wire.requests import PoolingParams
from radixlm.wire.sampling_params import SamplingParams

Int64Array = NDArray[np.int64]
_ZERO = np.zeros(1, np.int32)
_NO_SAMPLING = SamplingParams()


class _Chunk(msgspec.Struct, array_like=True, gc=False):
    """An item that does not decode, or a further path of drafts. ``tokens`` None: its one token is
    ``known``."""

    slot: int
    start: int
    count: int
    tokens: bytes | None
    known: int
    emit: bool
    targets_at: int
    num_targets: int  # -1: none are wanted
    hidden_states: bool
    pooling: PoolingParams | None
    page_row: int


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """An admission. ``embeds`` are float32 of ``dim`` numbers a token; ``rope_ids`` int32
    [3, prompt]."""

    slot: int
    prompt_len: int
    adapter: int
    adapter_start: int
    dim: int
    embeds: bytes
    media: tuple[Media, ...]
    rope_ids: bytes


class _Frame(msgspec.Struct, array_like=True, gc=False):
    """A plan. ``slots`` None: the rows that decode are those of the plan before."""

    index: int
    slots: bytes | None
    starts: bytes
    known: bytes
    hidden: tuple[int, ...]
    drafts: tuple[bytes, bytes] | None
    chunks: tuple[_Chunk, ...]
    entries: tuple[_Entry, ...]
    releases: tuple[int, ...]
    pages: tuple[tuple[int, int, int, bytes], ...]
    new_pages: tuple[bytes, bytes, bytes] | None
    copies: tuple[tuple[int, int, int, int], ...]
    feature_data: dict[str, Any]


class RankPlan(msgspec.Struct, frozen=True):
    """A plan as a rank reads it: request ids are "", ``known_slots`` get ``known_tokens`` before
    the step."""

    plan: StepPlan
    known_slots: Int64Array
    known_tokens: Int32Array


class PlanEncoder:
    """Rank 0's side."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decodes: DecodeBatch | None = None

    def encode(self, plan: StepPlan, next_token: Int64Array) -> bytes:
        """``next_token``: by slot, the last token that was sampled."""
        items = Items.of(plan.items)
        decodes, drafts, new = items.decodes, items.drafts, plan.new_pages
        if drafts is not None and drafts.tokens is None:
            raise InvariantError("drafts that only the device knows do not travel with a plan")
        is_same, self._decodes = decodes is self._decodes, decodes
        frame = _Frame(
            plan.index,
            None if is_same else _bytes(decodes.slots),
            _bytes(items.starts),
            _bytes(next_token[decodes.slots]),
            tuple(decodes.hidden),
            None if drafts is None else (_bytes(drafts.lens), _bytes(drafts.tokens)),
            tuple(_chunk(item, next_token) for item in items.others),
            tuple(map(_entry, plan.admissions)),
            plan.releases,
            tuple((p.group, p.slot, p.first, _bytes(p.pages)) for p in plan.pages),
            None if new is None else (_bytes(new.slots), _bytes(new.columns), _bytes(new.pages)),
            tuple((c.group, c.slot, c.source, c.target) for c in plan.copies),
            plan.feature_data,
        )
        return self._encoder.encode(frame)


class PlanDecoder:
    """The side of a rank that does not sample."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Frame)
        self._decodes = EMPTY_DECODES

    def decode(self, data: bytes | memoryview) -> RankPlan:
        """InvariantError for data that is no plan."""
        try:
            frame = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise InvariantError(f"a malformed plan: {error}") from error
        if frame.slots is not None:
            slots = _ints(frame.slots).astype(np.int64)
            self._decodes = DecodeBatch(("",) * len(slots), slots, {}, frozenset(frame.hidden))
        decodes, chunks = self._decodes, frame.chunks
        others, drafts = tuple(map(_item, chunks)), None
        prefills = tuple(item for item in others if item.page_row < 0)
        if frame.drafts is not None:
            lens, tokens = map(_ints, frame.drafts)
            drafts = Drafts(lens, tokens, paths=others[len(prefills) :])
        starts = _ints(frame.starts).astype(np.int64)
        items = Items(decodes, starts, prefills, drafts)
        new = None
        if frame.new_pages is not None:
            new_slots, columns, pages = map(_ints, frame.new_pages)
            new = NewPages(new_slots.astype(np.int64), columns.astype(np.int64), pages)
        plan = StepPlan(
            frame.index,
            items,
            tuple(map(_admission, frame.entries)),
            frame.releases,
            tuple(PageUpdate(g, slot, first, _ints(p)) for g, slot, first, p in frame.pages),
            frame.feature_data,
            new,
            tuple(PageCopy(*copy) for copy in frame.copies),
        )
        late = [chunk for chunk in chunks if chunk.tokens is None]
        known_slots = np.append(decodes.slots, [chunk.slot for chunk in late]).astype(np.int64)
        known = np.append(_ints(frame.known), [chunk.known for chunk in late]).astype(np.int32)
        return RankPlan(plan, known_slots, known)


def _chunk(item: Item, next_token: Int64Array) -> _Chunk:
    return _Chunk(
        item.slot,
        item.start,
        item.count,
        None if item.tokens is None else _bytes(item.tokens),
        int(next_token[item.slot]) if item.tokens is None else 0,
        item.emit,
        item.targets_at,
        -1 if item.targets is None else len(item.targets),
        item.hidden_states,
        item.pooling,
        item.page_row,
    )


def _item(chunk: _Chunk) -> Item:
    targets = None if chunk.num_targets < 0 else np.broadcast_to(_ZERO, chunk.num_targets)
    return Item(
        "",
        chunk.slot,
        chunk.start,
        chunk.count,
        None if chunk.tokens is None else _ints(chunk.tokens),
        chunk.emit,
        None,
        chunk.targets_at,
        targets,
        chunk.hidden_states,
        chunk.pooling,
        chunk.page_row,
    )


def _entry(one: Admission) -> _Entry:
    embeds = one.embeds
    return _Entry(
        one.slot,
        len(one.prompt_ids),
        one.adapter,
        one.adapter_start,
        0 if embeds is None else embeds.shape[1],
        b"" if embeds is None else np.ascontiguousarray(embeds, np.float32).tobytes(),
        one.media,
        b"" if one.rope_ids is None else _bytes(one.rope_ids),
    )


def _admission(entry: _Entry) -> Admission:
    """An admission whose prompt has the right length, and zeros for ids."""
    embeds = rope_ids = None
    if entry.dim:
        embeds = np.frombuffer(entry.embeds, np.float32).reshape(-1, entry.dim)
    if entry.rope_ids:
        rope_ids = _ints(entry.rope_ids).reshape(3, -1)
    prompt = np.broadcast_to(_ZERO, entry.prompt_len)
    return Admission(
        "", entry.slot, _NO_SAMPLING, prompt, _ZERO[:0], embeds, entry.media, rope_ids,
        adapter=entry.adapter, adapter_start=entry.adapter_start,
    )  # fmt: skip


def _bytes(numbers: NDArray[Any] | None) -> bytes:
    return b"" if numbers is None else np.ascontiguousarray(numbers, "<i4").tobytes()


def _ints(data: bytes) -> Int32Array:
    return np.frombuffer(data, "<i4")
