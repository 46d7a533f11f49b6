"""The inputs of steps as graphs take them: filled up to fixed numbers of rows and tokens.

Rows and tokens that fill a step up are the dummy slot's. They read nothing and write to page 0.

Legend: N decodes, W tokens of each, R rows of logits.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from radixlm.executor.step_layout import (
    COUNT,
    FIRST_TOKEN,
    FROM_TABLE,
    IS_LATE,
    KV_LEN,
    NEXT_TOKEN,
    PARAMS,
    POSITION,
    ROPE_LEN,
    SAMPLE_SLOT,
    SLOT,
    START,
    TOKEN,
    StepPacker,
    StepShape,
)
from radixlm.sampling.plain import SamplingKinds
from radixlm.step.plan import EMPTY_DECODES, Items

Packed = tuple[StepShape, int]
"""The shape of a step, and how many of the integers of its buffer are used."""


def pack_decodes(items: Items, size: int, packer: StepPacker, host: Tensor) -> Packed:
    """Decodes of one token each, for a graph of ``size`` rows."""
    shape = packer.pack_decodes(items, host, size)
    return shape, packer.pack_updates(shape, host)


def pack_mixed(
    items: Items, size: int, num_tokens: int, packer: StepPacker, host: Tensor
) -> Packed:
    """A step that may have prompts, for a graph of ``num_tokens`` tokens of ``size`` sequences."""
    shape = packer.pack_mixed(items, host)
    _pad_mixed(shape, size, num_tokens, packer, host)
    return shape, packer.pack_updates(shape, host)


def dummy_decodes(count: int, packer: StepPacker, host: Tensor) -> Packed:
    """A step of ``count`` decodes of the dummy slot."""
    packer.head(host)[:, : count + 1] = packer.make_template(EMPTY_DECODES, count).head
    return _empty_shape(), packer.num_head


def dummy_prompt(size: int, num_tokens: int, packer: StepPacker, host: Tensor) -> Packed:
    """A step of ``num_tokens`` tokens of the dummy slot, among ``size`` sequences."""
    shape = _empty_shape()
    packer.head(host)[:] = 0
    _pad_mixed(shape, size, num_tokens, packer, host)
    return shape, packer.num_head + num_tokens


def _empty_shape() -> StepShape:
    return StepShape(0, 0, 0, 0, 0, EMPTY_DECODES.slots, SamplingKinds(True, True, False), False)


def _pad_mixed(
    shape: StepShape, size: int, num_tokens: int, packer: StepPacker, host: Tensor
) -> None:
    """Fill a step up to ``num_tokens`` tokens of ``size`` sequences, and as many rows of logits.
    One sequence of the dummy slot gets the missing tokens; those behind it are empty."""
    head = packer.head(host)
    count, used = shape.num_sequences, shape.num_tokens
    head[SLOT, count:size] = packer.tables.dummy
    for field in (START, COUNT, KV_LEN, IS_LATE):
        head[field, count:size] = 0
    head[ROPE_LEN, count:size] = 1
    head[COUNT, count : min(count + 1, size)] = num_tokens - used
    head[FIRST_TOKEN, count + 1 : size + 1] = num_tokens
    head[TOKEN, shape.num_rows : size] = 0
    host.numpy()[packer.num_head + used : packer.num_head + num_tokens] = 0
    shape.num_padded = num_tokens


def pack_drafted(items: Items, size: int, width: int, packer: StepPacker, host: Tensor) -> Packed:
    """Decodes with drafts, ``width`` tokens each, for a graph of ``size`` rows. Tokens behind
    COUNT are void: they are stored in page 0, and no draft is compared with what they draw."""
    drafts, decodes, starts = items.drafts, items.decodes, items.starts
    assert drafts is not None
    tables, params, head = packer.tables, packer.params, packer.head(host)
    count = len(starts)
    slots = np.full(size, tables.dummy, np.int64)
    slots[:count] = decodes.slots
    offsets = np.arange(width)
    slots_R = np.repeat(slots[:count], width)
    rows = len(slots_R)
    head[SLOT, :size], head[ROPE_LEN, :size] = slots, tables.prompt_len[slots]
    head[START, :size] = head[COUNT, :size] = head[IS_LATE, :size] = 0
    head[START, :count], head[COUNT, :count] = starts, drafts.lens + 1
    head[IS_LATE, :count] = 0 if drafts.is_late is None else drafts.is_late
    head[SAMPLE_SLOT, :rows] = slots_R
    head[TOKEN, :rows] = token_R = np.arange(rows)
    is_draft_NW = offsets[1:] <= drafts.lens[:, None]
    next_NW = np.full((count, width), -1)
    next_NW[:, :-1] = np.where(is_draft_NW, token_R.reshape(count, width)[:, 1:], -1)
    head[NEXT_TOKEN, :rows] = next_NW.ravel()
    head[POSITION, :rows] = (starts[:, None] + offsets + 1).ravel()
    head[PARAMS:, :rows] = params.params_PS[:, slots_R]
    values = host.numpy()[packer.num_head :][: size * width].reshape(size, width)
    values[:] = 0
    values[:, 0] = FROM_TABLE
    values[:count, 1:][is_draft_NW] = (
        np.broadcast_to(FROM_TABLE - offsets[1:], is_draft_NW.shape)[is_draft_NW]
        if drafts.tokens is None
        else drafts.tokens
    )
    kinds, max_kv_len = params.kinds(decodes.slots), int(starts.max()) + width
    shape = StepShape(count, rows, 0, width, max_kv_len, slots_R, kinds, is_decode=False)
    shape.first_A1 = np.arange(count + 1) * width
    shape.num_decodes, shape.num_padded = count, size * width
    return shape, packer.pack_updates(shape, host)
