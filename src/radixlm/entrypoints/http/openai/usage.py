"""Usage records, and ``sglext``."""

from collections.abc import Iterable
from typing import Any

from radixlm.config.serve import ServeConfig
from radixlm.entrypoints.http.openai.protocol import Generation, StreamOptions
from radixlm.entrypoints.native.response import routed_experts, spec_fields
from radixlm.entrypoints.sequences import cached_details
from radixlm.intake.records import Output


def wanted_usage(options: StreamOptions | None, serve: ServeConfig) -> tuple[bool, bool]:
    """Whether a stream ends with the usage, and whether every chunk has it."""
    options = options or StreamOptions()
    at_end = options.include_usage or serve.stream_response_default_include_usage
    return bool(at_end), bool(options.continuous_usage_stats)


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
    by_tier = [found for o in firsts if (found := cached_details(o)) is not None]
    if shows_cached and by_tier:
        names = sorted({name for one in by_tier for name in one})
        shown["cached_tokens_details"] = {n: sum(one.get(n, 0) for one in by_tier) for n in names}
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


def extension(body: Generation, outputs: Iterable[Output]) -> dict[str, Any]:
    """``sglext``, SGLang's fields beside OpenAI's, with what the client asks for: where the cached
    tokens of the first prompt were, the experts of the first sample, and, if anything drafts, the
    drafts of the first sample, or with ``n`` a list of those of each sample."""
    all_outputs, shown = list(outputs), dict[str, Any]()
    if body.return_cached_tokens_details and all_outputs and all_outputs[0].cached_tokens:
        in_pool = {"device": all_outputs[0].cached_tokens, "host": 0}
        shown["cached_tokens_details"] = cached_details(all_outputs[0]) or in_pool
    if body.return_routed_experts and all_outputs:
        shown["routed_experts"] = routed_experts(all_outputs[0])
    drafted = [o for o in all_outputs if o.draft_rounds is not None]
    if body.return_spec_tokens_details and drafted:
        details = [spec_fields(output) for output in drafted]
        shown["spec_tokens_details"] = details if (body.n or 1) > 1 else details[0]
    return {"sglext": shown} if shown else {}
