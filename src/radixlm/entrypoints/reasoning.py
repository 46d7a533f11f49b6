"""Requests for a model that reasons: a grammar behind the reasoning, and a bound on its length."""

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.intake.records import GenerateRequest, grammar_of
from radixlm.text.reasoning import registry as reasoning

_PROCESSOR = "thinking_budget"
_MAX_BUDGET = 2**63 - 1  # the largest integer of every message; more is no bound either


def needs_parser(request: GenerateRequest) -> bool:
    """Whether ``apply_reasoning`` has something to do."""
    return request.requires_reasoning or request.max_thinking_tokens is not None


def apply_reasoning(request: GenerateRequest, parser: str | None) -> None:
    """Let the grammar begin behind the end marker of ``parser`` (require_reasoning), and bound the
    tokens before it (max_thinking_tokens). InvalidRequest where there is no parser."""
    if not needs_parser(request):
        return
    asked = "require_reasoning" if request.requires_reasoning else "max_thinking_tokens"
    asked = request.names.get(asked, asked)
    if parser is None:
        raise InvalidRequest(
            f"{asked}: it is not known how this model's reasoning ends; start the server with "
            "--reasoning-parser, such as qwen3",
            asked,
        )
    start, end = reasoning.start_marker(parser), reasoning.end_marker(parser)
    request.reasoning_end = end
    grammar = request.grammar or grammar_of(request.sampling)
    if request.requires_reasoning and grammar is not None:
        request.grammar = msgspec.structs.replace(grammar, after=end)
    if request.max_thinking_tokens is not None:
        if request.processor not in (None, _PROCESSOR):
            raise InvalidRequest(
                f"{asked} needs the place of the logit processor {request.processor!r:.80}: leave "
                "one of them out",
                asked,
            )
        request.processor = _PROCESSOR
        given = request.sampling.custom_params or {}
        bound = {"thinking_budget": min(request.max_thinking_tokens, _MAX_BUDGET)}
        params = {"start": start, "end": end, **given, **bound}
        request.sampling = msgspec.structs.replace(request.sampling, custom_params=params)
