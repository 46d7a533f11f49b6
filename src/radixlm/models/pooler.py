"""Hidden states -> one vector or some scores a request: embeddings, rewards, classes.

Legend: N places of a request, T tokens of a chunk, D model width.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from radixlm.arch.spec import Pool
from radixlm.step.plan import Item
from radixlm.wire.requests import PoolingParams


class Head(Protocol):
    """What turns pooled rows [R, D] into vectors or scores [R, O]. ``is_raw``: of PoolingParams."""

    pool: Pool

    def run(self, x_RI: Tensor, is_raw: bool = False) -> Tensor: ...


class _LastPlace:
    """Default head: the vector of the last place, at unit length."""

    pool = Pool(after="unit")

    def run(self, x_RI: Tensor, is_raw: bool = False) -> Tensor:
        return x_RI if is_raw else torch.nn.functional.normalize(x_RI, dim=-1)


class Pooler:
    """Collects the chunks of a request, pools them as the head's record says, runs the head."""

    def __init__(self, head: Head | None = None) -> None:
        self._head: Head = head or _LastPlace()
        self._kinds = self._head.pool.pooling.split("+")
        self._marks = torch.tensor(self._head.pool.marks, dtype=torch.int64)
        self._kept: dict[str, dict[str, Tensor]] = {}

    @property
    def num_kept(self) -> int:
        """Requests of which some chunks have come, and not yet the last."""
        return len(self._kept)

    def forget(self, rid: str) -> None:
        """The request has left, perhaps before its last chunk."""
        self._kept.pop(rid, None)

    def add(self, item: Item, hidden_TD: Tensor, prompt_len: int) -> list[float] | None:
        """The vector or the scores once the last chunk has come, else None. What the head got (but
        for "late" and "steps") is behind them if the request wants it."""
        hidden_TD = hidden_TD.float()
        kept = self._kept.get(item.rid, {}) if item.start else {}
        for kind in self._kinds:
            self._take(kind, kept, item, hidden_TD)
        if item.start + item.count < prompt_len:
            self._kept[item.rid] = kept
            return None
        self._kept.pop(item.rid, None)
        asked = item.pooling or PoolingParams()
        if self._kinds == ["late"]:
            return _numbers(self._head.run(kept["late"], asked.is_raw).mean(0))
        if self._kinds == ["steps"]:
            return _numbers(self._head.run(kept["steps"], asked.is_raw))
        pooled = torch.cat([self._pool(kind, kept, prompt_len) for kind in self._kinds])
        found = _numbers(self._head.run(pooled[None], asked.is_raw))
        return found + _numbers(pooled) if asked.with_hidden else found

    def rows(self, hidden_CD: Tensor, is_raw: bool = False) -> Tensor:
        """float32 [C, O]: what the head gives for each token, without pooling."""
        return self._head.run(hidden_CD.float(), is_raw).float()

    def _take(self, kind: str, kept: dict[str, Tensor], item: Item, hidden_TD: Tensor) -> None:
        """Add one chunk to what is kept for a kind of pooling. Sums are of 64 bits: those of 16 bit
        states are exact, and so do not depend on the chunks."""
        if kind in ("mean", "mean_sqrt"):
            total = hidden_TD.sum(0, dtype=torch.float64)
            kept[kind] = total + kept[kind] if kind in kept else total
        elif kind == "weighted":
            places = torch.arange(item.start, item.start + item.count, device=hidden_TD.device) + 1
            total = (hidden_TD * places.double()[:, None]).sum(0)
            kept[kind] = total + kept[kind] if kind in kept else total
        elif kind == "max":
            top = hidden_TD.amax(0)
            kept[kind] = torch.maximum(top, kept[kind]) if kind in kept else top
        elif kind == "cls":
            kept.setdefault(kind, hidden_TD[0])
        elif kind == "last":
            kept[kind] = hidden_TD[-1]
        elif kind == "late" or (kind == "steps" and not len(self._marks)):
            kept[kind] = torch.cat((kept[kind], hidden_TD)) if kind in kept else hidden_TD
        else:
            self._take_marked(kind, kept, item, hidden_TD)

    def _take_marked(
        self, kind: str, kept: dict[str, Tensor], item: Item, hidden_TD: Tensor
    ) -> None:
        """Places whose token is one of the marks: all of them, or the last (else the last)."""
        assert item.tokens is not None and kind in ("steps", "marked")
        is_marked_T = torch.isin(torch.as_tensor(item.tokens).long(), self._marks)
        found = hidden_TD[is_marked_T.to(hidden_TD.device)]
        if kind == "steps":
            kept[kind] = torch.cat((kept[kind], found)) if kind in kept else found
        else:
            if len(found):
                kept[kind] = found[-1]
            kept["last"] = hidden_TD[-1]

    def _pool(self, kind: str, kept: dict[str, Tensor], prompt_len: int) -> Tensor:
        if kind == "mean":
            return (kept[kind] / prompt_len).float()
        if kind == "mean_sqrt":
            return (kept[kind] / math.sqrt(prompt_len)).float()
        if kind == "weighted":
            return (kept[kind] / (prompt_len * (prompt_len + 1) / 2)).float()
        return kept[kind] if kind in kept else kept["last"]  # no place is marked


def _numbers(values: Tensor) -> list[float]:
    return [float(x) for x in values.reshape(-1).tolist()]
