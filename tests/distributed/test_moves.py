"""Experts that change their slots: against a plain placement, and when they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.test_groups import together
from tests.fakes.thread_groups import thread_groups
from torch import Tensor

from radixlm.base.errors import InvariantError
from radixlm.distributed.balance import placement_of, rebalance, trivial
from radixlm.distributed.groups import Group
from radixlm.distributed.moves import exchange_slots
from radixlm.distributed.rebalance import RebalanceOptions, Rebalancer
from radixlm.distributed.record import ChoiceReader, ExpertRecorder, RecorderOptions, StepTokens

EXPERTS, SLOTS = 12, 16
STEP = StepTokens([], [], [], "DECODE")


def weights(expert: int) -> list[Tensor]:
    """What an expert consists of, in two dtypes."""
    return [torch.full((3, 5), float(expert)), torch.full((7,), expert, dtype=torch.int8)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_slot_gets_its_expert(ranks: int) -> None:
    draw = np.random.default_rng(ranks)
    each = SLOTS // ranks
    for _ in range(5):
        old, new = (
            rebalance(draw.integers(0, 99, (1, 1, EXPERTS)), SLOTS, ranks).logical_LP[0].tolist()
            for _ in range(2)
        )

        def run(group: Group, old: list[int] = old, new: list[int] = new) -> list[list[Tensor]]:
            held = [weights(e) for e in old[group.rank * each : (group.rank + 1) * each]]
            exchange_slots(group, old, new, held.__getitem__)
            return held

        found = [slot for held in together(thread_groups(ranks), run) for slot in held]
        for slot, expert in zip(found, new, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(slot, weights(expert), strict=True))


def test_a_row_of_another_expert_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = thread_groups(2)
    for group in groups:
        monkeypatch.setattr(group, "all_to_all_rows", lambda x, send, receive: x.flip(0))

    def run(group: Group) -> str:
        held = [weights(0), weights(1)]
        with pytest.raises(InvariantError, match="got expert"):
            exchange_slots(group, [0, 1, 2, 3], [1, 0, 3, 2], lambda slot: held[slot])
        return "refused"

    assert together(groups, run) == ["refused"] * 2


class Layer:
    """A layer whose tokens choose what a test says."""

    chosen: Tensor | None = None

    def record(self, is_on: bool) -> None:
        pass

    def take_chosen(self) -> Tensor | None:
        return self.chosen


def rebalancer(layers: list[Layer], **options: object) -> tuple[ExpertRecorder, Rebalancer]:
    options = {"num_steps": 4, "num_layers": 0, "threshold": 1.0, "algorithm": "auto"} | options
    recorder = ExpertRecorder(
        ChoiceReader(layers), trivial(len(layers), 4, 6),
        RecorderOptions("", 10, 2, Path(), is_always_on=True),
    )  # fmt: skip
    return recorder, Rebalancer(recorder, RebalanceOptions(**options))  # type: ignore[arg-type]


def step(recorder: ExpertRecorder, layers: list[Layer]) -> None:
    recorder.count([layer.chosen for layer in layers], lambda: STEP)


def due_in(one: Rebalancer, layers: int) -> list[list[int]]:
    """The layers of each of the moves that come."""
    assert one.due() is None  # begins
    assert one._future is not None
    one._future.result(10)
    moved = []
    while len(moved) < layers and (due := one.due()) is not None:
        moved.append([layer for layer, _ in due["rows"]])
    return moved


def test_layers_move_some_at_a_time_after_so_many_steps() -> None:
    layers = [Layer(), Layer(), Layer()]
    recorder, one = rebalancer(layers, num_layers=2)
    for layer in layers:
        layer.chosen = torch.tensor([[3], [3], [3], [2]])
    for _ in range(4):
        assert one.due() is None and one._future is None
        step(recorder, layers)
    assert due_in(one, 2) == [[0, 1], [2]]
    assert one.due() is None and one._future is None, "only every four steps"


def test_places_that_cannot_be_computed_are_left_until_the_next_time() -> None:
    layers = [Layer()]
    recorder, one = rebalancer(layers, algorithm="none of them")
    layers[0].chosen = torch.tensor([[3], [3], [3], [2]])
    for _ in range(2):
        for _ in range(4):
            step(recorder, layers)
        assert one.due() is None and one._future is not None
        assert isinstance(one._future.exception(10), ValueError)
        assert one.due() is None and one._future is None, "it is told once"


def test_balanced_experts_stay() -> None:
    layers = [Layer()]
    recorder, one = rebalancer(layers, threshold=0.7)
    recorder.placement = placement_of(np.array([[0, 1, 2, 3, 0, 1]]), 4)
    layers[0].chosen = torch.tensor([[0], [2], [2], [3]])  # 2.5 and 1.5 of 4 tokens: 0.8
    for _ in range(4):
        step(recorder, layers)
    assert recorder.mean_balance == pytest.approx(0.8)
    assert one.due() is None and one._future is None


def test_counts_that_were_written_to_a_file_begin_nothing() -> None:
    layers = [Layer()]
    recorder, one = rebalancer(layers)
    layers[0].chosen = torch.tensor([[0]])
    for _ in range(4):
        step(recorder, layers)
    recorder.counts_SLE.clear()
    assert one.due() is None and one._future is None
