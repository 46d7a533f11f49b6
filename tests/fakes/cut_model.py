"""The ranks of a model as threads of one process, each with its part of the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from radixlm.distributed.groups import Ranks, ThreadGroup, thread_ranks
from radixlm.distributed.topology import Topology
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.models.build import Model
from tests.fakes.paged_runner import PagedRunner, load_model

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

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[n] for n in range(len(calls))]


class CutModel:
    """The models of all ranks, run in step. ``run`` gives rank 0's logits."""

    def __init__(self, folder: Path, topology: Topology, **build: Any) -> None:
        self.ranks = thread_ranks(topology)
        kernels: Kernels = build.pop("kernels", None) or bind("cpu", {})
        loads = [lambda r=r: load_model(folder, kernels, ranks=r, **build) for r in self.ranks]
        self.models: list[Model] = run_ranks(loads, self.ranks)

    def prefill(self, tokens: dict[int, Sequence[int]], **runner: Any) -> dict[int, Tensor]:
        """The logits of a prompt in chunks and then token by token."""
        runners = [PagedRunner(model, **runner) for model in self.models]
        return run_ranks([lambda r=r: logits_of(r, tokens) for r in runners], self.ranks)[0]


def logits_of(runner: PagedRunner, tokens: dict[int, Sequence[int]]) -> dict[int, Tensor]:
    """Logits of all tokens: three chunks of the prompts, then two tokens one by one."""
    parts = [runner.prefill({s: t[:-2] for s, t in tokens.items()}, num_chunks=3)]
    parts += [runner.step({s: [t[place]] for s, t in tokens.items()}) for place in (-2, -1)]
    return {s: torch.cat([part[s] for part in parts]) for s in parts[0]}
