"""Structured output: compile when a request arrives, mask its logits, advance with its tokens.

The libraries do the grammar work (``radixlm.grammar``); here is only where they meet the loop.
A grammar may begin later than the output: after the end marker of a reasoning block.

    plan ─ extend ──────── forward ──────── masks ─ sample ─ commit ─ forced
              └─ a thread: advance, mask ──────┘

A matcher is touched by nobody but that thread, between ``extend`` and ``masks``. Where the grammar
forces tokens, they follow the committed ones unsampled; where there is no room, the first is all
that the mask allows. So what comes out depends on the tokens before it alone, and a retraction or a
restart changes nothing.

Drafts get a mask each: the matcher goes along them and back. What the grammar refuses is not
drafted, and what it forces is, in place of what a drafter guessed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from radixlm.base.errors import RequestError
from radixlm.base.lazy import load
from radixlm.config.grammar import GrammarConfig
from radixlm.engine.features.grammar_state import (
    GrammarFollower,
    GrammarState,
    Walk,
    allows_one,
    fill_along,
)
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.step.masks import Masks
from radixlm.step.plan import Item, Items
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire import requests as wire

if TYPE_CHECKING:
    from radixlm.grammar.compile import GrammarCache, GrammarFuture

_Work = tuple[int, GrammarState, list[int]]  # index of the item, its state and drafts

# waking the thread costs about this much; masks that take less are made in place
_THREAD_PAYS_S = 100e-6


class GrammarFeature(Feature):
    """Hooks arrive, ready, drafts, extend, masks, committed, forced, release. The library is loaded
    for the first request that needs it."""

    follows = True

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
        self._states: dict[str, GrammarState] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[Masks] | None = None
        self._mask_s = 20e-6  # of one mask, a running mean
        self.num_forced = 0
        self.num_failed = 0  # grammars that could not be compiled

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
                max_whitespace=self._config.constrained_json_max_whitespace_cnt,
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

    def _token_bytes(self, token: int) -> bytes:
        assert self._tokenizer is not None
        return self._tokenizer.token_bytes(token)

    def arrive(self, request: Request) -> bool:
        spec = request.wire.grammar
        if spec is not None:
            ticket = self._ticket(spec, request.wire)
            jumps = self._overlaps and not self._config.disable_jump_forward
            self._states[request.rid] = GrammarState(
                request, ticket, jumps and _may_jump(request), self._vocab, self._token_bytes
            )
        return spec is not None

    def ready(self, request: Request) -> bool:
        state = self._states.get(request.rid)
        if state is None or state.matcher is not None:
            return True
        if not state.ticket.is_ready:
            return False
        try:
            state.start()
        except RequestError:
            self.num_failed += 1
            raise
        return True

    def prepared_s(self, request: Request) -> float:
        state = self._states.get(request.rid)
        return 0.0 if state is None else state.ticket.done_s

    def stats(self) -> dict[str, float]:
        if self._cache is None:
            return {}
        return {
            "grammar_queue": self.num_waiting,
            "grammar_requests": self._cache.num_requests,
            "grammar_hits": self._cache.num_hits,
            "grammar_failures": self.num_failed,
        }

    def extend(self, items: Sequence[Item]) -> dict[str, object]:
        if self._work is not None:  # a step that was planned and never sampled
            self._work.result()
            self._work = None
        if self._states and self._overlaps:
            work = self._due(items)
            num_rows = sum(len(drafts) + 1 for _, _, drafts in work)
            if num_rows * self._mask_s > _THREAD_PAYS_S:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "grammar masks")
                self._work = self._thread.submit(self._make, work)
        return {}

    def masks(self, items: Sequence[Item]) -> Masks:
        if self._work is not None:
            work, self._work = self._work, None
            found = work.result()
        else:
            found = self._make(self._due(items)) if self._states else Masks()
        more_N = Items.of(items).more_N
        if more_N is not None and self._states:
            walks = {i: state.walk for i, state, _ in self._due(items) if state.walk is not None}
            follow = GrammarFollower(walks, more_N)
            found.follow = follow if follow.rows else None
        return found

    def _due(self, items: Sequence[Item]) -> list[_Work]:
        """The constrained ones among the items: index, state and drafts."""
        states, items = self._states, Items.of(items)
        found = [(i, states.get(item.rid)) for i, item in enumerate(items) if item.emit]
        return [
            (i, state, items.drafts_of(i).tolist())
            for i, state in found
            if state is not None and state.error is None
        ]

    def _make(self, work: list[_Work]) -> Masks:
        """Bring the matchers up to date and ask them."""
        began_s = time.perf_counter()
        found = Masks()
        num_rows = sum(len(drafts) + 1 for _, _, drafts in work)
        rows = np.zeros((num_rows, (self._vocab + 31) // 32), np.int32)
        for _, state, _ in work:  # several times where there are several paths of drafts
            state.begin_step()
        for index, state, drafts in work:
            own, rows = np.split(rows, [len(drafts) + 1])
            fill_along(state, drafts, own)
            # before the grammar; or unreachable, or complete: what is sampled is dropped
            is_free = ~own.any(axis=1)
            own[is_free] = -1
            if not is_free.all():
                found[index] = own if drafts else own[0]
        if work:
            self._mask_s += 0.1 * ((time.perf_counter() - began_s) / num_rows - self._mask_s)
        return found

    def drafts(self, request: Request, tokens: Sequence[int], room: int) -> list[int]:
        state = self._states.get(request.rid)
        if state is None:
            return list(tokens[:room])
        if not state.takes_drafts or state.matcher is None or state.error is not None:
            return []
        try:
            state.advance()
            return self._path(state, tokens, room)
        except RequestError:  # the mask tells it again, if it is so without drafts
            state.takes_drafts = False
            state.start()
            return []

    def _path(self, state: GrammarState, tokens: Sequence[int], room: int) -> list[int]:
        """The drafts that the grammar allows. Forced tokens come first, then those of ``tokens``
        that agree with them, then what is forced behind these."""
        walk, forced = Walk(state), state.forced_tokens()
        while (done := len(walk.path)) < room:
            is_guided = tuple(tokens[:done]) == walk.path and done < len(tokens)
            if not forced and not is_guided:
                forced = state.forced_tokens()
            if not forced and not is_guided:
                break
            token = forced.pop(0) if forced else tokens[done]
            if token >= self._vocab or not walk.go(token):
                break
        walk.back()
        return list(walk.path)

    def committed(self, request: Request, tokens: Sequence[int]) -> bool:
        state = self._states.get(request.rid)
        if state is None:
            return False
        if state.walk is not None:
            state.walk.back()
        if state.error is not None:
            raise state.error
        is_end = False
        for token in tokens:
            if state.committed in state.errors:
                raise state.errors[state.committed]
            state.committed = (*state.committed, token)
            if token in self._eos_ids:
                # in reasoning, which comes before the grammar, the end of the output is not its end
                state.advance()
                is_end = state.after is None
            state.pending.append(token)
        return is_end if self._eos_ids else self._is_complete(state)

    def _is_complete(self, state: GrammarState) -> bool:
        """Whether nothing can follow. Asked only where no EOS tells it."""
        state.advance()
        if state.after is not None or state.matcher is None:
            return False
        row = np.zeros((self._vocab + 31) // 32, np.int32)
        state.matcher.fill_mask(row)
        return not row.any()

    def forced(self, request: Request) -> Sequence[int]:
        state = self._states.get(request.rid)
        if state is None:
            return ()
        tokens: list[int] = []
        if state.committed:
            tokens = state.forced.get(state.committed[:-1], [])
        state.forced = {}
        tokens = tokens or self._forced_now(state)
        self.num_forced += len(tokens)
        return tokens

    def _forced_now(self, state: GrammarState) -> list[int]:
        """What must follow the committed tokens."""
        if not state.jumps or state.error is not None:
            return []
        try:
            state.advance()
            if not state.forced_tokens():
                return []
            row = np.zeros((self._vocab + 31) // 32, np.int32)
            rest = state.fill(row)  # forced is what the next step's mask would force
        except RequestError as error:
            state.error = error
            return []
        bits = np.unpackbits(row.view("u1"), bitorder="little") if allows_one(row) else row[:0]
        return [int(bits.argmax()), *rest] if len(bits) else []

    def release(self, request: Request) -> None:
        self._states.pop(request.rid, None)


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
