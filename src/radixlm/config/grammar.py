"""Grammars and logit processors."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import AUTO, POSITIVE, Flag, Group, no_op


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GrammarConfig(Group):
    """Constrained output."""

    grammar_backend: Annotated[
        str,
        "Library that compiles JSON schemas, regular expressions and EBNF; llguidance when unset: "
        "its masks take a fifth of the time of xgrammar's (bench/grammar.py).",
        Flag(choices=("xgrammar", "outlines", "llguidance", "none")),
    ] = AUTO
    constrained_json_whitespace_pattern: Annotated[
        str | None, "Regular expression of the white space allowed in JSON output."
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool,
        "JSON output on one line, with one blank after a comma and a colon and none elsewhere.",
    ] = False
    constrained_json_max_whitespace_cnt: Annotated[
        int | None,
        "Characters of white space between two tokens of JSON output, at most.",
        Flag(within=POSITIVE),
    ] = None
    disable_outlines_disk_cache: Annotated[
        bool,
        "Keep no compiled grammars of outlines on disk.",
        no_op("compiled grammars are only kept in memory"),
    ] = False
    enable_custom_logit_processor: Annotated[
        bool,
        "Accept the names of logit processors in requests.",
        no_op(
            "the built-in ones and those of --logit-processor can always be named, and "
            "serialized code is never run"
        ),
    ] = False
    logit_processor: Annotated[
        tuple[str, ...],
        "NAME=module:Class that requests may name as their logit processor; repeatable.",
        Flag(is_repeatable=True),
    ] = ()
    disable_jump_forward: Annotated[
        bool,
        "Sample tokens that a grammar forces, instead of appending them without sampling.",
        Flag(aliases=("--disable-regex-jump-forward",)),
    ] = False
