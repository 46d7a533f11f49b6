"""PlanCodec: a StepPlan as bytes for the ranks that compute it but do not sample.

Left out is what only rank 0 needs: request ids, sampling parameters, prompts (chunks carry their
tokens), what log-probabilities are wanted, and the drafter's lengths. Added is what only rank 0
knows: the tokens that it has sampled for the rows that decode. Arrays are little-endian int32.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import InvariantError
from radixlm.base.record import replace
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
from radixlm.wire.sampling_params import SamplingParams

Int64Array = NDArray[np.int64]
_ZERO = np.zeros(1, np.int32)
_NO_SAMPLING = SamplingParams()


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
    """A plan. ``slots`` None: the rows that decode are those of the plan before. ``known``: the
    tokens of these rows, then of the other items that come without. ``hidden`` and ``routed``: as
    in a ``DecodeBatch``."""

    index: int
    slots: Int64Array | None
    starts: Int64Array
    known: Int64Array
    hidden: tuple[int, ...]
    routed: tuple[int, ...]
    drafts: tuple[Int32Array, Int32Array] | None
    others: tuple[Item, ...]
    entries: tuple[_Entry, ...]
    releases: tuple[int, ...]
    pages: tuple[PageUpdate, ...]
    new_pages: NewPages | None
    copies: tuple[PageCopy, ...]
    feature_data: dict[str, Any]


class RankPlan(msgspec.Struct, frozen=True):
    """A plan as a rank reads it: request ids are "", ``known_slots`` get ``known_tokens`` before
    the step."""

    plan: StepPlan
    known_slots: Int64Array
    known_tokens: Int64Array


class PlanEncoder:
    """Rank 0's side."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_bytes)
        self._decodes: DecodeBatch | None = None

    def encode(self, plan: StepPlan, next_token: Int64Array) -> bytes:
        """``next_token``: by slot, the last token that was sampled."""
        items = Items.of(plan.items)
        decodes, drafts = items.decodes, items.drafts
        if drafts is not None and drafts.tokens is None:
            raise InvariantError("drafts that only the device knows do not travel with a plan")
        is_same, self._decodes = decodes is self._decodes, decodes
        frame = _Frame(
            plan.index,
            None if is_same else decodes.slots,
            items.starts,
            next_token[_known_slots(items)],
            tuple(decodes.hidden),
            tuple(decodes.routed),
            None if drafts is None or drafts.tokens is None else (drafts.lens, drafts.tokens),
            tuple(replace(item, rid="", logprobs=None) for item in items.others),
            tuple(map(_entry, plan.admissions)),
            plan.releases,
            plan.pages,
            plan.new_pages,
            plan.copies,
            plan.feature_data,
        )
        return self._encoder.encode(frame)


class PlanDecoder:
    """The side of a rank that does not sample."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Frame, dec_hook=_array)
        self._decodes = EMPTY_DECODES

    def decode(self, data: bytes | memoryview) -> RankPlan:
        """InvariantError for data that is no plan."""
        try:
            frame = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise InvariantError(f"a malformed plan: {error}") from error
        if frame.slots is not None:
            rids = ("",) * len(frame.slots)
            rows = frozenset(frame.hidden), frozenset(frame.routed)
            self._decodes = DecodeBatch(rids, frame.slots, {}, *rows)
        others, drafts = frame.others, None
        prefills = tuple(item for item in others if item.page_row < 0)
        if frame.drafts is not None:
            drafts = Drafts(*frame.drafts, paths=others[len(prefills) :])
        items = Items(self._decodes, frame.starts, prefills, drafts)
        plan = StepPlan(
            frame.index,
            items,
            tuple(map(_admission, frame.entries)),
            frame.releases,
            frame.pages,
            frame.feature_data,
            frame.new_pages,
            frame.copies,
        )
        return RankPlan(plan, _known_slots(items), frame.known)


def _known_slots(items: Items) -> Int64Array:
    """Of the items whose tokens rank 0 has sampled."""
    late = [item.slot for item in items.others if item.tokens is None]
    slots = items.decodes.slots
    return np.append(slots, late).astype(np.int64) if late else slots


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


def _bytes(numbers: Any) -> bytes:
    return np.ascontiguousarray(numbers, "<i4").tobytes()


def _ints(data: bytes) -> Int32Array:
    return np.frombuffer(data, "<i4")


def _array(kind: Any, data: bytes) -> Int32Array | Int64Array:
    numbers = _ints(data)
    return numbers.astype(np.int64) if kind == Int64Array else numbers
