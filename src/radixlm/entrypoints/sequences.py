"""The sequences of one call: how many there may be, how they start, which of them are shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from radixlm.base.errors import InvalidRequest
from radixlm.intake.records import Output

STARTS_PER_TURN = 32  # requests: each is checked and tokenized in 0.3 ms or more
T = TypeVar("T")


async def paced(tasks: Iterable[T]) -> AsyncIterator[T]:
    """The tasks that ``tasks`` makes, a few each turn of the event loop."""
    for number, task in enumerate(tasks, 1):
        yield task
        if not number % STARTS_PER_TURN:
            await asyncio.sleep(0)


def check_sequences(num_prompts: int, n: int, most: int, param: str) -> None:
    """InvalidRequest for a call of more than ``most`` sequences; ``param``: its prompts."""
    if num_prompts * n > most:
        raise InvalidRequest(
            f"{param}: {num_prompts} prompts with n {n} are {num_prompts * n} sequences, a call "
            f"may have {most} (--max-sequences-per-call): send at most {max(1, most // n)} prompts",
            param,
        )


def likeliest(outputs: list[Output], count: int) -> list[Output]:
    """The ``count`` outputs with the highest mean log-probability (``best_of``)."""
    if len(outputs) <= count:
        return outputs

    def mean(output: Output) -> float:
        values = [c[0] or 0.0 for c in (output.logprobs.chosen if output.logprobs else [])]
        return sum(values) / max(len(values), 1)

    return sorted(outputs, key=mean, reverse=True)[:count]
