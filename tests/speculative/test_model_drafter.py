"""ModelDrafter over a net that remembers what it was fed: every entry that a draft reads is that of
the known text, whatever was accepted, and drafts may stop and start again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.models.taps import HiddenNeeds
from radixlm.pools.group import KvGroup
from radixlm.sampling.noise import draw_keys, gumbel_noise
from radixlm.sampling.table import SamplingTable
from radixlm.speculative.device.draft_draws import Draw, sharpness
from radixlm.speculative.device.draft_entries import PageGroups
from radixlm.speculative.device.drafter import MIN_ROUNDS, FitWatch
from radixlm.speculative.device.model_drafter import ONE_GROUP, ModelDrafter
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import DecodeBatch, Drafts, Item, Items
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.quick import first

PAGE, SLOTS, COLUMNS, VOCAB = 4, 3, 80, 50
HOLE = ("hole", None)


class MemoryNet:
    """Entries by place: (token, the number in its hidden state). Token t is followed by 7 t + 1."""

    kv_groups = (KvGroup(0, "full", (0,), 1, 4, 4),)

    def __init__(self, is_head: bool, target_ids_V: Tensor | None = None) -> None:
        self.needs = HiddenNeeds((0,)) if is_head else None
        self.target_ids_V = target_ids_V
        self.entries: dict[int, tuple[Any, Any]] = {}
        self.num_tokens: list[int] = []

    def combine(self, hidden_TN: Tensor) -> Tensor:
        return hidden_TN

    def draft_step(
        self, batch: ForwardBatch, hidden_TD: Tensor | None, passes_all: bool = False
    ) -> Any:
        ids, places = batch.token_ids_T.tolist(), batch.store_GT[0].tolist()
        states = [None] * len(ids) if hidden_TD is None else hidden_TD[:, 0].tolist()
        assert len(ids) == len(places) == len(states)
        self.entries |= dict(zip(places, zip(ids, states, strict=True), strict=True))
        self.num_tokens.append(len(ids))
        last = batch.token_ids_T[batch.logits_rows_R]
        logits = torch.nn.functional.one_hot((7 * last + 1) % VOCAB, VOCAB).float() * 9
        own = None if hidden_TD is None else torch.full((len(last), 1), -1.0)
        if passes_all and hidden_TD is not None:
            own = passed(batch.token_ids_T[:, None], hidden_TD)
        return SimpleNamespace(logits_RV=logits, hidden_RD=own)


def passed(token: Any, state: Any) -> Any:
    """What a module leaves for the next one."""
    return (3 * token + state) % 1009


class Pool:
    def __init__(self, net: MemoryNet) -> None:
        self.net = net

    def store(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        assert not k.any() and not v.any()
        self.net.entries |= dict.fromkeys(places.tolist(), HOLE)


class World:
    """Requests in slots, and a drafter that sees their steps."""

    def __init__(
        self,
        seed: int,
        is_head: bool,
        undoes: bool = False,
        num_modules: int = 1,
        is_grouped: bool = False,
    ) -> None:
        """``is_grouped``: each slot is a group of its own, whose pages have the same numbers."""
        self.undoes = undoes  # as with recurrent layers: rows with a refused draft run again
        self.random, self.net = random.Random(seed), MemoryNet(is_head)
        self.tables = DeviceTables(SLOTS, COLUMNS, 1, torch.device("cpu"))
        pages = self.random.sample(range(1, SLOTS * COLUMNS + 1), SLOTS * COLUMNS)
        self.tables.pages[0, :SLOTS] = np.array(pages).reshape(SLOTS, COLUMNS)
        groups = ONE_GROUP
        if is_grouped:
            self.tables.pages[0, :SLOTS] = self.tables.pages[0, 0]
            groups = PageGroups(1, SLOTS * COLUMNS + 1)
        self.first_pages = groups.first_pages(SLOTS + 1)
        attn = SimpleNamespace(pools=[Pool(self.net)], begin=lambda batch: None)
        self.later = [MemoryNet(is_head) for _ in range(num_modules - 1)]
        others = [
            (net, SimpleNamespace(pools=[Pool(net)], begin=lambda batch: None))
            for net in self.later
        ]
        self.drafter = ModelDrafter(self.net, attn, self.tables, PAGE, VOCAB, others, groups)
        self.sampling = SamplingTable(SLOTS, VOCAB)
        self.texts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.proposed: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}  # tokens of prompts

    def start(self, slot: int, length: int, hit: int = 0) -> None:
        self.drafter.release(slot)
        self.texts[slot] = [self.random.randrange(VOCAB) for _ in range(length)]
        self.computed[slot], self.proposed[slot], self.prompts[slot] = hit, [], length
        for position in range(hit):  # entries that another request has left
            self.net.entries[self.place(slot, position)] = self.entry(slot, position)

    def place(self, slot: int, position: int) -> int:
        page = self.tables.pages[0, slot, position // PAGE] + self.first_pages[slot]
        return int(page) * PAGE + position % PAGE

    def state(self, slot: int, position: int) -> float:
        return float(1000 * slot + position)

    def entry(self, slot: int, position: int) -> tuple[Any, Any]:
        if self.net.needs is None:
            return self.texts[slot][position], None
        before = self.state(slot, position - 1)
        return HOLE if not position else (self.texts[slot][position], before)

    def left(self, number: int, slot: int, position: int) -> float:
        """What module ``number`` leaves for the one behind it."""
        if not position:
            return 0.0
        before = self.left(number - 1, slot, position - 1) if number else None
        state = self.state(slot, position - 1) if before is None else before
        return float(passed(self.texts[slot][position], state))

    def step(
        self, chunks: dict[int, int], decodes: dict[int, int], lens: dict[int, int] | None
    ) -> None:
        """``chunks``: tokens of prompts by slot; ``decodes``: tokens that follow, by slot, of which
        all but the last were verified drafts (some more were refused); ``lens``: to propose
        (None: the drafter rests)."""
        ids, firsts, items, rows, states = [], [0], [], [], []
        starts = np.array([self.computed[slot] for slot in decodes])
        for slot, count in decodes.items():
            start, text = self.computed[slot], self.texts[slot]
            drafts = self.right_drafts(slot, count - 1)
            text += [*drafts, self.random.randrange(VOCAB)]
            wrong = [self.random.randrange(VOCAB)] * self.random.randrange(3)
            ids += [text[start], *drafts, *wrong]
            states += [self.state(slot, p) for p in range(start, start + count)]
            states += [-7.0] * len(wrong)
            firsts.append(len(ids))
            self.computed[slot] += 0 if wrong and self.undoes else count
            rows.append((len(rows), slot, count - 1))
        for slot, count in chunks.items():
            start, text = self.computed[slot], self.texts[slot]
            ids += text[start : start + count]
            states += [self.state(slot, p) for p in range(start, start + count)]
            firsts.append(len(ids))
            emit = start + count == len(text)
            items.append(Item(str(slot), slot, start, count, np.zeros(count, np.int32), emit))
            if emit:
                text.append(self.random.randrange(VOCAB))
                rows.append((len(firsts) - 2, slot, 0))
            self.computed[slot] += count
        known = {slot: len(self.texts[slot]) - 1 for slot in [*decodes, *chunks]}
        lens_R = np.diff(firsts[: len(decodes) + 1]).astype(np.int32) - 1
        drafts = Drafts(lens_R, np.zeros(lens_R.sum(), np.int32)) if lens_R.any() else None
        batch = DecodeBatch(tuple(map(str, decodes)), np.array(list(decodes), np.int64))
        slots = [slot for _, slot, _ in rows]
        for slot in slots:
            self.tables.next_token[slot] = self.texts[slot][-1]
        tail: Any = SimpleNamespace(
            items=Items(batch, starts, tuple(items), drafts),
            sequences_R=torch.tensor([sequence for sequence, _, _ in rows], dtype=torch.int64),
            slots_R=torch.tensor(slots, dtype=torch.int64),
            last_R=torch.zeros(len(rows)),
            positions_R=torch.tensor([known[slot] for slot in slots]),
            num_accepted_R=torch.tensor([accepted for _, _, accepted in rows]),
            next_tokens_R=self.tables.next_token[slots],
            hidden_TD=torch.tensor(states)[:, None] if self.net.needs else None,
            sampling=self.sampling,
        )
        forward: Any = SimpleNamespace(
            token_ids_T=torch.tensor(ids), query_start_S1=torch.tensor(firsts)
        )
        if lens is None:
            self.drafter.skip(tail.items)
            return
        self.drafter.extend(forward, tail)
        wanted = np.array([lens.get(slot, 0) for slot in slots], np.int32)
        self.proposed = {slot: [] for slot in self.texts}
        if wanted.any():
            found = self.drafter.propose(tail, wanted)
            for row, slot in enumerate(slots):
                self.proposed[slot] = found.tokens_RK[row, : wanted[row]].tolist()

    def right_drafts(self, slot: int, count: int) -> list[int]:
        """Drafts that were accepted: those proposed, as far as they go."""
        own = self.proposed.get(slot, [])[:count]
        return own + [self.random.randrange(VOCAB) for _ in range(count - len(own))]

    def base(self, slot: int) -> int:
        return int(self.drafter._entries.base[slot])

    def check(self, slot: int, end: int, first: int = 0) -> None:
        assert self.base(slot) <= first
        for position in range(first, end):
            wanted = self.entry(slot, position)
            place = self.place(slot, position)
            assert self.net.entries.get(place) == wanted, (slot, position)
            for number, net in enumerate(self.later):
                if position:
                    wanted = wanted[0], self.left(number, slot, position - 1)
                assert net.entries.get(place) == wanted, (slot, position, number)


def drawn_step(world: World, chance: random.Random) -> list[dict[int, int]]:
    """Chunks, decodes and lengths of drafts of a step."""
    chunks, decodes, lens = {}, {}, {}
    for slot in world.texts:
        left = len(world.texts[slot]) - world.computed[slot]
        if left > 1 or world.computed[slot] < world.prompts[slot]:
            chunks[slot] = chance.randrange(1, left + 1)
        elif chance.random() < 0.9:
            decodes[slot] = chance.randrange(1, 5)
        if (slot in decodes or chunks.get(slot) == left) and chance.random() < 0.6:
            lens[slot] = chance.randrange(1, 5)
    return [chunks, decodes, lens]


def run_steps(world: World, chance: random.Random, count: int) -> Iterator[dict[int, int]]:
    """Run so many drawn steps; the lengths of drafts of each that was not empty."""
    for _ in range(count):
        chunks, decodes, lens = drawn_step(world, chance)
        if chunks or decodes:
            world.step(chunks, decodes, lens)
            yield lens


@pytest.mark.parametrize("undoes", [True, False])
@pytest.mark.parametrize(("is_head", "num_modules"), [(True, 1), (False, 1), (True, 2), (True, 3)])
@pytest.mark.parametrize("seed", first(4, range(12)))
def test_entries_are_those_of_the_text(
    seed: int, is_head: bool, num_modules: int, undoes: bool
) -> None:
    world = World(seed, is_head, undoes, num_modules, is_grouped=seed % 2 == 1)
    chance = random.Random(100 + seed)
    for slot in range(SLOTS):
        world.start(slot, chance.randrange(1, 40))
    for lens in run_steps(world, chance, 40):
        for slot, count in lens.items():
            world.check(slot, len(world.texts[slot]))
            token, drafts = world.texts[slot][-1], []
            for _ in range(count):
                token = (7 * token + 1) % VOCAB
                drafts.append(token)
            assert world.proposed[slot] == drafts
        if chance.random() < 0.1:
            world.start(chance.randrange(SLOTS), chance.randrange(1, 40))


@pytest.mark.parametrize("is_head", [True, False])
def test_after_a_rest_drafts_read_entries_from_a_later_page_on(is_head: bool) -> None:
    world = World(0, is_head)
    world.start(0, 5)
    world.step({0: 5}, {}, {0: 1})
    for n in range(50):
        world.step({}, {0: 1}, None if n < 30 else {})
    assert world.net.num_tokens == [6 - is_head]
    world.step({}, {0: 1}, {0: 2})
    first = 5 + 1 + 30
    assert world.net.num_tokens[1:] == [len(world.texts[0]) - first, 1]
    assert world.base(0) == first // PAGE * PAGE
    world.check(0, len(world.texts[0]), first)
    assert all(world.net.entries[world.place(0, p)] == HOLE for p in range(world.base(0), first))


@pytest.mark.parametrize("is_head", [True, False])
def test_few_tokens_wait(is_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.speculative.device.model_drafter.MIN_WAITING", 8)
    monkeypatch.setattr("radixlm.speculative.device.model_drafter.MAX_WAITING", 16)
    world = World(0, is_head)
    world.start(0, 9)
    world.step({0: 9}, {}, {})
    for _ in range(40):
        world.step({}, {0: 1}, {})
    assert world.drafter._entries.num_tokens <= 17
    assert sum(world.net.num_tokens) == 2 * 17
    world.step({}, {0: 1}, {0: 1})
    world.check(0, 51)


def test_only_rows_that_draft_are_written() -> None:
    world = World(0, is_head=True)
    for slot in range(2):
        world.start(slot, 9)
    world.step({0: 9, 1: 9}, {}, {})
    world.step({}, {0: 1, 1: 1}, {1: 1})
    assert world.net.num_tokens == [10]
    world.step({}, {0: 1, 1: 1}, {0: 1})
    assert world.net.num_tokens == [10, 11]
    world.step({}, {0: 1, 1: 1}, {0: 1, 1: 1})
    assert world.net.num_tokens == [10, 11, 3]
    for slot in range(2):
        world.check(slot, 13)


def test_a_prefix_without_entries_is_not_read() -> None:
    world = World(0, is_head=False)
    world.tables.pages[0, 1, :2] = world.tables.pages[0, 0, :2]
    world.start(0, 24)
    world.step({0: 11}, {}, {})
    world.drafter.release(0)  # its entries were never written
    del world.texts[0]
    world.start(1, 24, hit=8)
    world.step({1: 16}, {}, {1: 1})
    assert world.base(1) == 8
    world.check(1, 25, 8)
    world.drafter.release(1)
    world.start(2, 24, hit=20)
    world.tables.pages[0, 2, :5] = world.tables.pages[0, 1, :5]
    world.step({2: 4}, {}, {2: 1})
    assert world.base(2) == 8


def test_a_draft_model_feeds_no_accepted_draft_twice() -> None:
    world = World(0, is_head=False)
    world.start(0, 5)
    world.step({0: 5}, {}, {0: 4})
    world.step({}, {0: 5}, {0: 4})  # all four accepted: the last of them was never fed
    assert world.net.num_tokens == [6, 1, 1, 1, 2, 1, 1, 1]
    world.check(0, len(world.texts[0]))


def test_a_prefix_hit_goes_on_behind_the_shared_entries() -> None:
    world = World(0, is_head=True)
    world.drafter._entries.filled.update(world.tables.pages[0, 0].tolist())
    world.start(0, 20, hit=9)
    world.step({0: 11}, {}, {0: 1})
    entries = {p: world.net.entries[world.place(0, p)] for p in range(21)}
    assert entries.pop(9)[1] == 0  # the state before the first own token is not known
    assert all(entries[p] == world.entry(0, p) for p in entries)


def test_a_draft_model_that_does_not_fit_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    fit = FitWatch()
    for accepted in (1, 0):
        for _ in range(MIN_ROUNDS):
            lens = np.array([3, 0, 3], np.int32)
            drafts = Drafts(lens, np.zeros(6, np.int32))
            accepted_R = torch.tensor([accepted, 0, 0])
            tail: Any = SimpleNamespace(
                items=SimpleNamespace(drafts=drafts), num_accepted_R=accepted_R
            )
            fit.count(tail)
        assert not caplog.records  # one accepted token a step is enough
    fit = FitWatch()
    for _ in range(2 * MIN_ROUNDS):
        fit.count(tail)
    assert [r.message[:36] for r in caplog.records] == ["the draft model does not fit: 0 draf"]


# ---- draws -------------------------------------------------------------------------------------


def _drafted(net: MemoryNet, logits_RV: Tensor, temperature: float, first: int) -> Tensor:
    """Tokens drafted from these logits for the positions from ``first`` on, all with one seed."""
    table = SamplingTable(1, VOCAB)
    params = SamplingParams(temperature=temperature, sampling_seed=5)
    table.set(0, params, [])
    draw = Draw([table.states[0]] * len(logits_RV), net.target_ids_V, VOCAB)
    return draw(logits_RV, torch.arange(first, first + len(logits_RV)))[0]


@pytest.mark.parametrize("has_map", [False, True])
def test_drafts_share_the_noise_of_the_target(has_map: bool) -> None:
    """Coupled draws agree as often as arXiv:2408.07978 guarantees: (1 - TV) / (1 + TV)."""
    generator, count, heat = torch.Generator().manual_seed(2), 4000, 3.0
    ids_V = torch.randperm(VOCAB, generator=generator)[:20] if has_map else torch.arange(VOCAB)
    draft_V = torch.randn(len(ids_V), generator=generator) * 3
    target_V = torch.full((VOCAB,), -torch.inf)
    target_V[ids_V] = draft_V + torch.randn(len(ids_V), generator=generator)
    net = MemoryNet(False, ids_V if has_map else None)
    drafted_R = _drafted(net, draft_V.repeat(count, 1), heat, 10)
    keys_R = draw_keys(torch.full((count,), 5), torch.arange(10, 10 + count))
    noise_RV = gumbel_noise(keys_R, torch.arange(VOCAB, dtype=torch.int32)[None])
    wanted_R = (target_V / heat + noise_RV).argmax(-1)
    p, q = torch.zeros(VOCAB), torch.softmax(target_V / heat, -1)
    p[ids_V] = torch.softmax(draft_V / heat, -1)
    distance = float((p - q).abs().sum()) / 2
    agreement = float((drafted_R == wanted_R).float().mean())
    assert sharpness(heat) == 1.0
    assert agreement > (1 - distance) / (1 + distance) - 0.02
    assert agreement > float((p * q).sum()) + 0.1  # which independent draws would reach


def test_up_to_temperature_1_the_most_probable_token_is_drafted() -> None:
    logits_RV = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(1))
    for temperature in (0.0, 0.7, 1.0):
        drafted_R = _drafted(MemoryNet(False), logits_RV, temperature, 3)
        assert torch.equal(drafted_R, logits_RV.argmax(-1))
    assert not torch.equal(_drafted(MemoryNet(False), logits_RV, 2.0, 3), logits_RV.argmax(-1))
