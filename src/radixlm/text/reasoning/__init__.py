"""Reasoning parsers: a table of markers (``table.py``) and one incremental parser (``markup.py``).

``create`` makes a parser, ``detect`` picks one by the chat template. A tool-call parser reads the
text that a reasoning parser returns.
"""

from radixlm.text.reasoning.base import ReasoningParser, split_all
from radixlm.text.reasoning.registry import (
    NAMES,
    create,
    detect,
    end_marker,
    keep_special_tokens,
    starts_inside,
    template_switch,
)

__all__ = [
    "NAMES",
    "ReasoningParser",
    "create",
    "detect",
    "end_marker",
    "keep_special_tokens",
    "split_all",
    "starts_inside",
    "template_switch",
]
