"""StepResult: what a step produced, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

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


@dataclass(slots=True)
class StepResult:
    """In the order of the plan's items."""

    items: list[ItemResult]
