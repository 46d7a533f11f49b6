"""--enable-mfu-metrics: what the model computed, read and wrote, estimated from shapes of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radixlm.base.record import Record
from radixlm.scheduler.hooks import Feature
from radixlm.step.plan import Item, Items


class CacheCost(Record):
    """Of the layers that share a pool: ``flops`` of one query and one token that it attends to,
    ``num_bytes`` of a token in the cache; ``window``: the newest tokens that are read, 0: all."""

    flops: float
    num_bytes: float
    window: int = 0

    def read(self, contexts: Any) -> Any:
        """Of so many tokens, those that the layers read."""
        return np.minimum(contexts, self.window) if self.window else contexts

    def pairs(self, start: int, count: int) -> int:
        """Queries at [start, start + count) times the tokens that each attends to."""
        whole = count if not self.window else min(count, max(0, self.window - start))
        return whole * start + whole * (whole + 1) // 2 + (count - whole) * self.window


class ModelCost(Record):
    """What one device has of a model. ``dense``: numbers in the matrices that each token is
    multiplied by; ``head``: in the output head; ``experts``: of all experts, of which a token takes
    the share ``chosen``; ``weight_bytes``: of one such number."""

    dense: int
    head: int
    experts: int
    chosen: float
    weight_bytes: float
    caches: tuple[CacheCost, ...]


class CostFeature(Feature):
    """Counts floating point operations, and bytes read and written: weights once a step, and the
    KV cache. Activations, draft models and media encoders are left out; tokens in turn that a step
    ends before are counted."""

    def __init__(self, cost: ModelCost) -> None:
        self.cost = cost
        self._flops = self._read = self._written = 0.0

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        cost, items = self.cost, Items.of(items)
        num_tokens = items.num_tokens
        num_rows = num_tokens - sum(item.count for item in items.prefills)  # with logits
        num_rows += sum(item.emit for item in items.prefills)
        self._flops += 2.0 * num_tokens * (cost.dense + cost.experts * cost.chosen)
        self._flops += 2.0 * num_rows * cost.head
        experts = cost.experts * min(1.0, num_tokens * cost.chosen)
        head = cost.head if num_rows else 0
        drafted = 0 if items.drafts is None else items.drafts.lens
        passes = 1 if items.more_N is None else 1 + int(items.more_N.max())
        self._read += passes * (cost.dense + head + experts) * cost.weight_bytes
        ends = items.starts + 1 + drafted
        for cache in cost.caches:
            pairs = int((cache.read(ends) * (1 + drafted)).sum())
            pairs += sum(cache.pairs(item.start, item.count) for item in items.others)
            read = int(cache.read(ends).sum())
            read += sum(int(cache.read(item.start)) + item.count for item in items.others)
            self._flops += cache.flops * pairs
            self._read += cache.num_bytes * read
            self._written += cache.num_bytes * num_tokens
        return {}

    def stats(self) -> dict[str, float]:
        names = ("estimated_flops", "estimated_read_bytes", "estimated_write_bytes")
        return dict(zip(names, (self._flops, self._read, self._written), strict=True))
