"""Trees of a draft model: they are EAGLE-2's choice, each branch reads its own path, and the
entries of the known text stay what they are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixlm.sampling.noise import draw_keys, gumbel_noise
from radixlm.sampling.table import SamplingTable
from radixlm.speculative.device.draft_draws import Draw, sharpness
from radixlm.speculative.device.draft_trees import Tree
from radixlm.speculative.device.model_drafter import ModelDrafter
from radixlm.speculative.trees import MAX_ROWS, TreeShape
from radixlm.step.batch import ForwardBatch
from radixlm.wire.sampling_params import SamplingParams
from tests.speculative.test_model_drafter import (
    COLUMNS,
    PAGE,
    SLOTS,
    VOCAB,
    MemoryNet,
    Pool,
    World,
    run_steps,
)

SEEN = 5  # last tokens on which the next depends


def logits_behind(tokens: list[int]) -> Tensor:
    """What follows these tokens."""
    seed = hash(tuple(tokens[-SEEN:])) % (1 << 31)
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, VOCAB)).float()


class TreeNet(MemoryNet):
    """The next token depends on the last ones, as read through the page table."""

    def draft_step(
        self, batch: ForwardBatch, hidden_TD: Tensor | None, passes_all: bool = False
    ) -> Any:
        out = super().draft_step(batch, hidden_TD, passes_all)
        rows = []
        starts = batch.query_start_S1.tolist()
        for row in batch.logits_rows_R.tolist():
            sequence = next(s for s in range(len(starts) - 1) if row < starts[s + 1])
            end = int(batch.kv_len_S[sequence]) - (starts[sequence + 1] - 1 - row)
            pages = batch.page_table_GSP[0][sequence].tolist()
            places = [pages[p // PAGE] * PAGE + p % PAGE for p in range(max(0, end - SEEN), end)]
            entries = [self.entries.get(place, ("none", None))[0] for place in places]
            rows.append(logits_behind([token for token in entries if token != "hole"]))
        return SimpleNamespace(logits_RV=torch.stack(rows), hidden_RD=out.hidden_RD)


class CopyingPool(Pool):
    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        entries, given = self.net.entries, {}
        assert len(set(targets)) == len(targets) and min(targets) > SLOTS * COLUMNS
        for source, target in zip(sources, targets, strict=True):
            for i in range(PAGE):
                given[target * PAGE + i] = entries.get(source * PAGE + i, ("none", None))
        entries |= given


class TreeWorld(World):
    def __init__(self, seed: int, is_head: bool, shape: TreeShape) -> None:
        super().__init__(seed, is_head)
        self.net = TreeNet(is_head)
        attn = SimpleNamespace(pools=[CopyingPool(self.net)], begin=lambda batch: None)
        self.drafter = ModelDrafter(self.net, attn, self.tables, PAGE, VOCAB, tree=shape)
        self.found: dict[int, Any] = {}
        propose = self.drafter.propose

        def watched(tail: Any, lens_R: Any) -> Any:
            found = propose(tail, lens_R)
            for row, slot in enumerate(tail.slots_R.tolist()):
                parts = (found.tokens_RK, found.survival_RK, found.parents_RK)
                self.found[slot] = [one[row].tolist() for one in parts]
            return found

        self.drafter.propose = watched  # type: ignore[method-assign]


def grown(text: list[int], shape: TreeShape, depth: int) -> list[tuple[tuple[int, ...], float]]:
    """The paths of the best drafts with their products, one draft after another."""
    made: list[tuple[tuple[int, ...], float]] = []
    front: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(depth):
        new = []
        for path, product in front:
            chances = torch.softmax(logits_behind([*text, *path]).double(), -1)
            best = chances.argsort(descending=True)[: shape.branches].tolist()
            new += [((*path, token), product * float(chances[token])) for token in best]
        made += new
        front = sorted(new, key=lambda one: -one[1])[: shape.branches]
    return sorted(made, key=lambda one: -one[1])[: shape.size]


@pytest.mark.parametrize("is_head", [True, False])
@pytest.mark.parametrize(("branches", "size"), [(2, 5), (3, 9), (4, 7)])
def test_trees_are_the_best_drafts(branches: int, size: int, is_head: bool) -> None:
    shape = TreeShape(branches, size, 4, SLOTS * COLUMNS + 1)
    for seed in range(4):
        world, chance = TreeWorld(seed, is_head, shape), random.Random(seed)
        for slot in range(SLOTS):
            world.start(slot, chance.randrange(SEEN + 2, 40))
        for lens in run_steps(world, chance, 12):
            for slot, count in lens.items():
                text = world.texts[slot]
                tokens, products, parents = world.found[slot]
                paths: list[tuple[int, ...]] = []
                for token, parent in zip(tokens, parents, strict=True):
                    paths.append((*(paths[parent] if parent >= 0 else ()), token))
                found = {p: s for p, s in zip(paths, products, strict=True) if p[-1] >= 0}
                wanted = dict(grown(text, shape, count))
                assert set(found) == set(wanted)
                assert found == pytest.approx(wanted, rel=1e-4)
                world.check(slot, len(text))


def test_many_rows_grow_in_parts() -> None:
    """More requests than there are pages for at once."""
    grow, parts = [], []

    class Parts(ModelDrafter):
        pass

    shape = TreeShape(2, 3, 2, 1)
    net = TreeNet(False)
    world = World(0, False)
    attn = SimpleNamespace(pools=[CopyingPool(net)], begin=lambda batch: None)
    trees = Parts(net, attn, world.tables, PAGE, VOCAB, tree=shape)._trees
    assert trees is not None
    trees._grow = lambda slots, *rest: parts.append(len(slots)) or grow  # type: ignore
    count = 2 * MAX_ROWS + 3
    out = SimpleNamespace(hidden_RD=None, logits_RV=torch.zeros(count, VOCAB))
    trees.grow(np.zeros(count, np.int64), np.ones(count, np.int32), out.logits_RV, out, None)  # type: ignore[arg-type]
    assert parts == [MAX_ROWS, MAX_ROWS, 3]


def test_a_tree_keeps_the_drafts_before_those_it_keeps() -> None:
    """Also where products are equal."""
    chance = np.random.default_rng(0)
    for _ in range(50):
        tree = Tree(2, 12)
        tree.add(np.arange(6).reshape(2, 3), chance.choice([0.25, 0.5, 1.0], (2, 3)), -1)
        for _ in range(3):
            parents = chance.integers(0, tree.num, (2, 3))
            products = np.take_along_axis(tree.scores, parents, 1)
            products = products * chance.choice([0.5, 1.0], (2, 3))
            tree.add(parents + 10, products, parents)
        tokens, products, parents = tree.best(7)
        for row in range(2):
            assert (parents[row] < np.arange(7)).all()
            before = np.where(parents[row] < 0, 1.0, products[row][parents[row]])
            assert (products[row] <= before).all() and (tokens[row] >= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6])
def test_branches_are_drawn_as_chains_are(temperature: float) -> None:
    """The first branch is the draft of a chain; with noise, the others follow in its order."""
    table, rows = SamplingTable(2, VOCAB), np.array([0, 0, 1, 1, 1])
    for slot in range(2):
        params = SamplingParams(temperature=temperature, sampling_seed=slot)
        table.set(slot, params, [])
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    positions = torch.arange(7, 12)
    draw = Draw([table.states[0], table.states[1]], None, VOCAB)
    tokens, chances = draw.branches(logits, positions, rows, 3)
    chain = Draw([table.states[row] for row in rows], None, VOCAB)
    assert tokens[:, 0].tolist() == chain(logits, positions)[0].tolist()
    scores = logits / max(temperature, 1.0 if temperature == 0 else temperature)
    if temperature > 1:
        noise = gumbel_noise(
            draw_keys(torch.from_numpy(rows), positions), torch.arange(VOCAB)[None].int()
        )
        scores = scores * sharpness(temperature) + noise
    best = scores.softmax(-1).topk(3)
    assert tokens.tolist() == best.indices.tolist()
    assert chances == pytest.approx(best.values.numpy(), rel=1e-4)
