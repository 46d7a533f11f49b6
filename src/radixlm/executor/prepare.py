"""StepPlan -> ForwardBatch: one pass in numpy, then tensors.

Legend: S sequences, T tokens, P pages.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixlm.executor.tables import SlotTables
from radixlm.step.batch import AttentionRunner, ForwardBatch
from radixlm.step.plan import Item, StepPlan
from radixlm.wire.media import plain_ids


def _token_values(plan: StepPlan, starts_S1: NDArray[np.int64]) -> NDArray[np.int64]:
    values_T = np.zeros(int(starts_S1[-1]), np.int64)
    for item, at in zip(plan.items, starts_S1, strict=False):
        if item.tokens is not None:
            values_T[at : at + item.count] = plain_ids(item.tokens)
    return values_T


def _rope_lengths(
    plan: StepPlan, tables: SlotTables, positions_T: NDArray[np.int64], starts_S1: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Prompt tokens turn as at the end of the prompt, output tokens as when they were made: the
    same whether a token is computed the first time, in chunks, or again after a retraction."""
    lengths_T = positions_T + 1
    for item, at in zip(plan.items, starts_S1, strict=False):
        prompt_len = tables.state(item.slot).prompt_len
        if item.start < prompt_len:
            part = lengths_T[at : at + item.count]
            np.maximum(part, prompt_len, out=part)
    return lengths_T


def prepare(
    plan: StepPlan,
    tables: SlotTables,
    space_of_group: tuple[int, ...],
    page_size: int,
    attn: AttentionRunner,
) -> ForwardBatch:
    """The tensors of one step. ``space_of_group[g]``: the page table that KV group g reads."""
    items = plan.items
    slots_S = np.fromiter((i.slot for i in items), np.int64, len(items))
    counts_S = np.fromiter((i.count for i in items), np.int64, len(items))
    first_S = np.fromiter((i.start for i in items), np.int64, len(items))
    starts_S1 = np.concatenate(([0], np.cumsum(counts_S)))
    kv_len_S = first_S + counts_S
    num_tokens = int(starts_S1[-1])
    seq_T = np.repeat(np.arange(len(items)), counts_S)
    positions_T = np.arange(num_tokens) - starts_S1[seq_T] + first_S[seq_T]
    values_T = torch.from_numpy(_token_values(plan, starts_S1)).to(tables.device)
    decoding_S = np.fromiter((i.tokens is None for i in items), bool, len(items))
    if decoding_S.any():
        at = torch.from_numpy(starts_S1[:-1][decoding_S]).to(tables.device)
        values_T[at] = tables.tokens_of(torch.from_numpy(slots_S[decoding_S]).to(tables.device))
    width = int(-(-kv_len_S.max() // page_size))
    page_SP = [table[slots_S, :width] for table in tables.pages]
    store = [
        p[seq_T, positions_T // page_size].astype(np.int64) * page_size + positions_T % page_size
        for p in page_SP
    ]

    def put(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(tables.device)

    page_tables = [put(p) for p in page_SP]
    stores = [put(s) for s in store]
    emit_S = np.fromiter((i.emit for i in items), bool, len(items))
    batch = ForwardBatch(
        token_ids_T=values_T,
        positions_T=put(positions_T),
        rope_len_T=put(_rope_lengths(plan, tables, positions_T, starts_S1)),
        query_start_S1=put(starts_S1.astype(np.int32)),
        kv_len_S=put(kv_len_S.astype(np.int32)),
        page_table_GSP=tuple(page_tables[s] for s in space_of_group),
        store_GT=tuple(stores[s] for s in space_of_group),
        logits_rows_R=put((starts_S1[1:] - 1)[emit_S]),
        attn=attn,
        max_query_len=int(counts_S.max()),
        max_kv_len=int(kv_len_S.max()),
        extras=plan.extras,
    )
    _put_embeds(plan, tables, batch, starts_S1)
    _put_pairs(plan, tables, batch, starts_S1)
    _put_rope_ids(plan, tables, batch, positions_T)
    return batch


def _put_pairs(
    plan: StepPlan, tables: SlotTables, batch: ForwardBatch, starts_S1: NDArray[np.int64]
) -> None:
    """Which tokens are of the second text of a pair."""
    pairs = [(i, at) for i, at in zip(plan.items, starts_S1, strict=False) if _first_len(i)]
    if not pairs:
        return
    second_T = np.zeros(batch.num_tokens, np.bool_)
    for item, at in pairs:
        second_T[at + max(0, _first_len(item) - item.start) : at + item.count] = True
    batch.second_T = torch.from_numpy(second_T).to(tables.device)


def _first_len(item: Item) -> int:
    return item.pooling.first_len if item.pooling is not None else 0


def _put_rope_ids(
    plan: StepPlan, tables: SlotTables, batch: ForwardBatch, positions_T: NDArray[np.int64]
) -> None:
    """What ropes with sections turn by, where a prompt of the step has media. Tokens behind the
    prompt go on one by one from its largest."""
    if all(tables.state(item.slot).rope_ids is None for item in plan.items):
        return
    ids_3T, at = np.tile(positions_T, (3, 1)), 0
    for item in plan.items:
        given = tables.state(item.slot).rope_ids
        if given is not None:
            num_prompt = given.shape[1]
            part = ids_3T[:, at : at + item.count]
            part += int(given.max()) + 1 - num_prompt
            inside = given[:, item.start : item.start + item.count]
            part[:, : inside.shape[1]] = inside
        at += item.count
    batch.rope_ids_3T = torch.from_numpy(ids_3T).to(tables.device)


def _put_embeds(
    plan: StepPlan, tables: SlotTables, batch: ForwardBatch, starts_S1: NDArray[np.int64]
) -> None:
    """Rows of the input embeddings that the client gave instead of token ids."""
    for item, at in zip(plan.items, starts_S1, strict=False):
        embeds = tables.state(item.slot).embeds
        if embeds is None or item.start >= len(embeds):
            continue
        if batch.embeds_TD is None:
            batch.embeds_TD = torch.zeros(batch.num_tokens, embeds.shape[1], device=tables.device)
            batch.embeds_mask_T = torch.zeros(
                batch.num_tokens, dtype=torch.bool, device=tables.device
            )
        assert batch.embeds_mask_T is not None
        rows = np.array(embeds[item.start : item.start + item.count])
        batch.embeds_TD[at : at + len(rows)] = torch.from_numpy(rows).to(tables.device)
        batch.embeds_mask_T[at : at + len(rows)] = True
