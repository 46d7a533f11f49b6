"""Masks along drafts: with a grammar, a drafter changes the number of steps and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.config.grammar import GrammarConfig
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.engine.features.token_rules import TokenRules
from radixlm.wire.requests import GrammarSpec, LogprobParams
from radixlm.wire.sampling_params import SamplingParams
from tests.engine.test_features import _Marked
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import EOS, VOCAB
from tests.fakes.scheduler_harness import SchedulerHarness


class Walk:
    """A matcher whose allowed tokens are a hash of all accepted ones: now and then one alone, at
    the end EOS alone. ``fails_at``: its mask raises after so many tokens."""

    masks_forced = True

    def __init__(self, seed: int, length: int = 24, fails_at: int = -1) -> None:
        self.seed, self.length, self.fails_at = seed, length, fails_at
        self.seen: list[int] = []
        self.has_failed = False

    @property
    def is_terminated(self) -> bool:
        return self.seen[-1:] == [EOS]

    def allowed(self, seen: list[int]) -> list[int]:
        if len(seen) >= self.length or seen[-1:] == [EOS]:
            return [EOS]
        chance = random.Random(repr((self.seed, seen)))
        return chance.sample(range(1, VOCAB), chance.choice([1, 1, 1, 6]))

    def fill_mask(self, out: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        if len(self.seen) == self.fails_at:
            self.has_failed = True
            raise InvalidRequest("too complex", param="json_schema")
        out[:] = 0
        for token in self.allowed(self.seen):
            out.view("u4")[token // 32] |= 1 << (token % 32)

    def accept(self, token: int) -> bool:
        assert not self.has_failed
        is_allowed = token in self.allowed(self.seen)
        self.seen += [token] * is_allowed
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        assert not self.has_failed
        self.seen = self.seen[: len(self.seen) - num_tokens]

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while len(forced) < 9:
            allowed = self.allowed([*self.seen, *forced])
            if len(allowed) > 1 or allowed == [EOS]:
                break
            forced += allowed
        return forced


class Unmasked(Walk):
    """Forced text may be spelt otherwise: its masks allow a second token. The last forced token is
    not told, as it may be longer, and some forced text is not known as such."""

    masks_forced = False

    def fill_mask(self, out: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        super().fill_mask(out)
        if not self.is_terminated and len(self.seen) < self.length:
            out.view("u4")[0] |= 1 << 30

    def accept(self, token: int) -> bool:
        if token == 30 and len(self.seen) < self.length and not self.is_terminated:
            self.seen.append(token)
            return True
        return super().accept(token)

    def forced_tokens(self) -> list[int]:
        return super().forced_tokens()[:-1] if len(self.seen) % 2 else []


MATCHERS = {"masks": Walk, "unmasked": Unmasked}
PROMPTS = [[1, 2, 3, 20 + i] for i in range(4)]


class Bench:
    """Requests of all kinds, with or without a drafter. The oracle is the plain run."""

    def __init__(self, kind: str, jump: bool, seed: int, fails_at: int = -1) -> None:
        self.features: list[GrammarFeature] = []
        self.kind, self.jump, self.seed, self.fails_at = kind, jump, seed, fails_at

    def play(self, drafts: ForcedDrafts | None, **options: Any) -> SchedulerHarness:
        feature = GrammarFeature(
            GrammarConfig(disable_jump_forward=not self.jump),
            lambda: None,  # type: ignore[arg-type,return-value]
            VOCAB,
            (EOS,),
        )
        make = MATCHERS[self.kind]
        feature._ticket = lambda spec, client: SimpleNamespace(  # type: ignore[assignment,method-assign,return-value]
            is_ready=True, matcher=lambda: make(int(spec.value), 24, self.fails_at)
        )
        feature._tokenizer = _Marked({7: b"<", 11: b"/>"})  # type: ignore[assignment]
        self.features.append(feature)
        rules = TokenRules(VOCAB)
        bench = SchedulerHarness(features=(feature, rules), drafts=drafts, **options)
        for i, prompt in enumerate(PROMPTS):
            grammar = GrammarSpec("regex", str(self.seed + i), after="." if i == 3 else None)
            need = LogprobParams() if i == 1 else None
            bench.submit(f"g{i}", prompt, 40, grammar=grammar, logprobs=need)
        bad_words = ((4, 5), (6, 7, 8), (9,), (1, 1))
        bench.submit("words", [1, 2, 3, 4], 30, ignore_eos=True, bad_words=bad_words)
        bench.submit("free", [1, 2, 3, 5], 30, ignore_eos=True)
        bench.run()
        return bench


def oracle_of(bench: SchedulerHarness) -> Any:
    """A drafter that knows what the plain run said."""
    prompts = {"words": [1, 2, 3, 4], "free": [1, 2, 3, 5]}
    prompts |= {f"g{i}": prompt for i, prompt in enumerate(PROMPTS)}

    def oracle(rid: str, ids: Iterable[int], count: int) -> list[int]:
        done = len(list(ids)) - len(prompts[rid])
        return bench.out[rid][done : done + count]

    return oracle


def ends(bench: SchedulerHarness) -> dict[str, Any]:
    return {rid: (end.kind, end.matched, end.status) for rid, end in bench.finish.items()}


def num_computed(bench: SchedulerHarness) -> int:
    """Items of constrained requests, over all steps."""
    items = [item for plan in bench.executor.steps for item in plan.items]
    return sum(item.rid in ("g0", "g1", "g2") for item in items)


@pytest.mark.parametrize("drafter", ["oracle", "mixed", "adversary", "random"])
@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize("kind", sorted(MATCHERS))
def test_same_tokens(kind: str, jump: bool, drafter: str) -> None:
    for seed in range(0, 40, 8):
        bench = Bench(kind, jump, seed)
        plain = bench.play(None, step_tokens=128)
        drafts = ForcedDrafts(oracle_of(plain), drafter, 5, varies=drafter == "mixed", seed=seed)
        drafted = bench.play(drafts, step_tokens=128)
        assert drafted.out == plain.out
        assert ends(drafted) == ends(plain)
        assert num_computed(drafted) < num_computed(plain)  # what is forced is drafted


def test_what_is_refused_is_not_drafted() -> None:
    bench = Bench("masks", False, 3)
    plain = bench.play(None)
    drafts = ForcedDrafts(oracle_of(plain), "adversary", 4)
    bench.play(drafts)
    drafted = [sum(one[0] for one in drafts.rounds.get(f"g{i}", ())) for i in range(3)]
    accepted = [sum(one[1] for one in drafts.rounds.get(f"g{i}", ())) for i in range(3)]
    # an adversary's tokens pass the mask at times; forced ones are certain
    assert all(a > 0.5 * d for a, d in zip(accepted, drafted, strict=True))


@pytest.mark.parametrize("fails_at", [0, 1, 5, 12])
@pytest.mark.parametrize("drafter", ["oracle", "mixed"])
def test_a_grammar_that_fails_ahead_fails_where_it_would(drafter: str, fails_at: int) -> None:
    bench = Bench("masks", False, 5, fails_at)
    plain = bench.play(None)
    drafted = bench.play(ForcedDrafts(oracle_of(plain), drafter, 5))
    assert drafted.out == plain.out
    assert ends(drafted) == ends(plain)
    assert {plain.finish[f"g{i}"].kind for i in range(3)} == {"error"}


@pytest.mark.parametrize("seed", range(4))
def test_the_matcher_is_where_a_fresh_one_would_be(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, whatever of the drafts was accepted."""
    bench = Bench("masks", seed % 2 == 0, seed)
    plain = bench.play(None)
    masks, num_seen = GrammarFeature.masks, 0

    def checked(feature: GrammarFeature, items: Any) -> Any:
        nonlocal num_seen
        found = masks(feature, items)
        for state in feature._states.values():
            if state.matcher is None or state.request.wire.grammar.after:  # type: ignore[union-attr]
                continue
            fresh = Walk(int(state.request.wire.grammar.value))  # type: ignore[union-attr]
            shown = state.request.output_ids.tolist()
            shown = shown[: len(shown) - len(state.pending)]
            assert all(fresh.accept(token) for token in shown)
            assert fresh.seen == state.matcher.seen  # type: ignore[attr-defined]
            num_seen += len(shown)
        return found

    monkeypatch.setattr(GrammarFeature, "masks", checked)
    drafted = bench.play(ForcedDrafts(oracle_of(plain), "mixed", 6, varies=True, seed=seed))
    assert drafted.out == plain.out and num_seen > 100


def test_masks_made_in_a_thread_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("masks", True, 9)
    plain = bench.play(None)
    monkeypatch.setattr("radixlm.engine.features.grammar._THREAD_PAYS_S", -1.0)
    drafted = bench.play(ForcedDrafts(oracle_of(plain), "mixed", 5))
    assert drafted.out == plain.out
    assert bench.features[-1]._thread is not None


def test_a_rule_masks_what_follows_a_drafted_word() -> None:
    rules = TokenRules(VOCAB)
    wire = SimpleNamespace(
        sampling=SamplingParams(allowed_token_ids=list(range(8))), bad_words=((1, 2), (5,))
    )
    rules.arrive(SimpleNamespace(rid="a", wire=wire, output_ids=np.array([3, 1])))  # type: ignore[arg-type]
    rows = rules._rules["a"].mask([1, 2, 1])
    allowed = [[i for i in range(VOCAB) if int(row[0]) >> i & 1] for row in rows]
    assert allowed == [[0, 1, 3, 4, 6, 7]] * 2 + [[0, 1, 2, 3, 4, 6, 7]] + [[0, 1, 3, 4, 6, 7]]
