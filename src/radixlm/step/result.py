"""StepResult: what a step produced, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from radixlm.base.record import Record, field
from radixlm.step.plan import Int32Array, Item, Items
from radixlm.wire.replies import Logprobs


class ItemResult(msgspec.Struct, gc=False):
    """Of one item. ``tokens``: sampled tokens (one without speculation, none for a chunk that does
    not end its prompt). ``hidden_states``: float32 bytes [places, dim]. ``error``: this request
    alone has failed."""

    tokens: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden_states: bytes | None = None
    pooled: list[float] | None = None
    error: str | None = None

    @property
    def is_single_token(self) -> bool:
        """Whether there is a token and nothing else to tell."""
        return (
            len(self.tokens) == 1
            and self.error is None
            and self.logprobs is None
            and self.hidden_states is None
        )


class StepResult(Record):
    """``tokens``: of the sequences that decode, in the order of the plan's decode batch.
    ``detailed``: by index, those of them with more than a token. ``prefills``: the other items."""

    tokens: Int32Array
    detailed: Mapping[int, ItemResult] = field(default_factory=dict)
    prefills: Sequence[ItemResult] = ()

    @staticmethod
    def of(plan_items: Sequence[Item], results: Sequence[ItemResult]) -> StepResult:
        """The results of all items, in their order."""
        count = len(Items.of(plan_items).starts)
        front = results[:count]
        tokens = np.array([got.tokens[0] if got.tokens else 0 for got in front], np.int32)
        odd = {i: got for i, got in enumerate(front) if not got.is_single_token}
        return StepResult(tokens, odd, results[count:])

    @property
    def items(self) -> list[ItemResult]:
        """A result an item, in the order of the plan."""
        tokens = enumerate(self.tokens.tolist())
        front = [
            self.detailed[i] if i in self.detailed else ItemResult((token,)) for i, token in tokens
        ]
        return [*front, *self.prefills]
