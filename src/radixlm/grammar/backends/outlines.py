"""Grammars compiled by outlines_core: regexes as state tables. No EBNF, no structural tags.

No regex of a feasible size describes any JSON object, however deeply nested, so "json_object" and
schemas that allow any object are compiled by llguidance.

A table has a row for each state of the regex and is built at once, so a regex of a few characters
can take gigabytes. It is therefore compiled first for a vocabulary of single bytes, in a separate
process with limits on time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from radixlm.base.lazy import require
from radixlm.grammar.backends.llguidance import LlguidanceBackend
from radixlm.grammar.spec import (
    CompiledGrammar,
    GrammarOptions,
    GrammarSpec,
    Mask,
    check_size,
    read_json,
    refuse,
)
from radixlm.text.tokenizer import Tokenizer

_MAX_STATES = 20_000
_MAX_CACHED_MASKS = 1000
_ANY_OBJECT: tuple[Any, ...] = ({}, True, {"type": "object"})
_TRIAL_S = 10
_TRIAL = """
import resource, sys
for kind, most in ((resource.RLIMIT_AS, 2 << 30), (resource.RLIMIT_CPU, 10)):
    hard = resource.getrlimit(kind)[1] % (1 << 64)  # -1: none
    resource.setrlimit(kind, (min(most, hard), min(most, hard)))
from outlines_core import Index, Vocabulary
vocabulary = Vocabulary(256, {bytes([i]): [i] for i in range(256)})
print(len(Index(sys.stdin.read(), vocabulary).get_transitions()))
"""


class OutlinesMatcher:
    """See ``spec.Matcher``: the states so far, the last one is the current one."""

    masks_forced = False

    def __init__(self, grammar: OutlinesGrammar, states: list[int], is_terminated: bool) -> None:
        self._grammar = grammar
        self._states = states
        self.is_terminated = is_terminated

    def fill_mask(self, out: Mask) -> None:
        state = None if self.is_terminated else self._states[-1]
        mask = self._grammar.mask(state)
        num_words = min(len(mask), len(out))
        out[:num_words] = mask[:num_words]
        out[num_words:] = 0

    def accept(self, token: int) -> bool:
        if self.is_terminated:
            return False
        if token in self._grammar.eos_ids:
            self.is_terminated = bool(self._grammar.index.is_final_state(self._states[-1]))
            return self.is_terminated
        if not self._grammar.is_token(token):
            return False
        state = self._grammar.index.get_next_state(self._states[-1], token)
        if state is not None:
            self._states.append(state)
        return state is not None

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > 0 and self.is_terminated:
            self.is_terminated = False
            num_tokens -= 1
        if num_tokens > 0:
            del self._states[-num_tokens:]

    def forced_tokens(self) -> list[int]:
        """See Matcher. Only where exactly one token is allowed."""
        states, tokens = [self._states[-1]], list[int]()
        while not self.is_terminated and len(tokens) < 64:
            allowed = self._grammar.index.get_allowed_tokens(states[-1]) or []
            if len(allowed) != 1 or not self._grammar.is_token(allowed[0]):
                break
            tokens.append(allowed[0])
            states.append(self._grammar.index.get_next_state(states[-1], allowed[0]))
        return tokens

    def copy(self) -> OutlinesMatcher:
        return OutlinesMatcher(self._grammar, list(self._states), self.is_terminated)


class OutlinesGrammar:
    """See ``spec.CompiledGrammar``: the state table, and the masks of visited states."""

    warnings: tuple[str, ...] = ()

    def __init__(self, index: Any, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.index = index
        self.eos_ids = eos_ids
        self._vocab_size = vocab_size  # of the tokenizer
        self._num_words = max(vocab_size - 1, *eos_ids, 0) // 32 + 1
        self._masks: dict[int | None, Mask] = {}

    def matcher(self) -> OutlinesMatcher:
        """See CompiledGrammar."""
        return OutlinesMatcher(self, [self.index.get_initial_state()], False)

    def is_token(self, token: int) -> bool:
        """Whether the tokenizer has the token; the library has one more, for the end."""
        return token < self._vocab_size

    def mask(self, state: int | None) -> Mask:
        """The mask of a state; None is the end, where only EOS is allowed."""
        mask = self._masks.get(state)
        if mask is None:
            allowed = set(() if state is None else self.index.get_allowed_tokens(state) or ())
            allowed = {token for token in allowed if token < self._vocab_size}
            if state is None or self.index.is_final_state(state):
                allowed |= self.eos_ids
            bits = np.zeros(self._num_words * 32, dtype=np.uint8)
            bits[list(allowed)] = 1
            mask = np.packbits(bits, bitorder="little").view(np.int32)
            if len(self._masks) < _MAX_CACHED_MASKS:
                self._masks[state] = mask
        return mask


class OutlinesBackend:
    """See ``spec.GrammarBackend``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        vocab_size: int,
        options: GrammarOptions | None = None,
    ) -> None:
        """``vocab_size``: width of the model's logits; ConfigError if the package is missing."""
        self._library = require("outlines_core", "grammar", "--grammar-backend outlines")
        self._schemas = require(
            "outlines_core.json_schema", "grammar", "--grammar-backend outlines"
        )
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = tokenizer.vocab_size
        options = options or GrammarOptions()
        self._whitespace = options.pattern(r"([ \t]|\r?\n[ \t]{0,8})?", 0)
        if options.disable_any_whitespace:
            self._whitespace = "[ ]?"
        self._vocabulary = self._build_vocabulary(tokenizer)
        self._any_object = LlguidanceBackend(tokenizer, eos_ids, vocab_size, options)

    def _build_vocabulary(self, tokenizer: Tokenizer) -> Any:
        ids: dict[bytes, list[int]] = {}
        for token in range(tokenizer.vocab_size):
            data = tokenizer.token_bytes(token)
            if data and not tokenizer.is_special(token) and token not in self._eos_ids:
                ids.setdefault(data, []).append(token)
        eos_id = self._vocab_size  # never sampled: masks have the real ones
        return self._library.Vocabulary(eos_id, ids)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """See GrammarBackend."""
        check_size(spec)
        if spec.kind == "json_object" or (
            spec.kind == "json_schema" and read_json(spec) in _ANY_OBJECT
        ):
            return self._any_object.compile(GrammarSpec("json_object"))
        pattern = self._pattern(spec)
        _try_out(spec, pattern)
        try:
            index = self._library.Index(pattern, self._vocabulary)
        except (ValueError, RuntimeError) as error:
            raise refuse(spec.kind, str(error)) from None
        return OutlinesGrammar(index, self._eos_ids, self._vocab_size)

    def _pattern(self, spec: GrammarSpec) -> str:
        if spec.kind == "regex":
            return spec.text
        if spec.kind != "json_schema":
            raise refuse(
                spec.kind,
                "--grammar-backend outlines has no such grammars; llguidance has",
            )
        schema = json.dumps(read_json(spec))
        try:
            text = self._schemas.build_regex_from_schema(schema, self._whitespace)
        except (ValueError, TypeError, RuntimeError) as error:
            raise refuse(spec.kind, str(error)) from None
        return str(text)


def _try_out(spec: GrammarSpec, pattern: str) -> None:
    """Build the table for single bytes in another process; InvalidRequest if it fails."""
    too_much = refuse(spec.kind, "the regex is too complex")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL],
            input=pattern,
            capture_output=True,
            text=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise too_much from None
    if done.returncode != 0:
        reason = done.stderr.strip().rsplit("\n", 1)[-1]
        raise refuse(spec.kind, reason) if "Error" in reason else too_much
    if int(done.stdout) > _MAX_STATES:
        raise too_much
