"""Usage records."""

from collections.abc import Iterable
from typing import Any

from radixlm.intake.records import Output


def usage(
    outputs: Iterable[Output],
    *,
    shows_cached: bool,
    num_prompts: int = 1,
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """The usage of one call; a prompt counts once, however many samples it has.

    ``outputs`` are the samples' last Outputs in order, all prompts having equally many samples.
    """
    all_outputs = list(outputs)
    samples = max(1, len(all_outputs) // max(num_prompts, 1))
    firsts = all_outputs[::samples]
    prompt = sum(o.prompt_tokens for o in firsts)
    completion = sum(o.completion_tokens for o in all_outputs)
    cached = sum(o.cached_tokens for o in firsts)
    shown: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached} if shows_cached else None,
    }
    details: dict[str, int] = {}
    if reasoning_tokens is not None:
        shown["reasoning_tokens"] = details["reasoning_tokens"] = reasoning_tokens
    predicted = [o.predicted for o in all_outputs if o.predicted is not None]
    if predicted:
        accepted, rejected = map(sum, zip(*predicted, strict=True))
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = rejected
    if details:
        shown["completion_tokens_details"] = details
    return shown
