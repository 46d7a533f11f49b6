"""A plan that travels to another rank is the same step, without what only rank 0 needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.base.errors import InvariantError
from radixlm.parallel.plan_codec import PlanDecoder, PlanEncoder
from radixlm.step.plan import (
    Admission,
    DecodeBatch,
    Drafts,
    Item,
    Items,
    NewPages,
    PageCopy,
    PageUpdate,
    StepPlan,
)
from radixlm.wire.media import Array, Media, media_ids
from radixlm.wire.requests import LogprobParams, PoolingParams
from radixlm.wire.sampling_params import SamplingParams

NEXT_TOKEN = np.arange(100, 200)
SMALL = st.integers(0, 99)
INTS = st.lists(SMALL, max_size=4).map(lambda n: np.array(n, np.int32))


@st.composite
def chunks(draw: st.DrawFn) -> Item:
    tokens = draw(st.none() | st.just(media_ids(bytes(range(32)), 3)))
    targets = draw(st.none() | INTS)
    pooling = draw(st.none() | st.just(PoolingParams(first_len=2)))
    count = 1 if tokens is None else 3
    logprobs = None if targets is None else LogprobParams(prompt_from=0)
    return Item(
        "r", draw(SMALL), draw(SMALL), count, tokens, draw(st.booleans()), logprobs, 1, targets,
        draw(st.booleans()), pooling, routed_experts=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    slots = np.array(draw(st.lists(SMALL, max_size=5, unique=True)), np.int64)
    count = len(slots)
    rows = st.sets(st.integers(0, count - 1)) if count else st.just(set())
    decodes = DecodeBatch(("r",) * count, slots, {}, frozenset(draw(rows)), frozenset(draw(rows)))
    drafts = None
    if count and draw(st.booleans()):
        lens = np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), np.int32)
        tokens = np.arange(3, dtype=np.int32)
        rows = draw(st.lists(st.sampled_from(slots.tolist()), max_size=2))
        paths = tuple(
            Item("", slot, 7, 3, tokens, True, page_row=90 + n) for n, slot in enumerate(rows)
        )
        drafts = Drafts(lens, np.arange(lens.sum(), dtype=np.int32), paths=paths)
    starts = np.array(draw(st.lists(SMALL, min_size=count, max_size=count)), np.int64)
    items = Items(decodes, starts, tuple(draw(st.lists(chunks(), max_size=3))), drafts)
    new = NewPages(slots, slots + 1, (slots + 2).astype(np.int32)) if draw(st.booleans()) else None
    copies = [PageCopy(0, 1, 2, 3)] if draw(st.booleans()) else []
    pages = [PageUpdate(1, 2, 3, draw(INTS)) for _ in range(draw(st.integers(0, 2)))]
    return StepPlan(
        draw(SMALL), items, (), tuple(draw(st.lists(SMALL, max_size=3))), tuple(pages), {}, new,
        tuple(copies),
    )  # fmt: skip


def same(first: Any, second: Any) -> bool:
    """Equality of records that hold arrays."""
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second)
    if isinstance(first, (tuple, list)):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(same(*pair) for pair in pairs)
    if hasattr(first, "__struct_fields__"):
        return all(same(getattr(first, n), getattr(second, n)) for n in first.__struct_fields__)
    return bool(first == second)


def as_others_see(item: Item) -> tuple[Any, ...]:
    num_targets = None if item.targets is None else len(item.targets)
    whole = (item.slot, item.start, item.count, item.tokens, item.emit, item.targets_at)
    rows = (item.hidden_states, item.routed_experts)
    return (*whole, num_targets, *rows, item.pooling, item.page_row)


@given(st.lists(plans(), min_size=1, max_size=3), st.booleans())
def test_a_plan_is_the_same_step_on_another_rank(sent: list[StepPlan], repeats: bool) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    if repeats:  # the same batch decodes again, and is not sent again
        first = Items.of(sent[0].items)
        again = Items(first.decodes, first.starts + 1)
        sent = [sent[0], StepPlan(sent[0].index + 1, again), *sent[1:]]
    for plan in sent:
        got = decoder.decode(encoder.encode(plan, NEXT_TOKEN))
        theirs, ours = Items.of(got.plan.items), Items.of(plan.items)
        assert same([as_others_see(i) for i in theirs], [as_others_see(i) for i in ours])
        assert same(theirs.drafts, ours.drafts) if ours.drafts else theirs.drafts is None
        for name in ("index", "releases", "pages", "copies"):
            assert same(getattr(got.plan, name), getattr(plan, name)), name
        assert (got.plan.new_pages is None) == (plan.new_pages is None)
        assert plan.new_pages is None or same(got.plan.new_pages, plan.new_pages)
        late = [item.slot for item in ours.prefills if item.tokens is None]
        assert got.known_slots.tolist() == [*ours.decodes.slots.tolist(), *late]
        assert got.known_tokens.tolist() == NEXT_TOKEN[got.known_slots].tolist()


def test_an_admission_keeps_what_a_rank_computes_with() -> None:
    media = Media("image", bytes(32), ((0, 2),), {"x": Array.of(np.ones((2, 2), np.float32))})
    prompt = np.arange(5, dtype=np.int32)
    embeds = np.arange(10, dtype=np.float32).reshape(5, 2)
    rope_ids = np.arange(15, dtype=np.int32).reshape(3, 5)
    params = SamplingParams(temperature=0.5)
    sent = Admission("r", 3, params, prompt, prompt, embeds, (media,), rope_ids, "proc", 7, 2, {})
    (got,) = (
        PlanDecoder()
        .decode(PlanEncoder().encode(StepPlan(0, (), (sent,)), NEXT_TOKEN))
        .plan.admissions
    )
    assert (got.slot, len(got.prompt_ids), got.media) == (3, 5, (media,))
    assert (got.adapter, got.adapter_start) == (7, 2)
    assert same(got.embeds, embeds) and same(got.rope_ids, rope_ids)
    assert (got.rid, got.processor, len(got.output_ids)) == ("", None, 0)
    assert got.reasoning_bound is None  # one rank samples


@pytest.mark.parametrize(("running", "most"), [(1, 40), (16, 160), (64, 600), (256, 2300)])
def test_a_decode_plan_is_small(running: int, most: int) -> None:
    decodes = DecodeBatch(("some-request-id",) * running, np.arange(running))
    encoder = PlanEncoder()
    items = [Items(decodes, np.full(running, 1000 + i)) for i in range(2)]
    sizes = [len(encoder.encode(StepPlan(i, items[i]), np.arange(256))) for i in range(2)]
    assert sizes[1] <= most and sizes[1] < sizes[0]


def test_ranks_know_which_rows_want_hidden_states_and_experts() -> None:
    decodes = DecodeBatch(("a", "b", "c"), np.arange(3), {}, frozenset((0,)), frozenset((0, 2)))
    data = PlanEncoder().encode(StepPlan(0, Items(decodes, np.arange(3))), NEXT_TOKEN)
    items = Items.of(PlanDecoder().decode(data).plan.items)
    assert items.decodes.hidden == {0} and items.decodes.routed == {0, 2}


def test_every_field_is_known_here() -> None:
    """Whoever adds a field decides in ``parallel/plan_codec.py`` whether other ranks need it."""
    admission = "rid slot sampling prompt_ids output_ids embeds media rope_ids processor adapter"
    assert Admission.__struct_fields__ == (*admission.split(), "adapter_start", "reasoning_bound")
    item = "rid slot start count tokens emit logprobs targets_at targets hidden_states pooling"
    assert Item.__struct_fields__ == (*item.split(), "page_row", "routed_experts")
    plan = "index items admissions releases pages feature_data new_pages copies draft_lens"
    assert StepPlan.__struct_fields__ == tuple(plan.split())


def test_what_is_no_plan_is_refused() -> None:
    data = PlanEncoder().encode(StepPlan(0, ()), NEXT_TOKEN)
    for wrong in (b"", b"\x00", data[:-1], data + b"x"):
        with pytest.raises(InvariantError, match="malformed plan"):
            PlanDecoder().decode(wrong)
    late = Items(DecodeBatch(("r",), np.array([0])), np.array([1]), (), Drafts(np.array([1]), None))
    with pytest.raises(InvariantError, match="only the device knows"):
        PlanEncoder().encode(StepPlan(0, late), NEXT_TOKEN)
