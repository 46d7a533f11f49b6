"""DraftLength and CostTable in simulated worlds: known costs, known acceptance."""

import numpy as np
import pytest

from radixlm.speculative.costs import CostTable
from radixlm.speculative.drafter import NOTHING, Path, Proposal
from radixlm.speculative.lengths import DraftLength

# ms of a step by its tokens, as measured on a CPU (docs/performance.md) and two extremes
TOKENS = (1, 4, 16, 64, 256, 512)
WORLDS = {
    "16 bit": (38.0, 43.3, 64.1, 127.4, 390.0, 760.0),
    "8 bit": (17.8, 23.8, 41.9, 136.1, 480.0, 960.0),
    "4 bit": (13.5, 22.9, 62.3, 171.4, 600.0, 1200.0),
    "GPU": (10.0, 10.0, 10.1, 10.5, 12.0, 14.0),
    "steep": (10.0, 28.0, 100.0, 390.0, 1550.0, 3100.0),
}
SLOPES = {"GPU": 0.002, "steep": 0.6}


class World:
    """Requests whose drafts are accepted with chance ``alpha``; the drafter says ``told``."""

    def __init__(self, costs: str, rows: int, alpha: float, told: float | None = None) -> None:
        self.costs, self.rids = WORLDS[costs], [f"r{i}" for i in range(rows)]
        self.alpha, self.told = alpha, told if told is not None else alpha
        self.rng = np.random.default_rng(0)
        self.tokens = self.seconds = 0.0

    def cost(self, num_tokens: int) -> float:
        return float(np.interp(num_tokens, TOKENS, self.costs)) / 1000

    def accepted(self, count: int) -> int:
        draws = self.rng.random(count) < self.alpha
        return int(np.logical_and.accumulate(draws).sum())

    def step(self, lens: list[int]) -> tuple[float, list[int]]:
        accepted = [self.accepted(count) for count in lens]
        seconds = self.cost(len(lens) + sum(lens)) * float(self.rng.normal(1, 0.03))
        self.tokens += len(lens) + sum(accepted)
        self.seconds += seconds
        return seconds, accepted

    def run(self, lengths: DraftLength, steps: int) -> float:
        """Tokens a second of ``steps`` with the rule."""
        self.tokens = self.seconds = 0.0
        for _ in range(steps):
            room = lengths.room(len(self.rids))
            survival = (self.told ** np.arange(1.0, room + 1)).astype(np.float32)
            proposal = Proposal(np.zeros(room, np.int32), survival)
            lens = lengths.choose(self.rids, [proposal] * len(self.rids)).tolist()
            seconds, accepted = self.step(lens)
            lengths.observe_step(len(lens), len(lens) + sum(lens), seconds)
            for rid, count, kept in zip(self.rids, lens, accepted, strict=True):
                lengths.observe(rid, count, kept)
        return self.tokens / self.seconds

    def best_static(self, most: int) -> tuple[float, float]:
        """Expected tokens a second without drafts, and with the best number of drafts a row."""
        rows = len(self.rids)
        rates = [
            rows
            * sum(self.alpha**depth for depth in range(count + 1))
            / self.cost(rows + rows * count)
            for count in range(most + 1)
        ]
        return rates[0], max(rates)


ROWS, ALPHAS = (1, 4, 16, 64), (0.1, 0.5, 0.8, 0.95)
CASES = [
    pytest.param(costs, rows, alpha, marks=() if (i + j + k) % 4 == 0 else pytest.mark.slow)
    for i, costs in enumerate(WORLDS)
    for j, rows in enumerate(ROWS)
    for k, alpha in enumerate(ALPHAS)
]  # each pair of two of them always


@pytest.mark.parametrize(("costs", "rows", "alpha"), CASES)
def test_close_to_the_best_static_number(costs: str, rows: int, alpha: float) -> None:
    world = World(costs, rows, alpha)
    plain, best = world.best_static(7)
    lengths = DraftLength(7, costs=CostTable(SLOPES.get(costs, 0.08)))
    assert world.run(lengths, 300) >= 0.95 * plain  # while it learns
    rate = world.run(lengths, 400)
    assert rate >= 0.9 * best
    assert rate >= 0.98 * plain


@pytest.mark.parametrize("costs", ["16 bit", "4 bit"])
def test_corrects_a_drafter_that_is_too_sure(costs: str) -> None:
    world = World(costs, 4, alpha=0.15, told=0.95)
    plain, best = world.best_static(7)
    assert world.run(DraftLength(7), 600) >= 0.93 * max(plain, best)


def test_corrects_a_drafter_that_is_too_modest() -> None:
    world = World("16 bit", 1, alpha=0.95, told=0.5)
    _, best = world.best_static(7)
    assert world.run(DraftLength(7), 600) >= 0.9 * best


def test_follows_a_change_of_topic_within_16_rounds() -> None:
    lengths, world = DraftLength(7), World("8 bit", 1, 0.95, told=0.9)
    world.run(lengths, 200)
    world.alpha = 0.0
    world.run(lengths, 16)
    survival = (0.9 ** np.arange(1.0, 8)).astype(np.float32)
    proposal = Proposal(np.zeros(7, np.int32), survival)
    assert lengths.choose(["r0"], [proposal])[0] <= 1
    plain, _ = world.best_static(0)
    assert world.run(lengths, 100) >= 0.92 * plain
    world.alpha = 0.95
    world.run(lengths, 64 + 2 * 16)  # a request that has been quiet for 64 steps is tried again
    counts = [int(lengths.choose(["r0"], [proposal])[0]) for _ in range(3)]
    assert max(counts) >= 3


def test_drafts_of_many_rows_are_judged_by_what_they_gave() -> None:
    """Where tokens cost nearly a step each, not even sure drafts pay; costs alone tell it late."""
    world = World("steep", 16, 0.9)
    plain, _ = world.best_static(0)
    assert world.run(DraftLength(15), 256) > 0.97 * plain


def test_rows_get_what_they_deserve() -> None:
    lengths = DraftLength(7, costs=CostTable(slope=0.1))
    sure, unsure = (
        Proposal(np.zeros(7, np.int32), (p ** np.arange(1.0, 8)).astype(np.float32))
        for p in (0.95, 0.2)
    )
    lens = lengths.choose(["a", "b", "c"], [sure, unsure, NOTHING])
    assert lens.dtype == np.int32
    assert lens[0] == 7
    assert lens[1] <= 1
    assert lens[2] == 0


@pytest.mark.parametrize(("costs", "pays"), [("GPU", True), ("steep", False)])
def test_a_number_that_was_set_is_kept_or_nothing(costs: str, pays: bool) -> None:
    lengths, world, seen = DraftLength(3, is_fixed=True), World(costs, 4, 0.6), []
    proposal = Proposal(np.zeros(3, np.int32), (0.6 ** np.arange(1.0, 4)).astype(np.float32))
    world.run(lengths, 300)
    for _ in range(100):
        seen += lengths.choose(world.rids, [proposal] * 4).tolist()
    assert set(seen) <= {0, 3}
    assert {lengths.room(rows) for rows in (1, 4, 64, 512)} <= {0, 3}
    assert (np.mean(seen) > 2) == pays


def test_always_drafts_everything() -> None:
    lengths, world = DraftLength(5, always=True), World("steep", 3, 0.0)
    world.run(lengths, 100)
    assert lengths.room(64) == 5
    proposal = Proposal(np.zeros(2, np.int32), np.zeros(2, np.float32))
    assert lengths.choose(["a", "b"], [proposal, NOTHING]).tolist() == [2, 0]
    assert lengths.lens(["a", "b"]).tolist() == [5, 5]


class DeviceRun:
    """Steps of ``rows`` requests with a drafter on the device."""

    def __init__(self, rows: int) -> None:
        self.lengths = DraftLength(5, costs=CostTable(draft_share=0.1))
        self.world, self.rng = World("16 bit", rows, 0.8), np.random.default_rng(1)
        self.lens = np.zeros(rows, np.int32)

    def run(self, num_steps: int, share: float) -> list[int | None]:
        """Where a draft step costs ``share`` of a step: the most tokens proposed in each step, None
        where the drafter rests."""
        rows, used = len(self.lens), list[int | None]()
        for _ in range(num_steps):
            is_asleep = self.lengths.sleeps()
            planned = None if is_asleep else self.lengths.lens(self.world.rids)
            steps, drafted = 0 if planned is None else int(planned.max()), int(self.lens.sum())
            seconds = self.world.cost(rows + drafted) + steps * share * self.world.cost(rows)
            seconds *= float(self.rng.normal(1, 0.02))
            if not self.lengths.is_asleep:
                self.lengths.observe_step(rows, rows + drafted, seconds, steps)
            for rid, count in zip(self.world.rids, self.lens.tolist(), strict=True):
                self.lengths.observe(rid, count, self.world.accepted(count))
            self.lens = np.zeros(rows, np.int32) if planned is None else planned
            used.append(None if planned is None else steps)
        return used


@pytest.mark.parametrize(("share", "pays"), [(0.05, True), (1.5, False)])
def test_device_drafts_weigh_the_cost_of_drafting(share: float, pays: bool) -> None:
    """The table starts from a tenth of a step."""
    run = DeviceRun(1)
    drafts = np.array([bool(used) for used in run.run(400, share)[200:]])
    assert (np.mean(drafts) > 0.9) == pays
    if pays:
        assert run.lengths.costs.drafts_s(3) == pytest.approx(
            3 * share * run.world.cost(1), rel=0.5
        )
    else:
        assert np.mean(drafts) < 0.05


@pytest.mark.parametrize("rows", [1, 8])
def test_a_drafter_that_does_not_pay_rests_and_is_tried_again(rows: int) -> None:
    run = DeviceRun(rows)
    run.world.alpha = 0.0
    used = run.run(6000, 0.05)[3000:]
    assert np.mean([one is None for one in used]) > 0.8
    tried = [n for n, one in enumerate(used) if one]
    assert 0 < len(tried) < 0.01 * len(used)
    # it has seen the steps before
    assert all(used[n - 32 : n].count(None) == 0 for n in tried if n >= 32)
    run.world.alpha = 0.9
    assert np.mean([bool(one) for one in run.run(6000, 0.05)[5000:]]) > 0.9


def test_no_probes_where_not_even_the_surest_drafts_would_pay() -> None:
    run = DeviceRun(1)
    early = run.run(1000, 3.0)
    assert 0 < sum(bool(used) for used in early) < 16
    later = run.run(18000, 3.0)
    assert 0 < sum(bool(used) for used in later) < 8


def test_device_drafts_are_for_rows_that_accept_them() -> None:
    lengths = DraftLength(5, costs=CostTable(slope=0.1, draft_share=0.02))
    for _ in range(30):
        lengths.observe("good", 5, 5)
        lengths.observe("bad", 5, 0)
    lens = lengths.lens(["bad", "good"])
    assert lens.dtype == np.int32
    assert lens.tolist() == [0, 5]
    assert lengths.lens(["bad"] * 3).tolist() == [0, 0, 0]


def test_the_first_steps_tell_what_a_draft_step_costs() -> None:
    """Whatever share of a step was assumed before."""
    for true_s in (0.0005, 0.01, 0.05):
        for first_s in (0, true_s, 5 * true_s):
            table = CostTable(draft_share=0.1)
            for steps in (0, 3, 0, 3, 0, 1, 3, 1, 0, 3, 0):
                table.observe(1, 0.02 + steps * true_s + first_s * (steps > 0), steps)
            found = table.drafts_s(np.array([1, 2, 3]))
            assert found == pytest.approx(first_s + true_s * np.arange(1, 4), rel=0.4, abs=0.001)


def test_costs_follow_contexts_without_forgetting_the_kernels() -> None:
    """The shape stays while every step gets slower with the context."""
    table, rng = CostTable(slope=0.5), np.random.default_rng(2)
    world = World("16 bit", 1, 0.5)
    for step in range(600):
        tokens = int(rng.choice([1, 4, 8]))
        table.observe(tokens, world.cost(tokens) * (1 + step / 300))
    ratio = table.seconds(np.array([1, 8]))
    assert ratio[1] / ratio[0] == pytest.approx(world.cost(8) / world.cost(1), rel=0.07)
    assert ratio[0] == pytest.approx(3 * world.cost(1), rel=0.1)


def test_one_disturbed_step_changes_little() -> None:
    table = CostTable()
    for _ in range(50):
        table.observe(1, 0.01)
        table.observe(4, 0.012)
    before = table.seconds(np.array([1, 4]))
    table.observe(4, 1.0)
    table.forget_last()
    table.observe(1, 0.0)  # no time: not counted
    assert table.seconds(np.array([1, 4])) == pytest.approx(before, rel=0.12)


def test_forgets_requests() -> None:
    lengths = DraftLength(3)
    lengths.observe("a", 3, 0)
    lengths.observe("a", 0, 0)
    lengths.forget("a")
    lengths.forget("a")
    assert not lengths._histories


def test_asking_in_vain_takes_a_small_share_of_the_steps() -> None:
    lengths = DraftLength(7)
    assert lengths.pause(1e-3, 16) == 0  # what a step takes is not known
    for _ in range(20):
        lengths.observe_step(16, 16, 0.05)
    assert [lengths.pause(host_s, 16) for host_s in (1e-4, 1.1e-3)] == [0, 4]
    lengths = DraftLength(7, costs=lengths.costs)
    assert [lengths.pause(1.0, 16) for _ in range(6)] == [8, 16, 32, 64, 64, 64]
    assert lengths.choose(["r"], [Proposal(np.zeros(7, np.int32), np.full(7, 0.99, np.float32))])[0]
    assert lengths.pause(1.0, 16) == 8
    assert DraftLength(7, always=True).pause(1.0, 16) == 0


def tree(first: list[float], gains: list[float], width: int) -> Proposal:
    """A tree with paths of ``width`` tokens that are expected to add ``gains``."""
    paths = tuple(Path(np.zeros(width, np.int32), 0, gain) for gain in gains)
    return Proposal(np.zeros(len(first), np.int32), np.array(first, np.float32), paths)


def measured(costs: str, lengths: DraftLength) -> DraftLength:
    """After steps of many sizes in a world of these costs."""
    world = World(costs, 1, 0.5)
    for _ in range(60):
        for num_tokens in (1, 4, 12, 2, 30, 7):
            lengths.observe_step(1, num_tokens, world.cost(num_tokens))
    return lengths


@pytest.mark.parametrize(("costs", "wanted"), [("GPU", 2), ("16 bit", 1), ("steep", 0)])
def test_paths_are_verified_where_they_raise_the_rate(costs: str, wanted: int) -> None:
    lengths = measured(costs, DraftLength(4, costs=CostTable(SLOPES.get(costs, 0.08))))
    proposal = tree([0.9, 0.8, 0.7], [1.0, 0.1], 3)
    lens = lengths.choose(["r"], [proposal])
    lens[:] = 3
    assert lengths.choose_paths([proposal], lens.astype(np.int64)).tolist() == [wanted]
    assert lengths.choose_paths([proposal], np.zeros(1, np.int64)).tolist() == [0]


def test_a_tree_whose_size_is_set_is_taken_whole_or_not_at_all() -> None:
    small, large = tree([0.9, 0.8], [0.4], 2), tree([0.9, 0.8], [0.4, 0.3, 0.2], 9)
    for costs, proposal, takes in (("GPU", large, True), ("16 bit", small, True),
                                   ("8 bit", large, False)):  # fmt: skip
        lengths = measured(costs, DraftLength(2, True, CostTable(SLOPES.get(costs, 0.08))))
        lengths._num_steps = 0  # no probe now
        lens = lengths.choose(["r"], [proposal]).astype(np.int64)
        assert lens.tolist() == [2 * takes], costs
        assert lengths.choose_paths([proposal], lens).tolist() == [takes * len(proposal.others)]


def test_paths_count_before_anything_is_drafted() -> None:
    """What they have cost and given so far, when the device's drafter asks for a length."""
    plain, trees = (measured("8 bit", DraftLength(3, True)) for _ in range(2))
    for lengths in (plain, trees):
        for _ in range(80):
            lengths.observe("r", 3, 1)
    assert plain._best_lens([0.6], 0).any()
    for _ in range(80):
        trees.chose_paths(1, 30)
    assert not trees._best_lens([0.6], 0).any()
    for _ in range(80):
        trees.chose_paths(1, 30)
        trees.gained(8)
    assert trees._best_lens([0.6], 0).any()


def test_steps_of_several_tokens_count_as_many() -> None:
    """No drafts stand for some steps: so many tokens, if steps decode several in turn."""
    lengths = DraftLength(4, costs=CostTable(slope=5.0))
    assert lengths.room(1) == 0
    lengths.costs = CostTable(slope=0.01)
    assert lengths.room(1) == 0
    lengths.pass_steps(7)
    assert lengths.room(1) > 0
