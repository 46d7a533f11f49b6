"""Requests for a model that reasons: a grammar behind the reasoning, and a bound on its length."""

from typing import Any

import msgspec

from radixlm.base.env import MAX_THINK_TOKENS
from radixlm.base.errors import InvalidRequest
from radixlm.intake.records import GenerateRequest, grammar_of
from radixlm.text.reasoning import registry as reasoning
from radixlm.wire.requests import THINKING_BUDGET

_MAX_BUDGET = 2**63 - 1  # the largest integer of every message; more is no bound either


def needs_parser(request: GenerateRequest) -> bool:
    """Whether ``apply_reasoning`` has something to do."""
    return (
        request.requires_reasoning
        or request.max_thinking_tokens is not None
        or _default_bound(request) is not None
    )


def apply_reasoning(request: GenerateRequest, parser: str | None) -> None:
    """Let the grammar begin behind the end marker of ``parser`` (require_reasoning), and bound the
    tokens before it (max_thinking_tokens, else the server's limit). InvalidRequest where there is
    no parser."""
    if not needs_parser(request):
        return
    asked = "require_reasoning" if request.requires_reasoning else "max_thinking_tokens"
    asked = request.names.get(asked, asked)
    is_asked = request.requires_reasoning or request.max_thinking_tokens is not None
    if parser is None and not is_asked:
        return  # the server's limit is of models that reason
    if parser is None:
        raise InvalidRequest(
            f"{asked}: it is not known how this model's reasoning ends; start the server with "
            "--reasoning-parser, such as qwen3",
            asked,
        )
    grammar = request.grammar or grammar_of(request.sampling)
    if is_asked:
        request.reasoning_end = reasoning.end_marker(parser)
    if request.requires_reasoning and grammar is not None:
        request.grammar = msgspec.structs.replace(grammar, after=reasoning.end_marker(parser))
    _bound(request, parser)


def _default_bound(request: GenerateRequest) -> int | None:
    """The server's limit, where it holds: a logit processor takes its place."""
    limit = MAX_THINK_TOKENS.get()
    return limit if limit >= 0 and request.processor is None else None


def _bound(request: GenerateRequest, parser: str) -> None:
    """Choose the logit processor that ends the reasoning, if there is a bound for it; it comes
    after one of the request."""
    own, default = request.max_thinking_tokens, _default_bound(request)
    if own is None and default is None:
        return
    less = {} if default is None else {"thinking_budget": min(default, _MAX_BUDGET)}
    more = {} if own is None else {"thinking_budget": min(own, _MAX_BUDGET)}
    _process(request, parser, less, more)


def make_strict(request: GenerateRequest, parser: str | None) -> None:
    """Keep tool calls and the end of the answer out of the reasoning, once the request's grammar is
    known. Nothing changes where it begins with the first token."""
    grammar = request.grammar or grammar_of(request.sampling)
    starts_at_once = grammar is not None and grammar.after is None
    if parser is None or starts_at_once:
        return
    if excluded := reasoning.excluded_markers(parser):
        _process(request, parser, {}, {"excluded": list(excluded)})


def _process(
    request: GenerateRequest, parser: str, less: dict[str, Any], more: dict[str, Any]
) -> None:
    """Choose the logit processor of the reasoning, behind another one that the request names. Its
    options: ``less`` give way to those of the request, and these to ``more``."""
    markers = {"start": reasoning.start_marker(parser), "end": reasoning.end_marker(parser)}
    if request.processor not in (None, THINKING_BUDGET):
        request.reasoning_bound = markers | less | (request.reasoning_bound or {}) | more
        return
    request.processor = THINKING_BUDGET
    params = markers | less | (request.sampling.custom_params or {}) | more
    request.sampling = msgspec.structs.replace(request.sampling, custom_params=params)
