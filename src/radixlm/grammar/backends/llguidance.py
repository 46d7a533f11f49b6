"""Grammars compiled by llguidance: lazy automata with fuel limits, no torch. The default."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.base.lazy import require
from radixlm.grammar.lark_size import MAX_SIZE, largest_terminal
from radixlm.grammar.spec import (
    GrammarOptions,
    GrammarSpec,
    Kind,
    Mask,
    check_size,
    read_json,
    refuse,
)
from radixlm.grammar.structural_tag import StructuralTagWriter
from radixlm.text.held_schema import hold
from radixlm.text.json_schema import close_objects
from radixlm.text.property_names import without_property_names
from radixlm.text.tokenizer import Tokenizer

_TOO_MUCH = ("limit", "too big", "exhausted", "panic")  # a second try would cost as much
# A blank, or a line break with indentation: a model must not fill its output with white space.
_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,20}"


class _Vocabulary:
    """A Tokenizer with the interface that llguidance expects.

    Where the tokenizer has none of the EOS ids, a token after its last one stands for the end of
    the output (``end_id``, else None): the library cannot do without an EOS.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_ids = sorted(i for i in eos_ids if i < size)
        self.end_id = None if self.eos_ids else size
        if self.end_id is not None:
            self.tokens.append(b"<end of output>")
            self.special_token_ids.append(size)
            self.eos_ids = [size]
        self.eos_token_id = self.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class LlguidanceMatcher:
    """See ``spec.Matcher``. An accepted EOS is not passed to the library."""

    masks_forced = True

    def __init__(
        self,
        matcher: Any,
        eos_ids: frozenset[int],
        kind: Kind,
        vocab_size: int,
        end_id: int | None,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size  # of the library
        self._end_id = end_id  # see _Vocabulary
        self._eos_ids = eos_ids
        self._kind = kind
        self.is_terminated = False

    def fill_mask(self, out: Mask) -> None:
        """See Matcher. Releases the GIL."""
        if self.is_terminated:
            out[:] = 0
            _allow(out, self._eos_ids)
            return
        # compute_bitmask() returns one word more than this if 32 divides the vocabulary's size
        num_words = -(-self._vocab_size // 32)
        if len(out) >= num_words and out.flags.c_contiguous:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, 4 * num_words)
        else:
            data = self._matcher.compute_bitmask()
            num_words = min(num_words, len(out))
            out.view("u1")[: num_words * 4] = memoryview(data)[: num_words * 4]
        self._raise_error()
        out[num_words:] = 0
        if self._end_id is not None:
            _forbid(out, self._end_id)
            if self._matcher.is_accepting():
                _allow(out, self._eos_ids)

    def accept(self, token: int) -> bool:
        if self.is_terminated:
            return False
        if token in self._eos_ids:
            self.is_terminated = bool(self._matcher.is_accepting())
            return self.is_terminated
        if token >= self._vocab_size or token == self._end_id:
            return False
        if self._matcher.try_consume_tokens([token]) == 1:
            return True
        self._raise_error()
        return False

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > 0 and self.is_terminated:
            self.is_terminated = False
            num_tokens -= 1
        if num_tokens > 0:
            self._matcher.rollback(num_tokens)
            self._raise_error()

    def forced_tokens(self) -> list[int]:
        """See Matcher. Never an EOS."""
        if self.is_terminated:
            return []
        tokens = list(self._matcher.compute_ff_tokens())
        self._raise_error()
        ends = self._eos_ids | {self._end_id}
        return tokens[: next((i for i, t in enumerate(tokens) if t in ends), len(tokens))]

    def _raise_error(self) -> None:
        """InvalidRequest if the library has failed, which is permanent: it reached a limit."""
        if self._matcher.is_error():
            raise refuse(self._kind, _reason(self._matcher))

    def copy(self) -> LlguidanceMatcher:
        copy = LlguidanceMatcher(
            self._matcher.deep_copy(), self._eos_ids, self._kind, self._vocab_size, self._end_id
        )
        copy.is_terminated = self.is_terminated
        return copy


def _reason(matcher: Any) -> str:
    return str(matcher.get_error()).replace("<non-verbose/>", "")


def _allow(out: Mask, tokens: frozenset[int]) -> None:
    for token in tokens:
        if token // 32 < len(out):
            out.view("u4")[token // 32] |= 1 << (token % 32)


def _forbid(out: Mask, token: int) -> None:
    if token // 32 < len(out):
        out.view("u4")[token // 32] &= 0xFFFFFFFF ^ (1 << (token % 32))


class LlguidanceGrammar:
    """See ``spec.CompiledGrammar``: a matcher at the start, copied for each request."""

    def __init__(self, first: LlguidanceMatcher, warnings: tuple[str, ...]) -> None:
        self._first = first
        self._lock = threading.Lock()
        self.warnings = warnings

    def matcher(self) -> LlguidanceMatcher:
        """See CompiledGrammar."""
        with self._lock:
            return self._first.copy()


class LlguidanceBackend:
    """See ``spec.GrammarBackend``. The tokenizer's tables are built with the first grammar."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        vocab_size: int,
        options: GrammarOptions | None = None,
    ) -> None:
        """``vocab_size``: width of the model's logits; ConfigError if the package is missing."""
        self._library = require("llguidance", "grammar", "--grammar-backend llguidance")
        self._gbnf = require("llguidance.gbnf_to_lark", "grammar", "--grammar-backend llguidance")
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._lock = threading.Lock()
        self._shared: tuple[Any, int | None] | None = None
        special = (tokenizer.id_to_piece(i) for i in tokenizer.special_ids)
        self._special = frozenset(text for text in special if text)
        self._json_options = _json_options(options or GrammarOptions())

    def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        """See GrammarBackend."""
        check_size(spec)
        if spec.kind not in ("json_schema", "structural_tag"):
            return self._build(spec.kind, self._source(spec), ())
        value = read_json(spec)
        try:
            return self._build(spec.kind, self._json_source(spec.kind, value, {}), ())
        except InvalidRequest as strict_error:
            if spec.is_strict or any(word in strict_error.message for word in _TOO_MUCH):
                raise
            # Keywords that cannot be enforced are left out, and named, rather than refused.
            relaxed = self._json_source(spec.kind, value, {"lenient": True})
            try:
                return self._build(spec.kind, relaxed, (strict_error.message,))
            except InvalidRequest:
                raise strict_error from None

    def _source(self, spec: GrammarSpec) -> str:
        if spec.kind == "json_object":
            return self._json_source("json_schema", {"type": "object"}, {})
        if spec.kind == "regex":
            lark = f"start: /{self._regex(spec.text)}/"
        else:
            lark = self._to_lark(spec.text) if spec.kind == "ebnf" else _of_size(spec.text)
        return str(self._library.LLMatcher.grammar_from_lark(lark))

    def _json_source(self, kind: Kind, value: Any, extra: dict[str, Any]) -> str:
        options = {**self._json_options, **extra}
        if kind == "structural_tag":
            writer = StructuralTagWriter(self._special, options, self._to_lark, self._regex)
            return writer.write(value)
        if not isinstance(value, dict | bool):
            raise refuse(kind, "a schema must be an object")
        schema: Any = value
        if isinstance(value, dict):
            schema = without_property_names(close_objects(hold(value)))
            schema.pop("x-guidance", None)
        elif value is True:
            schema = {}
        else:
            raise refuse(kind, "the schema false has no valid document")
        return str(
            self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        )

    def _build(self, kind: Kind, source: str, warnings: tuple[str, ...]) -> LlguidanceGrammar:
        limits = self._library.LLParserLimits(verbose_errors=False)
        tables, end_id = self._tables()
        matcher = self._library.LLMatcher(tables, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds errors that the lazy compiler has deferred
        if matcher.is_error():
            raise refuse(kind, _reason(matcher))
        first = LlguidanceMatcher(matcher, self._eos_ids, kind, tables.vocab_size, end_id)
        return LlguidanceGrammar(first, warnings)

    def _tables(self) -> tuple[Any, int | None]:
        """The tokenizer as the library keeps it, and ``_Vocabulary.end_id``."""
        with self._lock:
            if self._shared is None:
                vocabulary = _Vocabulary(self._tokenizer, self._eos_ids)
                tables = self._library.LLTokenizer(
                    vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_ids
                )
                self._shared = (tables, vocabulary.end_id)
            return self._shared

    def _to_lark(self, ebnf: str) -> str:
        try:
            lark = str(self._gbnf.gbnf_to_lark(ebnf))
        except Exception as error:  # the library raises bare Exception for unknown rules
            raise refuse("ebnf", str(error)) from None
        return _of_size(lark)

    def _regex(self, pattern: str) -> str:
        r"""Lark's form. The whole output must match, so anchors at the ends are dropped; \d,
        \w and \s mean ASCII, as in every dialect."""
        pattern = pattern.removeprefix("^")
        if pattern.endswith("$") and not pattern.endswith("\\$"):
            pattern = pattern[:-1]
        return str(self._library.regex_to_lark(pattern, "dws"))


def _of_size(lark: str) -> str:
    """``lark``, or InvalidRequest: the library copies each terminal to where its name stands."""
    if largest_terminal(lark) > MAX_SIZE:
        raise refuse("ebnf", f"too big: one rule stands for more than {MAX_SIZE} literals")
    return lark


def _json_options(options: GrammarOptions) -> dict[str, Any]:
    if options.disable_any_whitespace:
        return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {"whitespace_pattern": options.pattern(_WHITESPACE, 1)}
