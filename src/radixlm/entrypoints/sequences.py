"""The sequences of one call: how many there may be, how they start, what of them is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import chain
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


def cached_details(output: Output) -> dict[str, int] | None:
    """Cached tokens by where they were: in the device's pool, or in a tier, which brought them;
    None in an engine without tiers."""
    if output.cached_by_tier is None:
        return None
    left, details = output.cached_tokens, {"device": 0, "host": 0, "storage": 0}
    for tier, tokens in output.cached_by_tier.items():
        details[tier] = min(tokens, left)
        left -= details[tier]
    return details | {"device": left}


def num_logprobs(output: Output) -> int:
    """Log-probabilities of prompt and output, without the tokens' own."""
    parts = (output.prompt_logprobs, output.logprobs)
    found = [part for part in parts if part is not None]
    rows = chain(*([*part.top, *part.asked] for part in found))
    kept = sum(len(ids) for part in found for _, ids in part.kept)
    return kept + sum(len(row) for row in rows if row)


def take_rows(output: Output, before: Output) -> None:
    """Take over the rows of the sample's Output before this one: all experts, and the last
    hidden states if there are no new ones."""
    if output.hidden_states is None:
        output.hidden_states = before.hidden_states
    if before.routed_experts:
        before.routed_experts.extend(output.routed_experts or ())
        output.routed_experts = before.routed_experts
