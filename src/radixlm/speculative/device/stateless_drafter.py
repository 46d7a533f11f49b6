"""StatelessDrafter: a drafter that keeps nothing from step to step. Each of its tokens is guessed
from the one before and from hidden states.

Legend: R rows that emit, V vocabulary, N channels of the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.models.taps import HiddenNeeds
from radixlm.speculative.device.draft_draws import Draw
from radixlm.speculative.device.drafter import DeviceProposals, DraftColumns, FitWatch, StepTail
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Int32Array, Items, PageCopy


class StatelessDrafter:
    """``max_drafts``: further drafts have the chance 0; None: any number. ``num_ids``: target
    tokens from this id on are never proposed. ``target_ids_V``: of the draft's vocabulary, if it
    has its own."""

    def __init__(
        self,
        hidden: HiddenNeeds | None,
        tables: DeviceTables,
        num_ids: int,
        max_drafts: int | None = None,
        target_ids_V: Tensor | None = None,
    ) -> None:
        self.hidden, self._tables, self._num_ids = hidden, tables, num_ids
        self._max_drafts, self._target_ids_V = max_drafts, target_ids_V
        self._fit = FitWatch()

    def _guess(
        self, depth: int, slots_R: Tensor, at_R: Tensor, tokens_R: Tensor, hidden_RN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, V] behind ``tokens_R``, and the hidden states for the next guess. ``at_R``:
        positions of the first ones."""
        raise NotImplementedError

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        columns = DraftColumns(lens_R, self._tables.device)
        index_R = columns.index_R
        slots_R, at_R = tail.slots_R[index_R], tail.positions_R[index_R]
        assert tail.hidden_TD is not None, "the target leaves no hidden states"
        tokens_R, hidden_RN = tail.next_tokens_R[index_R], tail.hidden_TD[tail.last_R[index_R]]
        states = [tail.sampling.states[slot] for slot in slots_R.tolist()]
        draw = Draw(states, self._target_ids_V, self._num_ids)
        for depth in range(int(lens_R.max()))[: self._max_drafts]:
            num = columns.num_rows(depth)
            logits_RV, hidden_RN = self._guess(
                depth, slots_R[:num], at_R[:num], tokens_R[:num], hidden_RN[:num]
            )
            tokens_R, chance_R = draw(logits_RV, at_R[:num] + depth + 1)
            columns.add(depth, tokens_R, chance_R)
        return columns.proposals()

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """There are no entries."""

    def extend(self, batch: ForwardBatch, tail: StepTail) -> None:
        """The target has stored all that is read."""
        self._fit.count(tail)

    def skip(self, items: Items) -> None:
        """Likewise."""

    def release(self, slot: int) -> None:
        """Nothing is known of the slot's request."""
