"""The batch of one step by itself."""

from __future__ import annotations

import torch

from radixlm.executor.batch_builder import BatchBuilder
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.step_layout import DeviceStepBuffer, StepPacker
from radixlm.media.optional_inputs import add_optional_inputs
from radixlm.sampling.plain import SamplingParamTable
from radixlm.step.batch import AttentionRunner, ForwardBatch
from radixlm.step.plan import Items, StepPlan


def prepare(
    plan: StepPlan,
    tables: DeviceTables,
    space_of_group: tuple[int, ...],
    page_size: int,
    attn: AttentionRunner,
) -> ForwardBatch:
    """The batch of one step by itself, from tables that the host and the device share."""
    params = SamplingParamTable(tables.num_slots, 1)
    packer = StepPacker(tables, params, plan.num_tokens, plan.num_tokens, 1)
    ints = torch.zeros(packer.num_ints, dtype=torch.int32)
    shape, _ = packer.pack(Items.of(plan.items), ints)
    builder = BatchBuilder(tables, DeviceStepBuffer(ints, packer), space_of_group, page_size, attn)
    if shape.is_decode:
        batch = builder.decodes(shape.num_sequences, shape.max_kv_len)
    else:
        batch = builder.mixed(shape)
    add_optional_inputs(plan, tables, batch)
    return batch
