"""Groups the (token, choice) slots of a step by expert, on the device and in buffers whose size
depends on shapes only: no synchronization, and CUDA graphs can capture it.

Every expert's slots start at a multiple of ``block`` and are in ascending order:

    sorted slots   | e0 slots, pad | e1 slots, pad | e3 slots, pad | unused |
    block owners   |      0        |   1       1   |      3        |   -1   |

Legend: S slots (tokens * top_k), E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.triton.launch import launch, next_power_of_2

_CHUNKS = (128, 1024)  # slots that a program looks at in one go, of few and of many
_EXPERTS = (64, 512)  # experts that a program counts, at most; else the next power of two
_MAX_BLOCK = tl.constexpr(128)


class Aligned(Record):
    """``slots``: int32 [max_blocks * block], padded with S. ``owners``: int32 [max_blocks], the
    expert of each block of slots, -1 after the last one. ``ends``: int32 [E], where each expert's
    slots would end without padding."""

    slots: Tensor
    owners: Tensor
    ends: Tensor
    block: int
    max_blocks: int


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["counts_ptr"])
def count_kernel(ids_ptr, counts_ptr, num_slots, CHUNK: tl.constexpr):
    """A program counts the slots of one expert."""
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(
    do_not_specialize=["num_slots", "num_experts", "max_blocks", "block_size"],
    do_not_specialize_on_alignment=["counts_ptr", "owners_ptr", "ends_ptr"],
)
def place_kernel(
    ids_ptr, counts_ptr, slots_ptr, owners_ptr, ends_ptr, num_slots, num_experts, max_blocks,
    block_size, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program writes the slots of one expert, their padding and the owners of their blocks; the
    one after the last expert marks the blocks that nobody owns."""
    expert = tl.program_id(0)
    every = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + every, mask=every < num_experts, other=0)
    blocks = (counts + block_size - 1) // block_size
    first = tl.sum(tl.where(every < expert, blocks, 0), 0)
    own = tl.sum(tl.where(every == expert, blocks, 0), 0)
    if expert == num_experts:
        for start in range(first, max_blocks, CHUNK):
            block = start + tl.arange(0, CHUNK)
            tl.store(owners_ptr + block, tl.full((CHUNK,), -1, tl.int32), mask=block < max_blocks)
    else:
        tl.store(ends_ptr + expert, tl.sum(tl.where(every <= expert, counts, 0), 0))
        for start in range(0, own, CHUNK):
            block = start + tl.arange(0, CHUNK)
            tl.store(owners_ptr + first + block, expert + block * 0, mask=block < own)
        done = first * block_size
        for start in range(0, num_slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
            is_own = (ids == expert).to(tl.int32)
            at = done + tl.cumsum(is_own, 0) - is_own
            tl.store(slots_ptr + at, slot, mask=is_own != 0)
            done += tl.sum(is_own, 0)
        pad = tl.arange(0, _MAX_BLOCK)
        end = (first + own) * block_size
        tl.store(slots_ptr + done + pad, num_slots + pad * 0, mask=done + pad < end)


def max_blocks(num_slots: int, num_experts: int, block: int) -> int:
    """The largest number of blocks that any choice of experts can need."""
    return max(1, min(num_slots, num_slots // block + num_experts))


def align(ids_TK: Tensor, num_experts: int, block: int) -> Aligned:
    """Group slots t * K + k by their expert, ``block`` (at most 128) at a time."""
    ids = ids_TK.contiguous()
    num_slots, device = ids.numel(), ids.device
    blocks = max_blocks(num_slots, num_experts, block)
    joint = torch.empty(2 * num_experts + blocks * (block + 1), dtype=torch.int32, device=device)
    slots, owners, counts, ends = joint.split([blocks * block, blocks, num_experts, num_experts])
    chunk = next((chunk for chunk in _CHUNKS if num_slots <= chunk), _CHUNKS[-1])
    num_lanes = next_power_of_2(num_experts)
    launch(count_kernel, (num_experts,), (ids, counts), (num_slots,), CHUNK=chunk, num_warps=4)
    launch(
        place_kernel, (num_experts + 1,),
        (ids, counts, slots, owners, ends), (num_slots, num_experts, blocks, block),
        BLOCK_E=next((e for e in _EXPERTS if num_lanes <= e), num_lanes), CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return Aligned(slots, owners, ends, block, blocks)
