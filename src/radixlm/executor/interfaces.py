"""What a runner calls: the model, the attention backend, and what features add to its steps.

Legend: T tokens of a step, R rows with logits, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from radixlm.distributed.record import Choices, StepTokens
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.results import Head, StepHandle
from radixlm.executor.step_layout import StepPacker, StepShape
from radixlm.kernels.ops.lora import LoraRows
from radixlm.step.batch import AttentionRunner, ForwardBatch
from radixlm.step.masks import Follow
from radixlm.step.plan import Int32Array, Items, PageCopy, StepPlan
from radixlm.step.result import ItemResult
from radixlm.wire.media import Media


class Model(Head, Protocol):
    """``step`` returns (hidden states [T, D] if they are needed, logits [R, V] if rows have
    them)."""

    def step(
        self, batch: ForwardBatch, need_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None]: ...


class Attention(AttentionRunner, Protocol):
    """The attention backend; ``begin`` is called with each step before its layers run."""

    def begin(self, batch: ForwardBatch) -> None: ...


class Adapters(Protocol):
    """Which adapter each slot uses."""

    def reset(self, num_slots: int) -> None:
        """No slot uses any."""

    def assign(self, slot: int, number: int, start: int = 0) -> None:
        """The slot's request uses an adapter from token ``start`` on; -1: none."""

    def rows(self, items: Items) -> LoraRows | None:
        """The tokens of a step that have adapters; None if there are none."""


class Encoder(Protocol):
    """Encodes the media of prompts, and knows other inputs besides token ids."""

    def put(
        self, plan: StepPlan, tables: DeviceTables, batch: ForwardBatch
    ) -> dict[str, ItemResult]:
        """Write the embeddings of this step's placeholders into the batch, and what else its
        requests bring besides token ids. Returns request id -> error for the requests whose media
        failed; the others go on."""

    def check(self, media: Media, rid: str, failed: dict[str, ItemResult]) -> None:
        """Encode one media, and note an error likewise."""


class ExpertChoices(Protocol):
    """Takes which experts tokens choose, for those who ask."""

    rows_T: Tensor | None  # of each token of the step, its row among those that ran

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the last layer, too, must see the tokens that need no logits."""

    def due_moves(self) -> dict[str, Any] | None:
        """Experts that should move before the next step: arguments of the command move_experts."""

    def are_wanted(self, items: Items) -> bool:
        """Whether somebody asks what the tokens of a step choose."""

    def begin(self) -> None:
        """A step is about to run whose choices are wanted."""

    def take(self) -> Choices | None:
        """What the tokens of the step that has run chose, for rank 0 to ``tell``; else None."""

    def tell(self, step: StepHandle, chosen: Choices, tokens: Callable[[], StepTokens]) -> None:
        """Hand on what the tokens of a step chose in the layers of all stages."""


class StepEnd(Protocol):
    """Follows each step, as a drafter does. Has tables by slot and page beside the runner's."""

    def run(self, step: StepHandle) -> None:
        """Launch its work of a step, behind sampling. It may extend ``step.sampled_N`` by what the
        step's plan asks it for (``StepHandle.proposed_shape``)."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages inside its own pools."""

    def release(self, slot: int) -> None:
        """The request of this slot is over."""


class FurtherTokens(Protocol):
    """Samples the tokens of steps that go on by themselves (``Drafts.continues``)."""

    def sample(
        self, step: StepHandle, more_N: Int32Array, mask_RW: Tensor | None, follow: Follow | None
    ) -> None:
        """Sample a token of each row, and up to ``more_N`` behind it; sets the step's result."""


class GraphChoice(NamedTuple):
    """The graph of a step: its ``rows``, 0 for none, and the tokens of each; or, of a step with
    parts of prompts, its sequences and its ``num_tokens``. ``is_adapted``: it runs adapters."""

    rows: int = 0
    width: int = 1
    num_tokens: int = 0
    is_adapted: bool = False


class Graphs:
    """Which steps run as graphs, and their launch: here none."""

    def choose(
        self, items: Items, feature_data: Mapping[str, Any], need_hidden: bool
    ) -> GraphChoice:
        """The graph that runs a step."""
        return GraphChoice()

    def pack(
        self, items: Items, choice: GraphChoice, packer: StepPacker, host: Tensor
    ) -> tuple[StepShape, int]:
        """Write the inputs of a step as its graph takes them; its shape, and how many of the
        integers of ``host`` are used."""
        return packer.pack(items, host)

    def fill_adapters(self, items: Items, choice: GraphChoice) -> None:
        """Launch what a step with adapters needs besides its graph."""
        raise NotImplementedError

    def replay(self, step: StepHandle, choice: GraphChoice) -> None:
        """Launch the step's graph; sets its logits, and what ``StepEnd`` reads."""
        raise NotImplementedError
