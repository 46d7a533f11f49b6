"""Drafters whose quality a test chooses, and lengths that it chooses too."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.speculative.drafter import Path, Proposal
from radixlm.speculative.drafting import Drafting

Oracle = Callable[[str, Sequence[int], int], list[int]]


class ForcedDrafts:
    """A host drafter and the rule of lengths in one. `oracle(rid, ids, count)` gives the tokens of
    the plain run behind `ids`.

    kind   oracle (always right), adversary (always wrong), mixed (each right or wrong by chance),
           random (any number at all, also outside of the vocabulary), broken (raises), device (the
           device's drafter proposes)
    most   drafted tokens of a row; `varies`: any number up to it, by row and step
    paths  further paths of a tree: each goes along the right tokens for a while, or all the way
    """

    name = "forced"
    is_asleep = False

    def __init__(
        self,
        oracle: Oracle,
        kind: str = "oracle",
        most: int = 3,
        varies: bool = False,
        seed: int = 0,
        paths: int = 0,
    ) -> None:
        self.oracle, self.kind, self.most, self.varies = oracle, kind, most, varies
        self.paths, self.num_gained, self.num_path_tokens = paths, 0, 0
        self.random = random.Random(seed)
        self.ids: dict[str, list[int]] = {}
        self.rounds: dict[str, list[tuple[int, int]]] = {}  # (drafted, accepted)
        self.steps: list[tuple[int, int, float]] = []
        self.num_skipped = 0

    def drafting(self, limits: Limits, kv_manager: KVCacheManager, hooks: Hooks) -> Drafting:
        if self.kind == "device":
            return Drafting(limits, kv_manager, hooks, self, has_device_drafter=True)
        return Drafting(limits, kv_manager, hooks, self, self)

    # ---- as a drafter

    def start(self, rid: str, namespace: Hashable, ids: Any) -> None:
        assert rid not in self.ids, "a request starts once"
        self.ids[rid] = ids.tolist()

    def append(self, rid: str, tokens: Any) -> None:
        self.ids[rid] += tokens.tolist()

    def propose(self, rid: str, max_tokens: int) -> Proposal:
        count = self.random.randint(0, max_tokens) if self.varies else max_tokens
        right = self.oracle(rid, self.ids[rid], count)
        wrong = [token + 1 if token == 0 else token - 1 for token in right]
        tokens = {
            "oracle": lambda: right,
            "adversary": lambda: wrong,
            "mixed": lambda: [
                r if self.random.random() < 0.7 else w for r, w in zip(right, wrong, strict=True)
            ],
            "random": lambda: [self.random.randint(-3, 40) for _ in right],
            "broken": lambda: 1 // 0,
        }[self.kind]()
        survival = np.full(len(tokens), 0.5, np.float32)
        return Proposal(np.array(tokens, np.int32), survival, self.others(rid, max_tokens))

    def others(self, rid: str, max_tokens: int) -> tuple[Path, ...]:
        """Further paths; some have none of the right tokens, some all of them."""
        right, chance, found = self.oracle(rid, self.ids[rid], max_tokens), self.random, []
        for _ in range(chance.randint(0, self.paths) if self.varies else self.paths):
            tokens = right[: chance.randint(0, len(right))]
            tokens += [chance.randint(-1, 40) for _ in range(chance.choice([0, 0, 1, 3]))]
            if tokens[:max_tokens]:
                path = np.array(tokens[:max_tokens], np.int32)
                found.append(Path(path, 0, chance.random()))
        return tuple(found)

    def flush(self) -> None:
        """There is nothing of requests that are over."""

    def finish(self, rid: str) -> None:
        del self.ids[rid]

    # ---- as the rule of lengths

    def room(self, num_rows: int, other_tokens: int) -> int:
        return self.most

    def pause(self, host_s: float, num_tokens: int) -> int:
        return 0

    def choose(self, rids: Sequence[str], proposals: Sequence[Any], other_tokens: int) -> Any:
        return np.array([len(one.tokens) for one in proposals], np.int32)

    def choose_paths(self, proposals: Sequence[Any], lens: Any) -> Any:
        counts = [len(one.others) for one in proposals]
        if self.varies:
            counts = [self.random.randint(0, count) for count in counts]
        return np.array(counts)

    def chose_paths(self, num_rows: int, num_tokens: int) -> None:
        assert num_rows
        self.num_path_tokens += num_tokens

    def gained(self, count: int) -> None:
        assert count > 0
        self.num_gained += count

    def sleeps(self) -> bool:
        return False

    def lens(self, rids: Sequence[str], other_tokens: int) -> Any:
        if not self.varies:
            return np.full(len(rids), self.most, np.int32)
        return np.array([self.random.randint(0, self.most) for _ in rids], np.int32)

    def observe(self, rid: str, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted <= self.most
        self.rounds.setdefault(rid, []).append((drafted, accepted))

    def observe_step(
        self, num_rows: int, num_tokens: int, seconds: float, draft_steps: int = 0
    ) -> None:
        self.steps.append((num_rows, num_tokens, seconds))

    def pass_steps(self, count: int) -> None:
        """Nothing is counted."""

    def skip_step(self) -> None:
        self.num_skipped += 1

    def forget(self, rid: str) -> None:
        pass
