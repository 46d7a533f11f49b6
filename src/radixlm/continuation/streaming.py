"""Streams without an end: which window of its tokens a request sees."""

from radixlm.base.errors import InvalidRequest
from radixlm.config.schedule import MIN_WINDOW
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest
from radixlm.wire.requests import StreamingWindow


def streaming_window(facts: IntakeFacts, request: GenerateRequest) -> StreamingWindow | None:
    """The request's streaming window: its own, or the server's, unless tokens are needed that a
    window drops."""
    asked = request.streaming_window
    tokens = facts.streaming_window if asked is None else asked
    if request.streaming_sinks is not None and not tokens:
        raise InvalidRequest("streaming_sinks needs a streaming_window", "streaming_sinks")
    reason = _why_all_tokens(request) if tokens else None
    if not tokens or (reason is not None and asked is None):
        return None
    window = StreamingWindow(tokens, request.streaming_sinks or facts.streaming_sinks)
    most = facts.context_len - window.sinks
    if reason is not None or not MIN_WINDOW <= tokens <= most:
        reason = reason or (
            f"{tokens} tokens beside {window.sinks} sinks; the context of {facts.context_len} "
            f"tokens has room for {MIN_WINDOW} to {most}."
        ) + facts.more_room(tokens + window.sinks)
        raise InvalidRequest(f"streaming_window: {reason}", "streaming_window")
    return window


def _why_all_tokens(request: GenerateRequest) -> str | None:
    """Why the request can have no streaming window, if so."""
    if request.pooling is not None:
        return "vectors and scores are of whole texts"
    if request.embeds is not None or (request.prompt is not None and request.prompt.media):
        return "a part of an image, a clip or input_embeds cannot be dropped; send 0"
    has_rows = request.return_hidden_states or request.return_routed_experts
    if has_rows or (request.logprobs and request.logprobs.prompt_from >= 0):
        return (
            "tokens that the window drops have neither hidden states nor experts nor "
            "log-probabilities; send 0"
        )
    return None
