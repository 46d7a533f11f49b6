"""Grammars compiled by xgrammar (pushdown automata). Imports torch and transformers."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from radixlm.base.lazy import require
from radixlm.grammar.spec import (
    GrammarOptions,
    GrammarSpec,
    Kind,
    Mask,
    check_size,
    read_json,
    refuse,
)
from radixlm.grammar.structural_tag import to_format
from radixlm.text.held_schema import hold
from radixlm.text.json_schema import close_objects
from radixlm.text.tokenizer import Tokenizer

_MAX_WHITESPACE = 20  # so that a model cannot fill its output with white space


class XgrammarMatcher:
    """See ``spec.Matcher``. For the library, one token after the tokenizer's last ends the output;
    here it stands for all EOS ids, which may be none, or beyond the tokenizer."""

    masks_forced = False

    def __init__(
        self, matcher: Any, tokenizer: Tokenizer, eos_ids: frozenset[int], pieces: Sequence[bytes]
    ) -> None:
        """``pieces``: the text of every token, sorted."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._pieces = pieces

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill_mask(self, out: Mask) -> None:
        end_id = self._tokenizer.vocab_size
        last, bit = end_id // 32, end_id % 32
        words = np.zeros(last + 1, np.uint32)
        if self.is_terminated:
            words[last] = 1 << bit
        elif not self._matcher.fill_next_token_bitmask(words.view(np.int32)[None]):
            words[:] = 0xFFFFFFFF  # the library does not write a mask that allows all tokens
        can_end = int(words[last]) >> bit & 1
        words[last] &= (1 << bit) - 1  # also what the library allows beyond the last token
        num_words = min(len(out), len(words))
        out.view("u4")[:num_words] = words[:num_words]
        out[num_words:] = 0
        for token in self._eos_ids if can_end else ():
            if token // 32 < len(out):
                out.view("u4")[token // 32] |= 1 << (token % 32)

    def accept(self, token: int) -> bool:
        end_id = self._tokenizer.vocab_size
        if token in self._eos_ids:
            token = end_id
        elif token >= end_id:
            return False
        return not self.is_terminated and bool(self._matcher.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._matcher.rollback(num_tokens)

    def forced_tokens(self) -> list[int]:
        """See Matcher. Without the end of the forced text, which longer tokens may begin with."""
        if self.is_terminated:
            return []
        text = self._matcher.find_jump_forward_string()
        tokens = self._settled(self._tokenizer.encode(text, add_special_tokens=False))
        num_accepted = 0
        while num_accepted < len(tokens) and self._matcher.accept_token(tokens[num_accepted]):
            num_accepted += 1
        self.rollback(num_accepted)
        return tokens[:num_accepted]

    def _settled(self, tokens: list[int]) -> list[int]:
        """The tokens that stay the same whatever text follows: a tokenizer that writes `{"` as one
        token does not write `{` before a quote."""
        end, num_settled = b"", len(tokens)
        for i in reversed(range(len(tokens))):
            end = self._tokenizer.token_bytes(tokens[i]) + end
            at = bisect_right(self._pieces, end)
            if at < len(self._pieces) and self._pieces[at].startswith(end):
                num_settled = i
        return tokens[:num_settled]

    def copy(self) -> XgrammarMatcher:
        matcher = self._matcher.fork()
        return XgrammarMatcher(matcher, self._tokenizer, self._eos_ids, self._pieces)


class XgrammarGrammar:
    """See ``spec.CompiledGrammar``."""

    warnings: tuple[str, ...] = ()

    def __init__(
        self,
        library: Any,
        compiled: Any,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        pieces: Sequence[bytes],
    ) -> None:
        self._library = library
        self._compiled = compiled
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._pieces = pieces

    def matcher(self) -> XgrammarMatcher:
        """See CompiledGrammar."""
        matcher = self._library.GrammarMatcher(self._compiled)
        return XgrammarMatcher(matcher, self._tokenizer, self._eos_ids, self._pieces)


class XgrammarBackend:
    """See ``spec.GrammarBackend``. The tokenizer's tables are built with the first grammar."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        vocab_size: int,
        options: GrammarOptions | None = None,
    ) -> None:
        """``vocab_size``: width of the model's logits; ConfigError if the package is missing."""
        self._library = require("xgrammar", "grammar", "--grammar-backend xgrammar")
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._options = options or GrammarOptions()
        self._lock = threading.Lock()
        self._shared: Any = None
        self._pieces: list[bytes] = []

    def compile(self, spec: GrammarSpec) -> XgrammarGrammar:
        """See GrammarBackend."""
        check_size(spec)
        if self._options.whitespace_pattern is not None and spec.kind.startswith("json"):
            raise refuse(
                spec.kind,
                "--constrained-json-whitespace-pattern needs --grammar-backend llguidance or "
                "outlines",
            )
        value = read_json(spec) if spec.kind in ("json_schema", "structural_tag") else None
        try:
            compiled = self._compile(spec.kind, spec.text, value)
        except (RuntimeError, ValueError, TypeError) as error:
            raise refuse(spec.kind, _short(str(error))) from None
        return XgrammarGrammar(
            self._library, compiled, self._tokenizer, self._eos_ids, self._pieces
        )

    def _compile(self, kind: Kind, text: str, value: Any) -> Any:
        compiler = self._compiler()
        if kind in ("json_schema", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else value
            if not isinstance(schema, dict | bool):
                raise refuse(kind, "a schema must be an object")
            is_free = not self._options.disable_any_whitespace
            most = self._options.max_whitespace or _MAX_WHITESPACE
            return compiler.compile_json_schema(
                json.dumps(close_objects(hold(schema))),
                any_whitespace=is_free,
                strict_mode=False,
                max_whitespace_cnt=most if is_free else None,
            )
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        if kind == "lark":
            return compiler.compile_lark(text)
        return compiler.compile_structural_tag(to_format(value))

    def _compiler(self) -> Any:
        with self._lock:
            if self._shared is None:
                tokenizer = self._tokenizer
                tokens = [
                    b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i)
                    for i in range(tokenizer.vocab_size)
                ]  # the library takes tokens without text as special tokens
                self._pieces = sorted(tokens)
                end_id = len(tokens)
                info = self._library.TokenizerInfo(
                    [*tokens, b""],
                    self._library.VocabType.RAW,
                    vocab_size=end_id + 1,
                    stop_token_ids=[end_id],
                )
                self._shared = self._library.GrammarCompiler(
                    info, max_threads=1, cache_enabled=False
                )
            return self._shared


def _short(message: str) -> str:
    """The message without the library's time and source line."""
    return message.split(": ", 1)[-1] if message.startswith("[") else message
