"""An engine whose drafter a test chooses, and a workload that uses all that sampling has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import radixlm
from radixlm.base.record import replace
from radixlm.engine import load_engine as assembly
from radixlm.scheduler.loop import Scheduler
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.tiny_checkpoint import cached_tiny


@contextmanager
def drafted_engine(drafts: ForcedDrafts | None, **options: Any) -> Iterator[radixlm.Engine]:
    """An engine with this drafter; without one, not even requests of their own draft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixlm.engine.drafting.OWN_DRAFTS", 0)
        if drafts is not None:
            limits_of = assembly.limits_for_pools

            def limits_for_pools(*args: Any) -> Any:
                limits = limits_of(*args)
                num_paths = drafts.paths * limits.max_running
                return replace(limits, max_drafts=drafts.most, max_paths=num_paths)

            def scheduler(limits: Any, *args: Any, **more: Any) -> Scheduler:
                runner, channel, kv_manager, hooks, *rest = args
                more["drafting"] = drafts.drafting(limits, kv_manager, hooks)
                return Scheduler(limits, runner, channel, kv_manager, hooks, *rest, **more)

            patch.setattr(assembly, "limits_for_pools", limits_for_pools)
            patch.setattr("radixlm.engine.scheduling.Scheduler", scheduler)
        settings = {"cpu_threads": 1, "log_level": "error", "random_seed": 1, **options}
        with radixlm.Engine(**settings) as engine:
            yield engine


def follower(sequences: Sequence[Sequence[int]]) -> Any:
    """What some sequence of the plain run has behind these ids; none may begin so."""

    def oracle(rid: str, ids: Sequence[int], count: int) -> list[int]:
        known = len(ids)
        for one in sequences:
            if len(one) > known and list(one[:known]) == list(ids):
                return list(one[known : known + count])
        return []

    return oracle


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.3, "sampling_seed": 1},
    {"temperature": 1.0, "sampling_seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 2.0, "sampling_seed": 3, "min_p": 0.05},
    {"temperature": 1.0, "sampling_seed": 4, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_new_tokens": 12},
    {"temperature": 1.0, "sampling_seed": 5, "logit_bias": {"11": 4.0, "300": -50.0}},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "sampling_seed": 6, "stop": [" the", "."]},
    {"temperature": 1.0, "sampling_seed": 7, "stop_regex": "[aeiou]{2}"},
    {"temperature": 1.2, "sampling_seed": 8, "stop_token_ids": list(range(40, 80))},
    {"temperature": 1.0, "sampling_seed": 9, "stop": ["e"], "no_stop_trim": True},
]


# of a row: the position of its last known token, that token, drafts
Proposal = tuple[int, int, list[int]]


def note_proposals(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[Proposal]:
    """A list that fills with what drafters of this class propose."""
    seen: list[Proposal] = []
    propose = kind.propose

    def noted(self: Any, tail: Any, lens_R: Any) -> Any:
        made = propose(self, tail, lens_R)
        rows = zip(tail.positions_R.tolist(), tail.next_tokens_R.tolist(), lens_R.tolist(),
                   made.tokens_RK.tolist(), strict=True)  # fmt: skip
        seen.extend((at, token, drafted[:n]) for at, token, n, drafted in rows if n)
        return made

    monkeypatch.setattr(kind, "propose", noted)
    return seen


def small_options(target: str) -> dict[str, Any]:
    """Of an engine of a tiny model whose prompts come in chunks, and a greedy answer."""
    return {
        "model_path": str(cached_tiny(target)),
        "max_total_tokens": 512,
        "max_running_requests": 2,
        "page_size": 4,
        "chunked_prefill_size": 16,
        "sampling": {"temperature": 0, "max_new_tokens": 14, "ignore_eos": True},
    }
