"""Reasoning parsers by name: create, detect, where a message starts, where a grammar does."""

from __future__ import annotations

from radixlm.base.registry import Registry
from radixlm.text.reasoning.base import ReasoningParser
from radixlm.text.reasoning.table import MARKERS
from radixlm.text.tools.scan import SPACES

NAMES: tuple[str, ...] = tuple(MARKERS)
"""Values of ``--reasoning-parser`` besides "auto"."""

_PARSERS = Registry("--reasoning-parser", {name: m.target for name, m in MARKERS.items()})


def create(
    name: str, *, starts_inside: bool | None = None, stream_reasoning: bool = True
) -> ReasoningParser:
    """A parser for one message. ConfigError names the known ones when ``name`` is none.

    ``starts_inside``: the message begins within the reasoning; None: as usual for ``name``.
    ``stream_reasoning`` off: reasoning is given in one piece, when it ends.
    """
    factory = _PARSERS.resolve(name)
    markers = MARKERS[name]
    inside = markers.is_inside if starts_inside is None else starts_inside
    parser: ReasoningParser = factory(
        markers, starts_inside=inside, stream_reasoning=stream_reasoning
    )
    return parser


def starts_inside(name: str, rendered_prompt: str) -> bool:
    """Will the answer to this prompt begin within the reasoning?

    Yes where the prompt ends with an open start marker, no where it ends with an end marker;
    else as usual for ``name``.
    """
    markers = MARKERS[name]
    tail = rendered_prompt.rstrip(SPACES)
    if any(tail.endswith(start.strip(SPACES)) for start in markers.starts):
        return True
    if any(tail.endswith(end) for end in markers.ends):
        return False
    return markers.is_inside


def detect(chat_template: str, rendered_prompt: str | None = None) -> str | None:
    """The reasoning a chat template shows, None when it shows none.

    ``rendered_prompt`` (any prompt of the template) helps with ``<think>`` of unknown families:
    one that opens the thinking has a model that always thinks.
    """
    for name, markers in MARKERS.items():
        if any(all(text in chat_template for text in hint) for hint in markers.hints):
            return name
    tail = (rendered_prompt or "").rstrip(SPACES)
    if tail.endswith("<think>"):
        return "deepseek-r1"
    return "qwen3" if "<think>" in chat_template or "</think>" in chat_template else None


def end_marker(name: str) -> str:
    """The text behind which the answer, and so a grammar, starts."""
    return MARKERS[name].ends[0]


def keep_special_tokens(name: str) -> bool:
    """Must the text reach the parser with special tokens in it (``skip_special_tokens=False``)?"""
    return MARKERS[name].is_special


def template_switch(name: str) -> tuple[str, bool] | None:
    """The chat template's variable that turns the thinking on and off, and its default."""
    markers = MARKERS[name]
    return (markers.switch, markers.is_on) if markers.switch else None
