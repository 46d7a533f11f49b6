"""BlockDrafter over a net that remembers what it was fed: each block reads the entries of the known
text, in its own request's pages, and stands in pages that are nobody's."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from radixlm.arch.draft import MaskedBlock
from radixlm.speculative.device.block_drafter import BlockDrafter
from radixlm.speculative.trees import TreeShape
from radixlm.step.batch import ForwardBatch
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

SIZE, MASK = 6, 3
FIRST_PAGE = SLOTS * (SLOTS * COLUMNS + 1)  # behind those of the text, with groups too


class CopyingPool(Pool):
    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        entries = self.net.entries
        for source, target in zip(sources, targets, strict=True):
            for offset in range(PAGE):
                entries[target * PAGE + offset] = entries.get(source * PAGE + offset, ("none", 0))


class BlockNet(MemoryNet):
    """Entries by place: (number in the hidden state,). A place tells the token of the block's first
    one plus its distance."""

    def __init__(self, tells_next: bool) -> None:
        super().__init__(is_head=True)
        self.block = MaskedBlock(SIZE, MASK, tells_next)
        self.read: list[tuple[int, list[float]]] = []  # a block's position, and what it read

    def store_entries(self, batch: ForwardBatch, hidden_EN: Tensor) -> None:
        places = batch.store_GT[0].tolist()
        self.entries |= {p: (s,) for p, s in zip(places, hidden_EN[:, 0].tolist(), strict=True)}
        self.num_tokens.append(len(places))

    def block_step(self, batch: ForwardBatch) -> Tensor:
        starts, ids = batch.query_start_S1.tolist(), batch.token_ids_T.tolist()
        assert batch.bidirectional_spans == tuple((start, SIZE) for start in starts[:-1])
        assert min(batch.store_GT[0].tolist()) >= FIRST_PAGE * PAGE
        assert len(set(batch.store_GT[0].tolist())) == len(ids)
        for row, start in enumerate(starts[:-1]):
            assert ids[start + 1 : start + SIZE] == [MASK] * (SIZE - 1)
            pages, end = batch.page_table_GSP[0][row].tolist(), int(batch.kv_len_S[row])
            places = [pages[p // PAGE] * PAGE + p % PAGE for p in range(end)]
            assert places[end - SIZE :] == batch.store_GT[0][start : start + SIZE].tolist()
            at = int(batch.positions_T[start])
            found = [self.entries[place][0] for place in places[: end - SIZE]]
            self.read.append((at, found))
        rows = batch.logits_rows_R
        return (batch.token_ids_T[rows // SIZE * SIZE] + rows % SIZE)[:, None].float()

    def block_logits(self, hidden_RD: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden_RD[:, 0].long() % VOCAB, VOCAB).float()

    def behind(
        self, tokens_R: Tensor, logits_RV: Tensor, hidden_RD: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return logits_RV, state


class BlockWorld(World):
    """As ``World``, with blocks."""

    net: BlockNet

    def __init__(self, seed: int, tells_next: bool, **options: Any) -> None:
        super().__init__(seed, True, **options)
        self.net = BlockNet(tells_next)
        attn = SimpleNamespace(pools=[CopyingPool(self.net)], begin=lambda batch: None)
        shape = TreeShape(branches=1, size=SIZE, depth=SIZE, first_page=FIRST_PAGE)
        groups = self.drafter._groups
        net: Any = self.net
        self.drafter = BlockDrafter(net, attn, self.tables, PAGE, VOCAB, shape, groups=groups)


@pytest.mark.parametrize("tells_next", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_read_the_entries_of_the_text(seed: int, tells_next: bool) -> None:
    world, num_blocks = BlockWorld(seed, tells_next, is_grouped=seed % 2 == 1), 0
    chance = random.Random(100 + seed)
    for slot in range(SLOTS):
        world.start(slot, chance.randrange(1, 40))
    for lens in run_steps(world, chance, 40):
        for slot, count in lens.items():
            assert world.base(slot) == 0
            last = world.texts[slot][-1]
            first = 0 if tells_next else 1
            assert world.proposed[slot] == [(last + first + n) % VOCAB for n in range(count)]
        for at, found in world.net.read:
            slot = found[0] // 1000
            assert found == [world.state(slot, p) for p in range(at)] and slot in lens
        num_blocks += len(world.net.read)
        world.net.read.clear()
        if chance.random() < 0.1:
            world.start(chance.randrange(SLOTS), chance.randrange(1, 40))
    assert num_blocks > 20


def test_pages_count_as_filled_when_their_last_entry_is_written() -> None:
    world = BlockWorld(0, False)
    pages = world.tables.pages[0, 0].tolist()
    world.start(0, 2 * PAGE)
    world.step({0: 2 * PAGE}, {}, {0: 1})  # the last token of the second page is computed
    assert world.drafter.filled_pages == set(pages[:2])
    world.start(0, 2 * PAGE - 1)
    world.step({0: 2 * PAGE - 1}, {}, {0: 1})  # it is known, and not computed
    assert world.drafter.filled_pages == {pages[0]}


def test_a_prefix_hit_goes_on_behind_the_shared_entries() -> None:
    world = BlockWorld(0, False)
    world.start(1, 12)
    world.step({1: 12}, {}, {1: 1})
    world.tables.pages[0, 0, :2] = world.tables.pages[0, 1, :2]
    shared = {p: world.net.entries[world.place(1, p)] for p in range(8)}
    world.texts[0], world.computed[0], world.proposed[0] = [1] * 20, 8, []
    world.prompts[0] = 20
    world.step({0: 12}, {}, {0: 1})
    assert {p: world.net.entries[world.place(0, p)] for p in range(8)} == shared
    own = [world.state(0, p) for p in range(8, 20)]
    assert world.net.read[-1] == (20, [world.state(1, p) for p in range(8)] + own)


def test_drafts_that_a_block_has_no_place_for_have_the_chance_0() -> None:
    world = BlockWorld(0, False)
    world.start(0, 5)
    found: list[Any] = []
    propose = world.drafter.propose
    world.drafter.propose = lambda *args: found.append(propose(*args)) or found[0]  # type: ignore
    world.step({0: 5}, {}, {0: SIZE + 1})
    assert (found[0].survival_RK[0, : SIZE - 1] > 0).all()
    assert found[0].survival_RK[0, SIZE - 1 :].tolist() == [0, 0]
