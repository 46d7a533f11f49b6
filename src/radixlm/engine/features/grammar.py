"""Structured output: compile when a request arrives, mask its logits, advance with its tokens.

The libraries do the grammar work (``radixlm.grammar``); here is only where they meet the loop.
A grammar may begin later than the output: after the end marker of a reasoning block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixlm.base.errors import InvalidRequest, RequestError
from radixlm.base.lazy import load
from radixlm.config.grammar import GrammarConfig
from radixlm.scheduler.hooks import Feature, Mask
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item
from radixlm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from radixlm.grammar.compile import GrammarCache, Ticket
    from radixlm.grammar.spec import Matcher


class _State:
    """Of one constrained request: first a ticket, then a matcher."""

    __slots__ = ("after", "error", "matcher", "tail", "ticket")

    def __init__(self, ticket: Ticket, after: str | None) -> None:
        self.ticket = ticket
        self.after = after.encode() if after else None  # None: the grammar has begun
        self.matcher: Matcher | None = None
        self.error: RequestError | None = None  # a grammar can prove too complex while it runs
        self.tail = b""  # the last bytes, in which the marker is looked for


class GrammarFeature(Feature):
    """Hooks arrive, ready, masks, committed, release. The library is loaded for the first request
    that needs it."""

    def __init__(
        self,
        config: GrammarConfig,
        load_tokenizer: Callable[[], Tokenizer],
        vocab: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._config, self._load_tokenizer = config, load_tokenizer
        self._vocab, self._eos_ids = vocab, eos_ids
        self._cache: GrammarCache | None = None
        self._tokenizer: Tokenizer | None = None
        self._states: dict[str, _State] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled."""
        return sum(state.matcher is None for state in self._states.values())

    def _ticket(self, kind: str, text: str) -> Ticket:
        if self._cache is None:
            self._tokenizer = self._load_tokenizer()
            options = load("radixlm.grammar.spec:GrammarOptions")(
                whitespace_pattern=self._config.constrained_json_whitespace_pattern,
                disable_any_whitespace=self._config.constrained_json_disable_any_whitespace,
            )
            backend = load("radixlm.grammar.compile:create_backend")(
                self._config.grammar_backend,
                self._tokenizer,
                self._eos_ids,
                self._vocab,
                options,
            )
            self._cache = load("radixlm.grammar.compile:GrammarCache")(backend)
        spec = load("radixlm.grammar.spec:GrammarSpec")(kind, text)
        ticket: Ticket = self._cache.request(spec)
        return ticket

    def arrive(self, request: Request) -> None:
        spec = request.wire.grammar
        if spec is not None:
            ticket = self._ticket(spec.kind, spec.value)
            self._states[request.rid] = _State(ticket, spec.after)

    def ready(self, request: Request) -> bool:
        state = self._states.get(request.rid)
        if state is None or state.matcher is not None:
            return True
        if not state.ticket.is_ready:
            return False
        state.matcher = state.ticket.matcher()  # InvalidRequest for a grammar that was refused
        self._advance(state, request.output_ids.tolist())  # a continued request
        return True

    def masks(self, items: Sequence[Item]) -> dict[int, Mask]:
        if not self._states:
            return {}
        found: dict[int, Mask] = {}
        for index, item in enumerate(items):
            state = self._states.get(item.rid) if item.emit else None
            if state is None or state.matcher is None or state.after is not None:
                continue
            mask = np.empty((self._vocab + 31) // 32, np.int32)
            try:
                state.matcher.fill_mask(mask)
            except RequestError as error:
                state.error = error  # told when the step is committed: the others go on
            else:
                found[index] = mask
        return found

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        state = self._states.get(request.rid)
        if state is not None:
            if state.error is not None:
                raise state.error
            self._advance(state, tokens)

    def _advance(self, state: _State, tokens: Sequence[int]) -> None:
        assert state.matcher is not None
        for token in tokens:
            if state.after is not None:
                self._look_for_marker(state, token)
            elif not state.matcher.is_terminated and not state.matcher.accept(token):
                raise InvalidRequest(f"token {token} does not fit the grammar", param="grammar")

    def _look_for_marker(self, state: _State, token: int) -> None:
        assert state.after is not None and self._tokenizer is not None
        state.tail += self._tokenizer.token_bytes(token)
        if state.after in state.tail:
            state.after = None
        else:
            state.tail = state.tail[-len(state.after) :]

    def release(self, request: Request) -> None:
        self._states.pop(request.rid, None)
