"""StepResult: what a step produced, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record, field
from radixlm.step.plan import Int32Array
from radixlm.wire.replies import Logprobs

# what the last pipeline stage sends to rank 0 of a step: logits of its rows, hidden states of all
# tokens, hidden states that a drafter reads, logits of prompt tokens; and each later stage: the
# experts that tokens chose
LOGITS, HIDDEN, TAPS, TARGETS = "logits", "hidden", "taps", "targets"
CHOICES = "choices"


class ItemResult(msgspec.Struct, gc=False):
    """Of one item. ``tokens``: sampled tokens (one, and one more for each drafted token that was
    accepted; none for a chunk that does not end its prompt). ``hidden_states``: float32 bytes
    [places, dim], and behind each row, or instead of it, the chosen experts as int32 [layers,
    top_k], as the item asks; refused drafts have none; or the rows of ``PoolingParams.per_token``.
    ``error``: this request alone has failed,
    with the HTTP ``status``."""

    tokens: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden_states: bytes | None = None
    pooled: list[float] | None = None
    error: str | None = None
    status: int = 500

    @property
    def is_only_tokens(self) -> bool:
        """Whether there are tokens and nothing else to tell."""
        return (
            len(self.tokens) > 0
            and self.error is None
            and self.logprobs is None
            and self.hidden_states is None
        )


class Proposals(Record, eq=False):
    """Drafted tokens for the next step, by item that emits: ``lens`` of each, then flat ``tokens``
    and ``survival`` (float32): the estimated chance that the token and those before it are
    accepted. ``parents`` (flat): of trees, the index in its item of the draft before each, -1 for
    none; parents come first. None: each follows the one before it."""

    lens: Int32Array
    tokens: Int32Array
    survival: NDArray[np.float32]
    parents: Int32Array | None = None


class StepResult(Record):
    """``tokens``: of the sequences that decode, in the order of the plan's decode batch; with
    ``counts`` so many of each (accepted drafts + 1), else one of each.
    ``detailed``: by index, those of them with more than tokens. ``prefills``: the other items.
    ``proposals``: of the device's drafter. ``winners``: by index, sequences that decode whose
    tokens a further path of drafts has given (an index into ``Items.paths``), in its pages."""

    tokens: Int32Array
    detailed: Mapping[int, ItemResult] = field(default_factory=dict)
    prefills: Sequence[ItemResult] = ()
    counts: Int32Array | None = None
    proposals: Proposals | None = None
    winners: Mapping[int, int] = field(default_factory=dict)
