"""Hidden states -> one vector or score a request: embeddings, rewards, classes.

Legend: T tokens of a chunk, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from radixlm.step.plan import Item

# a head (reward, classification) turns the pooled vector into scores
Head = Callable[[Tensor], Tensor]


class Pooler:
    """Collects the chunks of a request. ``pooling`` is "last", "mean" or "cls", with "+norm" for
    unit length or "+head" for the model's score head."""

    def __init__(self, head: Head | None = None) -> None:
        self._head = head
        self._sums: dict[str, Tensor] = {}

    def forget(self, rid: str) -> None:
        """The request has left, perhaps before its last chunk."""
        self._sums.pop(rid, None)

    def add(self, item: Item, hidden_TD: Tensor, prompt_len: int) -> list[float] | None:
        """The pooled vector once the last chunk has come, else None."""
        kind, _, after = (item.pooling or "last").partition("+")
        is_last = item.start + item.count == prompt_len
        if kind == "mean":
            total = hidden_TD.float().sum(0)
            total = total + self._sums[item.rid] if item.start else total
            self._sums[item.rid] = total
            pooled = total / prompt_len
        elif kind == "cls":
            if not item.start:
                self._sums[item.rid] = hidden_TD[0].float()
            pooled = self._sums[item.rid]
        else:
            pooled = hidden_TD[-1].float()
        if not is_last:
            return None
        self._sums.pop(item.rid, None)
        if after == "head" and self._head is not None:
            pooled = self._head(pooled)
        if after == "norm":
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return [float(x) for x in pooled.reshape(-1).tolist()]
