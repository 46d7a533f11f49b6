"""Structured output: compile when a request arrives, mask its logits, advance with its tokens.

The libraries do the grammar work (``radixlm.grammar``); here is only where they meet the loop.
A grammar may begin later than the output: after the end marker of a reasoning block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from radixlm.base.errors import InvalidRequest
from radixlm.base.lazy import load
from radixlm.config.grammar import GrammarConfig
from radixlm.scheduler.hooks import Feature, Mask
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item
from radixlm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from radixlm.grammar.backends.base import Matcher
    from radixlm.grammar.compile import GrammarCache


class _State:
    """Of one constrained request."""

    __slots__ = ("after", "matcher", "tail", "waiting")

    def __init__(self, waiting: Future[Callable[[], Matcher]], after: str | None) -> None:
        self.waiting = waiting
        self.after = after  # text that must come first; None once it has
        self.matcher: Matcher | None = None
        self.tail = b""  # the last bytes, in which the marker is looked for


class GrammarFeature(Feature):
    """Hooks arrive, ready, masks, committed, release."""

    def __init__(
        self,
        config: GrammarConfig,
        tokenizer: Callable[[], Tokenizer],
        vocab: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._config, self._load_tokenizer = config, tokenizer
        self._vocab, self._eos_ids = vocab, eos_ids
        self._cache: GrammarCache | None = None
        self._tokenizer: Tokenizer | None = None
        self._states: dict[str, _State] = {}

    def arrive(self, request: Request) -> None:
        spec = request.wire.grammar
        if spec is None:
            return
        if self._cache is None or self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
            cache_class = load("radixlm.grammar.compile:GrammarCache")  # when first needed
            self._cache = cache_class(self._config, self._tokenizer, self._vocab, self._eos_ids)
        self._states[request.rid] = _State(self._cache.submit(spec), spec.after)

    def ready(self, request: Request) -> bool:
        state = self._states.get(request.rid)
        if state is None or state.matcher is not None:
            return True
        if not state.waiting.done():
            return False
        state.matcher = state.waiting.result()()  # raises InvalidRequest for a bad grammar
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
            state.matcher.fill_mask(mask)
            found[index] = mask
        return found

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        state = self._states.get(request.rid)
        if state is not None:
            self._advance(state, tokens)

    def _advance(self, state: _State, tokens: Sequence[int]) -> None:
        assert state.matcher is not None and self._tokenizer is not None
        for token in tokens:
            if state.after is not None:
                self._look_for_marker(state, token)
            elif not state.matcher.is_terminated and not state.matcher.accept(token):
                raise InvalidRequest(f"token {token} does not fit the grammar", param="grammar")

    def _look_for_marker(self, state: _State, token: int) -> None:
        assert state.after is not None and self._tokenizer is not None
        marker = state.after.encode()
        state.tail = (state.tail + self._tokenizer.token_bytes(token))[-4 * len(marker) - 64 :]
        if marker in state.tail:
            state.after = None

    def release(self, request: Request) -> None:
        state = self._states.pop(request.rid, None)
        if state is not None:
            state.waiting.cancel()
