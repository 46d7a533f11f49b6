"""Experts change their slots, and ranks, while a model is loaded. Legend: P slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from radixlm.base.errors import InvariantError
from radixlm.distributed.balance import moves
from radixlm.distributed.groups import Group

_HEADER = 8  # bytes: the expert that a row is said to hold


def exchange_slots(
    group: Group,
    old_P: Sequence[int],
    new_P: Sequence[int],
    tensors_of: Callable[[int], Sequence[Tensor]],
) -> None:
    """Fill each slot with its new expert; every rank of the group calls this.

    ``tensors_of``: the memory of one of this rank's slots, by its number on the rank; all slots
    have the same shapes. What comes from other slots is copied first, then all is written."""
    each, rank = len(old_P) // group.size, group.rank
    away = [m for m in moves(np.array(old_P), np.array(new_P), group.size) if m.source != m.target]
    sent = sorted((m.target, m.source) for m in away if m.source // each == rank)
    taken = sorted((m.source // each, m.target) for m in away if m.target // each == rank)
    width = _HEADER + sum(tensor.nbytes for tensor in tensors_of(0))
    rows = [_packed(old_P[source], tensors_of(source - rank * each)) for _, source in sent]
    x = torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.uint8)
    ranks = range(group.size)
    send = tuple(sum(target // each == other for target, _ in sent) for other in ranks)
    receive = tuple(sum(source == other for source, _ in taken) for other in ranks)
    for (_, target), row in zip(taken, group.all_to_all_rows(x, send, receive), strict=True):
        expert = int(row[:_HEADER].clone().view(torch.int64))
        if expert != new_P[target]:
            raise InvariantError(f"slot {target} got expert {expert} in place of {new_P[target]}")
        _unpack(row[_HEADER:], tensors_of(target - rank * each))


def _packed(expert: int, tensors: Sequence[Tensor]) -> Tensor:
    header = torch.tensor([expert]).view(torch.uint8)
    return torch.cat([header, *(t.contiguous().view(-1).view(torch.uint8) for t in tensors)])


def _unpack(row: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(
        tensors, row.split_with_sizes([t.nbytes for t in tensors]), strict=True
    ):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
