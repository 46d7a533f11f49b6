"""Asks all items of a task, grades the replies and sums up."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from radixlm.evals.ask import Asking, Model, ask
from radixlm.evals.items import Grade, Item, Reply, Task
from radixlm.evals.statistics import interval


@dataclass(frozen=True, slots=True)
class Settings:
    """How items are asked. `fields`: of every request; `num_parallel`: requests at once."""

    fields: Mapping[str, Any]
    asking: Asking
    num_parallel: int = 64
    num_samples: int = 1
    seed: int = 0
    shows_progress: bool = True


@dataclass(frozen=True, slots=True)
class Answered:
    """An item with the replies of its samples and their grades."""

    item: Item
    replies: tuple[Reply, ...]
    grades: tuple[Grade, ...]

    @property
    def score(self) -> float:
        return sum(grade.score for grade in self.grades) / len(self.grades)


def chosen(task: Task, limit: int | None, is_shuffled: bool, seed: int) -> list[Item]:
    """The items to ask: the first `limit`, or so many drawn by the seed."""
    items = list(task.items)
    if is_shuffled:
        random.Random(seed).shuffle(items)
    return items[:limit]


async def answer_all(
    model: Model, task: Task, items: Sequence[Item], settings: Settings
) -> tuple[list[Answered], float]:
    """(the items in their order with their replies, seconds)."""
    gate = asyncio.Semaphore(settings.num_parallel)
    total = len(items) * settings.num_samples
    bar = tqdm(total=total, unit="item", disable=None if settings.shows_progress else True,
               mininterval=0.5, file=sys.stderr)  # fmt: skip
    num_right = num_done = 0.0

    async def one(item: Item, sample: int) -> tuple[Reply, Grade]:
        nonlocal num_right, num_done
        fields = dict(settings.fields)
        if fields.get("temperature", 0.0) > 0:
            fields["seed"] = settings.seed + sample
        async with gate:
            reply = await ask(model, item, fields, settings.asking)
            # a grader may run a program
            grade = Grade(0.0) if reply.error else await asyncio.to_thread(task.grade, item, reply)
        num_right, num_done = num_right + grade.score, num_done + 1
        if not bar.disable:
            bar.set_postfix({"accuracy": f"{num_right / num_done:.3f}"}, refresh=False)
        bar.update()
        return reply, grade

    start_s = time.perf_counter()
    wanted = [one(item, sample) for item in items for sample in range(settings.num_samples)]
    tasks = [asyncio.ensure_future(work) for work in wanted]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for running in tasks:
            running.cancel()
        bar.close()
    seconds = time.perf_counter() - start_s
    size = settings.num_samples
    samples = [found[i * size : (i + 1) * size] for i in range(len(items))]
    return [
        Answered(item, tuple(r for r, _ in some), tuple(g for _, g in some))
        for item, some in zip(items, samples, strict=True)
    ], seconds


def summarise(answered: Sequence[Answered], seconds: float, seed: int) -> dict[str, Any]:
    """Figures of a run. `accuracy`: the mean score; `invalid`: share of replies without an
    answer."""
    scores = [one.score for one in answered]
    replies = [reply for one in answered for reply in one.replies]
    grades = [grade for one in answered for grade in one.grades]
    low, high, method = interval(scores, seed)
    num_output = sum(reply.num_output for reply in replies)
    result: dict[str, Any] = {
        "accuracy": sum(scores) / len(scores),
        "low": low,
        "high": high,
        "interval": method,
        "invalid": sum(grade.found is None for grade in grades) / len(grades),
        "errors": sum(bool(reply.error) for reply in replies),
        "num_items": len(answered),
        "num_samples": len(answered[0].replies),
        "latency": seconds,
        "total_input_tokens": sum(reply.num_prompt for reply in replies),
        "total_output_tokens": num_output,
        "output_throughput": num_output / seconds,
    }
    for name in sorted({name for grade in grades for name in grade.more}):
        values = [grade.more[name] for grade in grades if name in grade.more]
        result[name] = sum(values) / len(values)
    result |= pass_at(answered)
    groups: dict[str, list[float]] = {}
    for one in answered:
        groups.setdefault(one.item.group, []).append(one.score)
    if len(groups) > 1:
        result["groups"] = {name: _group(some, seed) for name, some in groups.items()}
    return result


def _group(scores: Sequence[float], seed: int) -> dict[str, Any]:
    low, high, _ = interval(scores, seed)
    return {
        "accuracy": sum(scores) / len(scores),
        "low": low,
        "high": high,
        "num_items": len(scores),
    }


def pass_at(answered: Sequence[Answered]) -> dict[str, float]:
    """pass@k for k = 1, 2, 5, 10 ... up to the samples of an item: how likely one of k drawn
    samples is right (unbiased, Chen et al. 2021, arXiv 2107.03374). Empty for one sample."""
    count = len(answered[0].grades)
    if count < 2:
        return {}
    found = {}
    for k in (k for k in (1, 2, 5, 10, 25, 50, 100) if k <= count):
        wrong = [sum(grade.score < 1 for grade in one.grades) for one in answered]
        missed = [math.comb(w, k) / math.comb(count, k) for w in wrong]
        found[f"pass@{k}"] = 1 - sum(missed) / len(missed)
    return found


def details(answered: Sequence[Answered]) -> list[dict[str, Any]]:
    """One object for each item, for --details."""
    return [
        {
            "id": one.item.id,
            "group": one.item.group,
            "score": one.score,
            "found": [grade.found for grade in one.grades],
            "texts": [reply.text for reply in one.replies],
            "likelihoods": one.replies[0].likelihoods,
            "errors": [reply.error for reply in one.replies if reply.error],
        }
        for one in answered
    ]
