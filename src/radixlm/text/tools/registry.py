"""Tool-call formats by name: create a parser, detect the format, make call ids."""

import random
import secrets
import string
from collections.abc import Sequence

from radixlm.base.registry import Registry
from radixlm.text.tools.base import ToolParser, ToolSpec
from radixlm.text.tools.constrain import constraint
from radixlm.text.tools.table import FORMATS

__all__ = ["NAMES", "call_id", "constraint", "create", "detect", "keep_special_tokens"]

NAMES: tuple[str, ...] = tuple(FORMATS)
"""Values of ``--tool-call-parser`` besides "auto"."""

_SHORT = string.ascii_letters + string.digits
MISTRAL_ID_CHARS = 9
_PARSERS = Registry("--tool-call-parser", {name: f.path for name, f in FORMATS.items()})


def create(name: str, tools: Sequence[ToolSpec] = (), *, drop_unknown: bool = False) -> ToolParser:
    """A parser for one message. ConfigError lists the formats if ``name`` is unknown.

    Calls of functions that are not among ``tools`` are passed on unless ``drop_unknown``.
    """
    parser: ToolParser = _PARSERS.resolve(name)(tools, drop_unknown=drop_unknown)
    return parser


def detect(chat_template: str) -> str | None:
    """The format that a chat template writes calls in, None if none is recognized."""
    for name, entry in FORMATS.items():
        if any(all(text in chat_template for text in hint) for hint in entry.hints):
            return name
    return None


def call_id(parser_name: str, tool_name: str, index: int, rng: random.Random | None = None) -> str:
    """The id of a call: ``functions.{name}:{index}`` or nine letters and digits where the
    template requires it, else ``call_`` and 24 hexadecimal digits.

    ``index`` counts the calls of the conversation, ``rng`` makes the id repeatable.
    """
    if parser_name == "kimi_k2":
        return f"functions.{tool_name}:{index}"
    bits = rng.getrandbits(96) if rng else secrets.randbits(96)
    if parser_name == "mistral":
        digits = (bits // len(_SHORT) ** i for i in range(MISTRAL_ID_CHARS))
        return "".join(_SHORT[rest % len(_SHORT)] for rest in digits)
    return f"call_{bits:024x}"


def keep_special_tokens(name: str) -> bool:
    """Whether the parser needs text with special tokens (``skip_special_tokens=False``)."""
    return FORMATS[name].is_special
