"""Inputs of steps besides token ids that few of them have: embeddings, M-RoPE ids, token types."""

import numpy as np
import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.step.batch import ForwardBatch, MRopeIds
from radixlm.step.plan import Item, Items, StepPlan


def add_optional_inputs(plan: StepPlan, tables: DeviceTables, batch: ForwardBatch) -> None:
    """Add them to the batch of the plan."""
    if tables.num_with_extras:
        _add_embeds(plan, tables, batch)
        _add_rope_ids(plan, tables, batch)
    if any(map(_first_text_len, Items.of(plan.items).prefills)):
        _add_token_types(plan, batch)


def _add_embeds(plan: StepPlan, tables: DeviceTables, batch: ForwardBatch) -> None:
    """Input embeddings that the client sent instead of token ids."""
    first = 0
    for item in plan.items:
        embeds = tables.state(item.slot).embeds
        if embeds is not None and item.start < len(embeds):
            inputs = batch.add_embeds(embeds.shape[1])
            assert inputs.mask_T is not None
            rows = np.array(embeds[item.start : item.start + item.count])
            inputs.rows_TD[first : first + len(rows)] = torch.from_numpy(rows).to(tables.device)
            inputs.mask_T[first : first + len(rows)] = True
        first += item.count


def _add_token_types(plan: StepPlan, batch: ForwardBatch) -> None:
    """Mark the tokens of the second text of a pair."""
    token_types_T, first = np.zeros(batch.num_tokens, np.bool_), 0
    for item in plan.items:
        first_len = _first_text_len(item)
        if first_len:
            token_types_T[first + max(0, first_len - item.start) : first + item.count] = True
        first += item.count
    batch.token_types_T = torch.from_numpy(token_types_T).to(batch.device)


def _first_text_len(item: Item) -> int:
    """Tokens of the first text of a pair, 0 for a single text."""
    return item.pooling.first_len if item.pooling is not None else 0


def _add_rope_ids(plan: StepPlan, tables: DeviceTables, batch: ForwardBatch) -> None:
    """M-RoPE ids of the step, if a prompt has some. Ids of output tokens continue one by one from
    the largest id of the prompt."""
    if all(tables.state(item.slot).rope_ids is None for item in plan.items):
        return
    positions = [np.arange(item.start, item.start + item.count) for item in plan.items]
    ids_3T, first = np.tile(np.concatenate(positions), (3, 1)), 0
    for item in plan.items:
        prompt_ids = tables.state(item.slot).rope_ids
        if prompt_ids is not None:
            part = ids_3T[:, first : first + item.count]
            part += int(prompt_ids.max()) + 1 - prompt_ids.shape[1]
            in_prompt = prompt_ids[:, item.start : item.start + item.count]
            part[:, : in_prompt.shape[1]] = in_prompt
        first += item.count
    batch.mrope = MRopeIds(
        torch.from_numpy(ids_3T).to(batch.device),
        lambda index: _sequence_rope_ids(plan.items[index], tables, batch.device),
    )


def _sequence_rope_ids(item: Item, tables: DeviceTables, device: torch.device) -> Tensor | None:
    """int64 [3, N] of an item's sequence up to its last token; None without media."""
    prompt_ids = tables.state(item.slot).rope_ids
    if prompt_ids is None:
        return None
    num_output = max(0, item.start + item.count - prompt_ids.shape[1])
    output_ids = np.tile(int(prompt_ids.max()) + 1 + np.arange(num_output), (3, 1))
    return torch.from_numpy(np.concatenate((prompt_ids.astype(np.int64), output_ids), 1)).to(device)
