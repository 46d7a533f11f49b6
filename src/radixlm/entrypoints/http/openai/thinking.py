"""What a chat says about reasoning, as variables of its template."""

from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.state import ServerState
from radixlm.text.reasoning import registry as reasoning

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NO_THINKING = ("none", "minimal")


def template_variables(state: ServerState, body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template, with the one that turns reasoning on or off."""
    variables = dict(body.chat_template_kwargs or {})
    effort = _effort(body)
    if isinstance(effort, str) and effort not in _EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(_EFFORTS)}, not {effort!r:.80}",
            param="reasoning_effort",
        )
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    thinks = _enables_thinking(body)
    if thinks is not None:
        variables.setdefault(thinking_switch(state.reasoning_format), thinks)
    return {**state.template_defaults, **variables}


def thinking_switch(parser: str | None) -> str:
    """The template's variable that turns reasoning on and off."""
    switch = reasoning.template_switch(parser) if parser else None
    return switch[0] if switch else "enable_thinking"


def _effort(body: ChatRequest) -> str | float | None:
    if body.reasoning_effort is None and body.reasoning is not None:
        return body.reasoning.effort
    return body.reasoning_effort


def _enables_thinking(body: ChatRequest) -> bool | None:
    """Whether the client turns reasoning on or off; None: the template decides."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    thinking = body.thinking
    if isinstance(thinking, bool):
        return thinking
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "disabled"):
        return bool(thinking["type"] == "enabled")
    if body.reasoning is not None and body.reasoning.enabled is not None:
        return body.reasoning.enabled
    effort = _effort(body)
    if effort is None:
        return None
    return effort not in _NO_THINKING if isinstance(effort, str) else effort > 0
