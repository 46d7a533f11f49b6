"""Split what a model thinks from what it answers: a table of markers, one incremental parser.

``create`` builds a parser, ``detect`` picks one by the chat template; its text output is what a
tool parser is fed.
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
