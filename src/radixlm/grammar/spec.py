"""Grammar requests, and the protocols of grammar backends. Imports no library."""

from __future__ import annotations

import json
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record
from radixlm.wire.sampling_params import ANY_JSON_OBJECT

Kind = Literal["json_schema", "json_object", "regex", "ebnf", "lark", "structural_tag"]
Mask = npt.NDArray[np.int32]

MAX_CHARS: dict[Kind, int] = {
    "json_schema": 1 << 20,
    "json_object": 0,
    "regex": 1 << 16,
    "ebnf": 1 << 15,  # translated in Python
    "lark": 1 << 17,
    "structural_tag": 1 << 20,
}
MAX_DEPTH = 100
MAX_KEYS = 2048  # of one object: compile time grows with its square
MAX_ITEMS = 1 << 16  # of one list
MAX_RULES = 1024  # of an EBNF grammar


class GrammarSpec(Record):
    """A grammar as text, the key of the cache. ``text`` is empty for json_object. ``is_strict``:
    refused if a part of it cannot be enforced."""

    kind: Kind
    text: str = ""
    is_strict: bool = False


class GrammarOptions(Record):
    """Server options. ``whitespace_pattern`` is a regular expression for the white space between
    JSON tokens; ``disable_any_whitespace`` allows only "{"a": 1, "b": 2}"; ``max_whitespace``:
    characters of white space between two tokens, any of JSON's."""

    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    max_whitespace: int | None = None

    def pattern(self, default: str, least: int) -> str:
        """The expression for white space of ``least`` characters or more: ``default`` where the
        options say nothing."""
        if self.max_whitespace is not None:
            return rf"[ \t\r\n]{{{least},{self.max_whitespace}}}"
        return self.whitespace_pattern or default


class Matcher(Protocol):
    """The state of one request's output. Masks: int32 words, bit i of word w allows 32 w + i.

    ``masks_forced``: where tokens are forced, the mask allows only the first of them, so a mask of
    two tokens means that none is forced.
    """

    masks_forced: bool

    @property
    def is_terminated(self) -> bool:
        """Whether EOS was accepted."""

    def fill_mask(self, out: Mask) -> None:
        """Write the mask of the next token; words beyond the vocabulary become 0. EOS is allowed
        where the output may end, and nothing else after it. InvalidRequest if the grammar is too
        complex."""

    def accept(self, token: int) -> bool:
        """Advance by ``token``; False, and no change, if it is not allowed. InvalidRequest as for
        ``fill_mask``; the matcher is unusable then."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next ([] if the model has a choice)."""

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""


class CompiledGrammar(Protocol):
    """A compiled grammar, thread-safe. ``warnings``: what it does not enforce."""

    warnings: tuple[str, ...]

    def matcher(self) -> Matcher:
        """A matcher at the start of the output."""


class GrammarBackend(Protocol):
    """A library that compiles grammars for one tokenizer."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile; InvalidRequest(param=field) for an invalid or too large grammar. Thread-safe."""


def normalize_spec(spec: GrammarSpec) -> GrammarSpec:
    """The spec that a request's field means: "$$ANY$$" is any object, and a grammar without "::="
    is Lark, not EBNF."""
    if spec.kind == "json_schema" and spec.text == ANY_JSON_OBJECT:
        return GrammarSpec("json_object")
    if spec.kind == "ebnf" and "::=" not in spec.text:
        return GrammarSpec("lark", spec.text)
    return spec


def param_of(kind: Kind) -> str:
    """The request field that a kind of grammar comes from."""
    return {"lark": "ebnf", "json_object": "json_schema"}.get(kind, kind)


def refuse(kind: Kind, reason: str) -> InvalidRequest:
    """The error for a grammar that cannot be compiled, with at most 500 characters of reason."""
    if "NoExtension" in reason:  # llguidance: no token can begin a text of the grammar
        reason = "no text fits it (a rule that only refers to itself never ends)"
    return InvalidRequest(f"invalid {param_of(kind)}: {reason.strip()[:500]}", param_of(kind))


def check_size(spec: GrammarSpec) -> None:
    """InvalidRequest if the text is longer than its kind may be."""
    limit = MAX_CHARS[spec.kind]
    if len(spec.text) > limit:
        raise refuse(spec.kind, f"{len(spec.text)} characters, at most {limit}")
    if spec.kind == "ebnf" and spec.text.count("::=") > MAX_RULES:
        raise refuse(spec.kind, f"more than {MAX_RULES} rules")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON; 1.5 is one")


def read_json(spec: GrammarSpec) -> Any:
    """The text as JSON; InvalidRequest if invalid, nested too deeply or too wide."""
    try:
        value = json.loads(spec.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise refuse(spec.kind, f"not JSON: {error}") from None
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise refuse(spec.kind, f"nested more than {MAX_DEPTH} deep")
        for item in level:
            limit = MAX_KEYS if isinstance(item, dict) else MAX_ITEMS
            if isinstance(item, dict | list) and len(item) > limit:
                name = "an object" if isinstance(item, dict) else "a list"
                raise refuse(spec.kind, f"{name} with {len(item)} entries, at most {limit}")
        inner = [v for item in level if isinstance(item, dict) for v in item.values()]
        inner += [v for item in level if isinstance(item, list) for v in item]
        level = [item for item in inner if isinstance(item, dict | list)]
    return value
