"""Which tokens are allowed: grammars and logit processors."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import AUTO, Flag, Group


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GrammarConfig(Group):
    """Constrained output."""

    grammar_backend: Annotated[
        str,
        "Library that compiles JSON schemas, regular expressions and EBNF; llguidance when unset.",
        Flag(
            choices=("xgrammar", "outlines", "llguidance", "none"),
            built=("llguidance", "none"),
            needs="that grammar backend",
        ),
    ] = AUTO
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        "Regular expression of the white space allowed in JSON output.",
        Flag(state="planned", needs="white-space control in the grammar backend"),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool,
        "Allow no white space in JSON output.",
        Flag(state="planned", needs="white-space control in the grammar backend"),
    ] = False
    disable_outlines_disk_cache: Annotated[
        bool,
        "Outlines keeps no files.",
        Flag(state="no-op", why="compiled grammars are only kept in memory"),
    ] = False
    enable_custom_logit_processor: Annotated[
        bool,
        "Accept the logit processors that --logit-processor registers.",
        Flag(state="planned", needs="logit processors by name (pickled code is never run)"),
    ] = False
    logit_processor: Annotated[
        tuple[str, ...],
        "NAME=module:Class that requests may name as their logit processor; repeatable.",
        Flag(is_repeatable=True, state="planned", needs="logit processors by name"),
    ] = ()
