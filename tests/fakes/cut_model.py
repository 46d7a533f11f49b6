"""The ranks of a model as threads of one process, each with its part of the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from radixlm.base.record import replace
from radixlm.distributed.groups import Group, Ranks
from radixlm.distributed.shm import Layout, Segment
from radixlm.distributed.topology import Topology
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.models.build import Model
from radixlm.step.batch import ForwardBatch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.thread_groups import ThreadGroup, thread_ranks

T = TypeVar("T")


def run_ranks(calls: Sequence[Callable[[], T]], ranks: Sequence[Ranks]) -> list[T]:
    """Each call in a thread of its own; the first error ends all."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:  # the others wait for this rank
            errors.append(error)
            own = ranks[number]
            for group in (own.tp, own.attn, own.experts, own.stages):
                if isinstance(group, ThreadGroup):
                    group.poison()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[n] for n in range(len(calls))]


def shared_ranks(topology: Topology) -> list[Ranks]:
    """Ranks that exchange through shared memory, as a step program does."""
    layout = Layout(topology)
    first = Segment.create(layout, spin_us=0.0)
    rest = [Segment(first.fd, layout, spin_us=0.0) for _ in range(topology.world - 1)]
    return [segment.ranks(rank) for rank, segment in enumerate([first, *rest])]


def over(ranks: Ranks, group: Group) -> Ranks:
    """The ranks with this group in the place of those that they are all in."""
    kinds = ("world", "tp", "attn", "experts", "expert_tp", "stages")
    return replace(ranks, **{k: group for k in kinds if getattr(ranks, k).size == group.size})


class StepRunner(PagedRunner):
    """Takes the logits of whole steps, as the executor does."""

    def logits(self, batch: ForwardBatch) -> Tensor:
        found = self.model.step(batch, False)[1]
        assert found is not None
        return found


class CutModel:
    """The models of all ranks, run in step. ``run`` gives rank 0's logits."""

    def __init__(
        self, folder: Path, topology: Topology, groups: Sequence[Group] | None = None, **build: Any
    ) -> None:
        """``groups``: one of all ranks, in the place of each that several of them share."""
        self.ranks = (
            shared_ranks(topology) if build.pop("shared", False) else thread_ranks(topology)
        )
        if groups is not None:
            self.ranks = [
                over(ranks, group) for ranks, group in zip(self.ranks, groups, strict=True)
            ]
        kernels: Kernels = build.pop("kernels", None) or bind("cpu", {})
        loads = [lambda r=r: load_model(folder, kernels, ranks=r, **build) for r in self.ranks]
        self.models: list[Model] = run_ranks(loads, self.ranks)

    def prefill(self, tokens: dict[int, Sequence[int]], **runner: Any) -> dict[int, Tensor]:
        """The logits of a prompt in chunks and then token by token."""
        kind = runner.pop("kind", PagedRunner)
        runners = [kind(model, **runner) for model in self.models]
        return run_ranks([lambda r=r: logits_of(r, tokens) for r in runners], self.ranks)[0]


def logits_of(runner: PagedRunner, tokens: dict[int, Sequence[int]]) -> dict[int, Tensor]:
    """Logits of all tokens: three chunks of the prompts, then two tokens one by one."""
    parts = [runner.prefill({s: t[:-2] for s, t in tokens.items()}, num_chunks=3)]
    parts += [runner.step({s: [t[place]] for s, t in tokens.items()}) for place in (-2, -1)]
    return {s: torch.cat([part[s] for part in parts]) for s in parts[0]}
