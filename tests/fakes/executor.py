"""FakeExecutor: a model that is a hash of the whole prefix, with page tables in a dict.

It follows the contract of the real executor: page tables are kept by slot, every token of a
sequence must lie in a page of the slot's table, and a read through a wrong page is an error.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixlm.base.record import replace
from radixlm.step.masks import Masks
from radixlm.step.plan import DecodeBatch, Drafts, Item, Items, PageUpdate, StepPlan
from radixlm.step.result import ItemResult, StepResult
from tests.fakes.step_results import step_result

VOCAB = 31
EOS = 0


def next_token(prefix: np.ndarray, mask: np.ndarray | None = None) -> int:
    """The model: a deterministic token for each prefix."""
    seed = zlib.crc32(np.asarray(prefix, np.int32).tobytes())
    order = sorted(range(VOCAB), key=lambda t: (seed * (2 * t + 3) ^ t * 40503) % 10007)
    return next(t for t in order if mask is None or mask[t // 32] >> (t % 32) & 1)


def reference(prompt: list[int], max_new: int, ignore_eos: bool = False) -> list[int]:
    """Greedy tokens of one request alone, one token at a time."""
    tokens, out = list(prompt), []
    while len(out) < max_new:
        token = next_token(np.array(tokens))
        tokens.append(token)
        out.append(token)
        if token == EOS and not ignore_eos:
            break
    return out


def with_drafts(items: Items) -> list[tuple[Item, list[int]]]:
    """Each item with its drafted tokens, as far as the host knows them."""
    parts: list[list[int]] = [[]] * len(items)
    if items.drafts is not None and items.drafts.tokens is not None:
        ends = np.cumsum(items.drafts.lens).tolist()
        tokens = items.drafts.tokens.tolist()
        assert len(tokens) == ends[-1], "flat drafts are as long as their lengths say"
        for row, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            parts[row] = tokens[begin:end]
        for row, path in enumerate(items.paths, len(items) - len(items.paths)):
            assert path.tokens is not None
            parts[row] = path.tokens[1:].tolist()
    return list(zip(items, parts, strict=True))


@dataclass
class FakeStep:
    plan: StepPlan
    results: list[ItemResult] = field(default_factory=list)
    winners: dict[int, int] = field(default_factory=dict)


def row_of(item: Item) -> int:
    """The row of the page tables of an item."""
    return item.slot if item.page_row < 0 else item.page_row


class FakeExecutor:
    """Stores token ids as KV, so that a page that is freed too early is noticed."""

    def __init__(
        self, num_pages: int, page_size: int, num_slots: int, num_window: int = 0, window: int = 0
    ) -> None:
        self.kv = np.full((num_pages, page_size), -1, np.int64)
        self.window_kv = np.full((num_window, page_size), -1, np.int64)
        self.window = window
        self.window_table: dict[int, dict[int, int]] = defaultdict(dict)
        self.page_size = page_size
        self.table: dict[int, dict[int, int]] = defaultdict(dict)
        self.next: dict[int, int] = {}
        self.owner: dict[int, str] = {}
        self.steps: list[StepPlan] = []
        # of steps of several tokens in turn: those behind the first, and of rows with masks
        self.goes_on, self.num_further, self.num_followed = True, 0, 0

    def forward(self, plan: StepPlan) -> FakeStep:
        self.steps.append(plan)
        for admission in plan.admissions:
            self.owner[admission.slot] = admission.rid
        for update in plan.pages:
            table = (self.table, self.window_table)[update.group]
            for i, page in enumerate(update.pages.tolist()):
                assert page != 0 or update.group == 1, "page 0 is nobody's"
                table[update.slot][update.first + i] = page
        if (new := plan.new_pages) is not None:
            for slot, column, page in zip(new.slots, new.columns, new.pages, strict=True):
                self.table[int(slot)][int(column)] = int(page)
        for pool, group in ((self.kv, 0), (self.window_kv, 1)):
            pairs = [(copy.source, copy.target) for copy in plan.copies if copy.group == group]
            if pairs:
                sources, targets = map(list, zip(*pairs, strict=True))
                assert len(set(targets)) == len(targets), "a page is the target of two copies"
                pool[targets] = pool[sources]
        items = Items.of(plan.items)
        if items.more_N is not None:
            assert not items.prefills
            items = items.first_tokens()
        for item, drafted in with_drafts(items):
            assert self.owner[item.slot] == item.rid
            is_chunk, row = item.tokens is not None, row_of(item)
            tokens = item.tokens.tolist() if is_chunk else [self.next[item.slot], *drafted]
            assert len(tokens) == item.count
            assert item.page_row < 0 or tokens[0] == self.next[item.slot]
            for place, token in enumerate(tokens, item.start):
                self._write(row, place, token)
            self._check_window(row, item.start, item.start + item.count)
        return FakeStep(plan)

    def _write(self, row: int, place: int, token: int) -> None:
        page = self.table[row][place // self.page_size]
        self.kv[page, place % self.page_size] = token
        if self.window:
            page = self.window_table[row][place // self.page_size]
            assert page != 0, "a token of the window has no page"
            self.window_kv[page, place % self.page_size] = token

    def _go_on(self, step: FakeStep, more_N: np.ndarray, masks: Masks) -> None:
        """Sample a token of each row, then compute and sample those behind it."""
        items, rows = step.plan.items, np.full((len(more_N), 1), -1, np.int32)
        for index, mask in masks.items():
            rows[index] = mask
        assert masks.follow is None or masks.keys() <= set(masks.follow.rows)
        step.results += [ItemResult() for _ in items]
        for place in range(1 + int(more_N.max())):
            if place and masks.follow is not None:
                masks.follow([got.tokens[-1] for got in step.results], rows)
            for item, got, more, mask in zip(items, step.results, more_N, rows, strict=True):
                if place > more:
                    continue
                end = item.start + place + 1
                if got.tokens:
                    self._write(item.slot, end - 1, got.tokens[-1])
                    self._check_window(item.slot, end - 1, end)
                got.tokens += (next_token(self.prefix(item.slot, end), mask),)
                self.next[item.slot] = got.tokens[-1]
        self.num_further += int(more_N.sum())
        if masks.follow is not None:
            self.num_followed += int(more_N[list(masks.follow.rows)].sum())

    def sample(self, step: FakeStep, masks: Masks) -> None:
        items = Items.of(step.plan.items)
        if items.more_N is not None:
            if self.goes_on and (masks.follow is not None or not masks):
                self._go_on(step, items.more_N, masks)
                return
            items = items.first_tokens()
        for index, (item, drafted) in enumerate(with_drafts(items)):
            got, end = ItemResult(), item.start + item.count
            masks_of = (
                np.atleast_2d(masks[index]) if index in masks else [None] * (1 + len(drafted))
            )
            for place, mask, draft in zip(
                range(end - len(drafted), end + 1), masks_of, [*drafted, None], strict=True
            ):
                if not item.emit:
                    break
                token = next_token(self.prefix(row_of(item), place), mask)
                got.tokens += (token,)
                if token != draft:
                    break
            step.results.append(got)
        self._fold(step, Items.of(step.plan.items))

    def _fold(self, step: FakeStep, items: Items) -> None:
        """Of several paths of drafts, the first with the most tokens gives them."""
        num = len(items) - len(items.paths)
        step.results, of_paths = step.results[:num], step.results[num:]
        rows = {slot: row for row, slot in enumerate(items.decodes.slots.tolist())}
        for index, (path, got) in enumerate(zip(items.paths, of_paths, strict=True)):
            row = rows[path.slot]
            shared = min(len(got.tokens), len(step.results[row].tokens))
            assert got.tokens[:shared] == step.results[row].tokens[:shared], "paths disagree"
            if len(got.tokens) > len(step.results[row].tokens):
                step.results[row], step.winners[row] = got, index
        for item, got in zip(items, step.results, strict=False):
            if got.tokens:
                self.next[item.slot] = got.tokens[-1]

    def _check_window(self, slot: int, start: int, end: int) -> None:
        """What a window layer reads for the tokens [start, end) must equal what was written."""
        for place in range(max(0, start - self.window + 1) if self.window else end, end):
            page = self.window_table[slot][place // self.page_size]
            token = self.window_kv[page, place % self.page_size]
            full = self.kv[self.table[slot][place // self.page_size], place % self.page_size]
            assert page != 0 and token == full, "the window reads a page that was given away"

    def prefix(self, slot: int, length: int) -> np.ndarray:
        size = self.page_size
        return np.array(
            [self.kv[self.table[slot][p // size], p % size] for p in range(length)], np.int32
        )

    def read(self, step: FakeStep) -> StepResult:
        return replace(step_result(step.plan.items, step.results), winners=step.winners)

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        if verb == "release_memory":
            self.kv[:], self.window_kv[:] = -2, -2
        return {}


class StateExecutor(FakeExecutor):
    """Of a recurrent model. A state is a hash of all tokens that went into it; each step must start
    from that of the tokens before it."""

    def forward(self, plan: StepPlan) -> FakeStep:
        step = super().forward(plan)
        for item in plan.items:
            table, size = self.window_table[item.slot], self.page_size
            if item.start:
                state = self.window_kv[table[(item.start - 1) // size], 0]
                assert state == self._state(item.slot, item.start), "a state of other tokens"
            end = item.start + item.count
            for place in (end // size * size, end):
                if place > item.start:
                    page = table[(place - 1) // size]
                    assert page != 0, "a state has no page"
                    self.window_kv[page, 0] = self._state(item.slot, place)
        return step

    def _state(self, slot: int, length: int) -> int:
        return zlib.crc32(self.prefix(slot, length).tobytes())


class StagedExecutor(FakeExecutor):
    """Of several pipeline stages: tokens are sampled when the step is read. A request's next token
    is not known before."""

    unknown: set[int]  # slots whose next token is not known
    masks: dict[int, Masks]
    sizes: list[int]  # decode rows of each step

    def forward(self, plan: StepPlan) -> FakeStep:
        if not self.steps:
            self.unknown, self.masks, self.sizes = set(), {}, []
        items = Items.of(plan.items)
        decodes = set(items.decodes.slots.tolist())
        assert not decodes & self.unknown, "a token that is not known is computed"
        self.sizes.append(len(decodes))
        step = super().forward(plan)
        self.unknown |= {item.slot for item in items if item.emit}
        return step

    def sample(self, step: FakeStep, masks: Masks) -> None:
        self.masks[step.plan.index] = masks

    def read(self, step: FakeStep) -> StepResult:
        super().sample(step, self.masks.pop(step.plan.index))
        self.unknown -= {item.slot for item in step.plan.items if item.emit}
        return super().read(step)


class StagedStateExecutor(StagedExecutor, StateExecutor):
    """Several stages of a recurrent model."""


class GroupedExecutor:
    """Of data-parallel attention: each group of slots has an executor with pages of its own, and
    gets its part of each plan, maybe an empty one."""

    def __init__(self, groups: list[FakeExecutor], slots_per_group: int) -> None:
        self.groups, self.per_group = groups, slots_per_group
        self.steps: list[StepPlan] = []
        self.places: dict[int, dict[int, int]] = {}  # index of an item in its group's part

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        for one in self.groups:
            one.control(verb, args)
        return {}

    def forward(self, plan: StepPlan) -> list[FakeStep]:
        self.steps.append(plan)
        return [one.forward(self._part(plan, group)) for group, one in enumerate(self.groups)]

    def _part(self, plan: StepPlan, group: int) -> StepPlan:
        items = Items.of(plan.items)
        slot_of = {path.page_row: path.slot for path in items.paths}

        def own(parts: Any) -> list[Any]:
            return [
                part
                for part in parts
                if slot_of.get(part.slot, part.slot) // self.per_group == group
            ]

        pages = own(plan.pages)
        if (new := plan.new_pages) is not None:
            columns = zip(new.slots.tolist(), new.columns.tolist(), new.pages, strict=True)
            pages += own(PageUpdate(0, s, c, np.array([page])) for s, c, page in columns)
        index = [i for i, item in enumerate(items) if item.slot // self.per_group == group]
        self.places[group] = {i: place for place, i in enumerate(index)}
        mine: Items | list[Item] = [items[i] for i in index]
        if (drafts := items.drafts) is not None:
            rows = [i for i in index if i < len(items.starts)]
            slots = items.decodes.slots[rows]
            rids = tuple(items.decodes.rids[i] for i in rows)
            tokens = [token for i in rows for token in items.drafts_of(i).tolist()]
            kept = Drafts(
                drafts.lens[rows], np.array(tokens, np.int32), paths=tuple(own(drafts.paths))
            )
            mine = Items(
                DecodeBatch(rids, slots),
                items.starts[rows],
                tuple(own(items.prefills)),
                kept if rows else None,
            )
        return StepPlan(
            plan.index, mine, tuple(own(plan.admissions)), (), tuple(pages),
            copies=tuple(own(plan.copies)),
        )  # fmt: skip

    def sample(self, steps: list[FakeStep], masks: Masks) -> None:
        for group, (step, one) in enumerate(zip(steps, self.groups, strict=True)):
            places = self.places[group]
            mine = {places[i]: mask for i, mask in masks.items() if i in places}
            one.sample(step, Masks(mine))

    def read(self, steps: list[FakeStep]) -> StepResult:
        by_slot = {
            item.slot: result
            for step in steps
            for item, result in zip(step.plan.items, step.results, strict=False)
        }
        items = Items.of(self.steps[steps[0].plan.index].items)
        results = [by_slot[item.slot] for item in items[: len(items) - len(items.paths)]]
        row_of = {slot: row for row, slot in enumerate(items.decodes.slots.tolist())}
        won = [Items.of(one.plan.items).paths[i] for one in steps for i in one.winners.values()]
        index = {path.page_row: i for i, path in enumerate(items.paths)}
        winners = {row_of[path.slot]: index[path.page_row] for path in won}
        return replace(step_result(items, results), winners=winners)
