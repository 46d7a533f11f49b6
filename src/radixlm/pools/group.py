"""KvGroup: the attention layers that share one pool and one page table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with the same KV shape and window.

    ``name`` tells which page space of the scheduler the pages come from: groups of the same name
    (models whose layers differ in KV shape) use the same page ids, each in a pool of its own.
    ``layers`` are the model's layer numbers; a layer's place in the tuple is its row of the pool.
    ``latent`` means that V is the first ``v_dim`` channels of K and is not stored;
    ``has_entries`` that its rows are sums of many tokens, beside rows of the same layers elsewhere.
    """

    index: int
    name: Literal["full", "window"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    v_dim: int
    latent: bool = False
    window: int = 0
    has_entries: bool = False

    @property
    def numbers_per_token(self) -> int:
        """How many numbers one token takes in this group, over all its layers."""
        channels = self.head_dim if self.latent else self.head_dim + self.v_dim
        return len(self.layers) * self.kv_heads * channels
