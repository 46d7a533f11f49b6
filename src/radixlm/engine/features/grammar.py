"""Structured output: compile when a request arrives, mask its logits, advance with its tokens.

The libraries do the grammar work (``radixlm.grammar``); here is only where they meet the loop.
A grammar may begin later than the output: after the end marker of a reasoning block.

    plan ─ extend ──────── forward ──────── masks ─ sample ─ commit ─ forced
              └─ a thread: advance, mask ──────┘

A matcher is touched by nobody but that thread, between ``extend`` and ``masks``. Where the grammar
forces several tokens, the first is all that the mask allows, and the rest follow it unsampled:
what comes out depends on the tokens before it alone, so a retraction or a restart changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from radixlm.base.errors import InvalidRequest, RequestError
from radixlm.base.lazy import load
from radixlm.config.grammar import GrammarConfig
from radixlm.scheduler.hooks import Feature, Mask
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire import requests as wire

if TYPE_CHECKING:
    from radixlm.grammar.compile import GrammarCache, GrammarFuture
    from radixlm.grammar.spec import Matcher

# waking the thread costs about this much; masks that take less are made in place
_THREAD_PAYS_S = 100e-6


class _State:
    """Of one constrained request: first a ticket, then a matcher."""

    __slots__ = ("after", "error", "forced", "jumps", "matcher", "pending", "tail", "ticket")

    def __init__(self, ticket: GrammarFuture, after: str | None, jumps: bool) -> None:
        self.ticket = ticket
        self.after = after.encode() if after else None  # None: the grammar has begun
        self.jumps = jumps
        self.matcher: Matcher | None = None
        self.error: RequestError | None = None  # a grammar can prove too complex while it runs
        self.pending: list[int] = []  # known tokens that the matcher has not seen
        self.forced: list[int] = []  # what must follow the token that is being sampled
        self.tail = b""  # the last bytes, in which the marker is looked for


class GrammarFeature(Feature):
    """Hooks arrive, ready, extend, masks, committed, forced, release. The library is loaded for
    the first request that needs it."""

    def __init__(
        self,
        config: GrammarConfig,
        load_tokenizer: Callable[[], Tokenizer],
        vocab: int,
        eos_ids: tuple[int, ...],
        overlaps: bool = True,
    ) -> None:
        """``overlaps``: a step is committed before the next is planned, so the masks can be made
        while it runs (a deeper pipeline hides them by itself)."""
        self._config, self._load_tokenizer = config, load_tokenizer
        self._vocab, self._eos_ids = vocab, eos_ids
        self._overlaps = overlaps
        self._cache: GrammarCache | None = None
        self._tokenizer: Tokenizer | None = None
        self._states: dict[str, _State] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[dict[int, Mask]] | None = None
        self._mask_s = 20e-6  # of one mask, a running mean
        self.num_forced = 0

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled."""
        return sum(state.matcher is None for state in self._states.values())

    def _ticket(self, spec: wire.GrammarSpec, asked: wire.TokenizedRequest) -> GrammarFuture:
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
            make_trial = load("radixlm.grammar.compile:trial_maker")(
                self._config.grammar_backend, self._tokenizer, options
            )
            cache = load("radixlm.grammar.compile:GrammarCache")
            self._cache = cache(backend, make_trial=make_trial)
        exact = load("radixlm.grammar.spec:GrammarSpec")(spec.kind, spec.value, spec.is_strict)
        ticket: GrammarFuture = self._cache.request(exact, asked.fair_key, asked.tenant)
        return ticket

    def arrive(self, request: Request) -> bool:
        spec = request.wire.grammar
        if spec is not None:
            ticket = self._ticket(spec, request.wire)
            jumps = self._overlaps and not self._config.disable_jump_forward
            self._states[request.rid] = _State(ticket, spec.after, jumps and _may_jump(request))
        return spec is not None

    def ready(self, request: Request) -> bool:
        state = self._states.get(request.rid)
        if state is None or state.matcher is not None:
            return True
        if not state.ticket.is_ready:
            return False
        state.matcher = state.ticket.matcher()  # InvalidRequest for a grammar that was refused
        state.pending = request.output_ids.tolist()  # a continued request
        return True

    def extend(self, items: Sequence[Item]) -> dict[str, object]:
        if self._work is not None:  # a step that was planned and never sampled
            self._work.result()
            self._work = None
        if self._states and self._overlaps:
            work = self._due(items)
            if len(work) * self._mask_s > _THREAD_PAYS_S:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "grammar masks")
                self._work = self._thread.submit(self._make, work)
        return {}

    def masks(self, items: Sequence[Item]) -> dict[int, Mask]:
        if self._work is not None:
            work, self._work = self._work, None
            return work.result()
        return self._make(self._due(items)) if self._states else {}

    def _due(self, items: Sequence[Item]) -> list[tuple[int, _State]]:
        """The constrained ones among the items, with their index."""
        states = self._states
        found = [(i, states.get(item.rid)) for i, item in enumerate(items) if item.emit]
        return [(i, state) for i, state in found if state is not None and state.error is None]

    def _make(self, work: list[tuple[int, _State]]) -> dict[int, Mask]:
        """Bring the matchers up to date and ask them. An error is kept until the step is committed:
        the others go on."""
        began_s = time.perf_counter()
        found: dict[int, Mask] = {}
        rows = np.zeros((len(work), (self._vocab + 31) // 32), np.int32)
        for (index, state), row in zip(work, rows, strict=True):
            try:
                self._advance(state)
                if state.after is None:
                    self._fill(state, row)
                    if row.any():  # else the output is complete: what this step samples is dropped
                        found[index] = row
            except RequestError as error:
                state.error = error
        if work:
            self._mask_s += 0.1 * ((time.perf_counter() - began_s) / len(work) - self._mask_s)
        return found

    def _fill(self, state: _State, row: Mask) -> None:
        matcher = state.matcher
        assert matcher is not None
        state.forced = []
        if not state.jumps or matcher.masks_forced:
            matcher.fill_mask(row)
            if not state.jumps or not _allows_one(row):
                return
        forced = matcher.forced_tokens()
        if forced and forced[0] < self._vocab:
            row[:] = 0
            row.view("u4")[forced[0] // 32] = 1 << (forced[0] % 32)
            state.forced = forced[1:]
        elif not matcher.masks_forced:
            matcher.fill_mask(row)

    def _advance(self, state: _State) -> None:
        """Show the matcher what has become known."""
        assert state.matcher is not None
        pending, state.pending = state.pending, []
        for token in pending:
            if state.after is not None:
                self._look_for_marker(state, token)
            elif not state.matcher.is_terminated and not state.matcher.accept(token):
                raise InvalidRequest(f"token {token} does not fit the grammar", param="grammar")

    def committed(self, request: Request, tokens: Sequence[int]) -> bool:
        state = self._states.get(request.rid)
        if state is None:
            return False
        if state.error is not None:
            raise state.error
        state.pending.extend(tokens)
        if not self._eos_ids:
            return self._is_complete(state)
        # in reasoning, which comes before the grammar, the end of the output is not its end
        return state.after is None and tokens[-1] in self._eos_ids

    def _is_complete(self, state: _State) -> bool:
        """Whether nothing can follow. Asked only where no EOS tells it."""
        self._advance(state)
        if state.after is not None or state.matcher is None:
            return False
        row = np.zeros((self._vocab + 31) // 32, np.int32)
        state.matcher.fill_mask(row)
        return not row.any()

    def forced(self, request: Request) -> Sequence[int]:
        state = self._states.get(request.rid)
        if state is None or not state.forced:
            return ()
        tokens, state.forced = state.forced, []
        self.num_forced += len(tokens)
        return tokens

    def _look_for_marker(self, state: _State, token: int) -> None:
        assert state.after is not None and self._tokenizer is not None
        state.tail += self._tokenizer.token_bytes(token)
        if state.after in state.tail:
            state.after = None
        else:
            state.tail = state.tail[-len(state.after) :]

    def release(self, request: Request) -> None:
        self._states.pop(request.rid, None)


def _allows_one(row: Mask) -> bool:
    """Whether the mask leaves no choice."""
    words = row.nonzero()[0]
    return len(words) == 1 and int(row.view("u4")[words[0]]).bit_count() == 1


def _may_jump(request: Request) -> bool:
    """Forced tokens have no logits: whatever reads the logits of each token needs them sampled."""
    wire = request.wire
    return not (
        wire.logprobs is not None
        or wire.return_hidden_states
        or wire.processor is not None
        or wire.sampling.needs_penalties
        or wire.sampling.logit_bias
        or wire.sampling.allowed_token_ids
        or wire.bad_words
    )
