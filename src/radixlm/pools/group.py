"""KvGroup: the attention layers that share one pool and one page table."""

from __future__ import annotations

import math
from typing import Literal

from radixlm.base.record import Record


class KvGroup(Record):
    """Layers with the same KV shape and window.

    ``name``: the scheduler's page space. Groups of the same name (in models whose layers differ in
    KV shape) use the same page ids, each in its own pool. ``layers``: the model's layer numbers; a
    layer's index in the tuple is its row of the pool. ``latent``: V is the first ``v_dim`` channels
    of K and is not stored. ``compress_ratio`` > 0: a row is a sum of so many tokens, beside
    uncompressed rows of the same layers in another group; a page then has fewer rows than tokens.
    """

    index: int
    name: Literal["full", "window"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    v_dim: int
    latent: bool = False
    window: int = 0
    compress_ratio: int = 0

    def tokens_per_row(self, page_size: int) -> int:
        """Tokens of a page that share a row: as many as divide both a sum and a page."""
        return math.gcd(self.compress_ratio, page_size) if self.compress_ratio else 1

    def rows_per_page(self, page_size: int) -> int:
        """Rows of a page of so many tokens."""
        return page_size // self.tokens_per_row(page_size)
