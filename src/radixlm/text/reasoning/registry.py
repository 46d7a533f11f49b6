"""Reasoning parsers by name: create, detect, where messages and grammars start."""

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
    """A parser for one message. ConfigError lists the parsers if ``name`` is unknown.

    ``starts_inside``: the message begins inside the reasoning; None: the default of ``name``.
    Without ``stream_reasoning`` the reasoning is returned at once when it ends.
    """
    factory = _PARSERS.resolve(name)
    markers = MARKERS[name]
    inside = markers.is_inside if starts_inside is None else starts_inside
    parser: ReasoningParser = factory(
        markers, starts_inside=inside, stream_reasoning=stream_reasoning
    )
    return parser


def starts_inside(name: str, rendered_prompt: str) -> bool:
    """Whether the answer to this prompt begins inside the reasoning.

    Yes if the prompt ends with a start marker, no if it ends with an end marker; else the default
    of ``name``.
    """
    markers = MARKERS[name]
    tail = rendered_prompt.rstrip(SPACES)
    if any(tail.endswith(start.strip(SPACES)) for start in markers.starts):
        return True
    if any(tail.endswith(end) for end in markers.ends):
        return False
    return markers.is_inside


def detect(chat_template: str, rendered_prompt: str | None = None) -> str | None:
    """The parser for a chat template, None if it has no reasoning markers.

    ``rendered_prompt`` (any prompt of the template) decides for ``<think>`` of unknown families: if
    the prompt opens the reasoning, the model always reasons.
    """
    for name, markers in MARKERS.items():
        if any(all(text in chat_template for text in hint) for hint in markers.hints):
            return name
    tail = (rendered_prompt or "").rstrip(SPACES)
    if tail.endswith("<think>"):
        return "deepseek-r1"
    return "qwen3" if "<think>" in chat_template or "</think>" in chat_template else None


def start_marker(name: str) -> str:
    """The marker that begins the reasoning."""
    return MARKERS[name].starts[0]


def end_marker(name: str) -> str:
    """The marker after which the answer, and so a grammar, starts."""
    return MARKERS[name].ends[0]


def excluded_markers(name: str) -> tuple[str, ...]:
    """Markers of tool calls, which strict reasoning does not contain; none of a format whose
    reasoning goes on behind a call, or ends in several ways."""
    markers = MARKERS[name]
    return () if markers.resume or len(markers.ends) > 1 else markers.breaks


def keep_special_tokens(name: str) -> bool:
    """Whether the parser needs text with special tokens (``skip_special_tokens=False``)."""
    return MARKERS[name].is_special


def template_switch(name: str) -> tuple[str, bool] | None:
    """The chat template's variable that turns reasoning on and off, and its default."""
    markers = MARKERS[name]
    return (
        (markers.template_variable, markers.is_on_by_default) if markers.template_variable else None
    )
