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

from radixlm.base.errors import InvalidRequest, RequestError
from radixlm.base.lazy import load
from radixlm.config.grammar import GrammarConfig
from radixlm.scheduler.hooks import Feature, Mask
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item, Items
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire import requests as wire

if TYPE_CHECKING:
    from radixlm.grammar.compile import GrammarCache, GrammarFuture
    from radixlm.grammar.spec import Matcher

_Work = tuple[int, "_State", list[int]]  # index of the item, its state and drafts

# waking the thread costs about this much; masks that take less are made in place
_THREAD_PAYS_S = 100e-6


class _State:
    """Of one constrained request: first a ticket, then a matcher."""

    __slots__ = (
        *(
            "after",
            "committed",
            "error",
            "errors",
            "forced",
            "jumps",
            "matcher",
            "num_filled",
            "pending",
            "request",
        ),
        *("tail", "takes_drafts", "ticket"),
    )

    def __init__(self, request: Request, ticket: GrammarFuture, jumps: bool) -> None:
        self.request, self.ticket, self.jumps = request, ticket, jumps
        self.matcher: Matcher | None = None
        self.takes_drafts = True
        self.error: RequestError | None = None  # a grammar can prove too complex while it runs
        # by the drafts before a token that is being sampled: what must follow it, and why it
        # cannot be sampled (the first one's is ``error``); which of the tokens were committed
        self.forced: dict[tuple[int, ...], list[int]] = {}
        self.errors: dict[tuple[int, ...], RequestError] = {}
        self.committed: tuple[int, ...] = ()
        self.num_filled = 0  # masks of the path that is gone along

    def start(self) -> None:
        """Make a matcher; InvalidRequest for a grammar that was refused."""
        after = self.request.wire.grammar.after if self.request.wire.grammar else None
        self.after = after.encode() if after else None  # None: the grammar has begun
        self.tail = b""  # the last bytes, in which the marker is looked for
        self.pending: list[int] = self.request.whole_output.tolist()  # not shown to the matcher
        self.matcher = self.ticket.matcher()


class GrammarFeature(Feature):
    """Hooks arrive, ready, drafts, extend, masks, committed, forced, release. The library is loaded
    for the first request that needs it."""

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

    def arrive(self, request: Request) -> bool:
        spec = request.wire.grammar
        if spec is not None:
            ticket = self._ticket(spec, request.wire)
            jumps = self._overlaps and not self._config.disable_jump_forward
            self._states[request.rid] = _State(request, ticket, jumps and _may_jump(request))
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

    def masks(self, items: Sequence[Item]) -> dict[int, Mask]:
        if self._work is not None:
            work, self._work = self._work, None
            return work.result()
        return self._make(self._due(items)) if self._states else {}

    def _due(self, items: Sequence[Item]) -> list[_Work]:
        """The constrained ones among the items: index, state and drafts."""
        states, items = self._states, Items.of(items)
        found = [(i, states.get(item.rid)) for i, item in enumerate(items) if item.emit]
        return [
            (i, state, items.drafts_of(i).tolist())
            for i, state in found
            if state is not None and state.error is None
        ]

    def _make(self, work: list[_Work]) -> dict[int, Mask]:
        """Bring the matchers up to date and ask them. An error is kept until the token is
        committed: the others go on."""
        began_s = time.perf_counter()
        found: dict[int, Mask] = {}
        num_rows = sum(len(drafts) + 1 for _, _, drafts in work)
        rows = np.zeros((num_rows, (self._vocab + 31) // 32), np.int32)
        for _, state, _ in work:  # several times where there are several paths of drafts
            state.forced, state.errors, state.committed = {}, {}, ()
        for index, state, drafts in work:
            own, rows = np.split(rows, [len(drafts) + 1])
            state.num_filled = 0
            try:
                self._advance(state)
                self._fill_along(state, drafts, own)
            except RequestError as error:
                self._fail(state, drafts, own, error)
            # before the grammar; or unreachable, or complete: what is sampled is dropped
            is_free = ~own.any(axis=1)
            own[is_free] = -1
            if not is_free.all():
                found[index] = own if drafts else own[0]
        if work:
            self._mask_s += 0.1 * ((time.perf_counter() - began_s) / num_rows - self._mask_s)
        return found

    def _fail(self, state: _State, drafts: Sequence[int], rows: Mask, error: RequestError) -> None:
        """The matcher has failed behind the first ``num_filled`` of the drafts."""
        failed = tuple(drafts[: state.num_filled])
        if not failed and failed not in state.forced:
            state.error = error
            return
        if failed not in state.forced:
            state.errors[failed] = error
        else:  # an earlier path has got on: this one ends where it failed
            for row, token in zip(rows[len(failed) :], (*drafts[len(failed) :], 0), strict=True):
                _allow_alone(row, (token + 1) % self._vocab)
        state.takes_drafts = False  # a matcher that failed cannot go back
        state.start()

    def _fill_along(self, state: _State, drafts: Sequence[int], rows: Mask) -> None:
        """Write the masks of the next token, and of those after each draft."""
        assert state.matcher is not None
        start, num_accepted = (state.after, state.tail), 0
        carried: list[int] = []
        for at, (row, token) in enumerate(zip(rows, (None, *drafts), strict=True)):
            if token is not None:
                is_accepted = self._step(state, token)
                if is_accepted is None:
                    break
                num_accepted += is_accepted
            if carried:
                _allow_alone(row, carried[0])
                carried = carried[1:]
            elif state.after is None:
                carried = self._fill(state, row)
            state.forced[tuple(drafts[:at])], state.num_filled = carried, at + 1
        if drafts:
            state.matcher.rollback(num_accepted)
            state.after, state.tail = start

    def _fill(self, state: _State, row: Mask) -> list[int]:
        """Write the mask of the next token; what must follow that."""
        matcher = state.matcher
        assert matcher is not None
        if not state.jumps or matcher.masks_forced:
            matcher.fill_mask(row)
            if not state.jumps or not _allows_one(row):
                return []
        forced = matcher.forced_tokens()
        if forced and forced[0] < self._vocab:
            _allow_alone(row, forced[0])
            return forced[1:]
        if not matcher.masks_forced:
            matcher.fill_mask(row)
        return []

    def drafts(self, request: Request, tokens: Sequence[int], room: int) -> list[int]:
        state = self._states.get(request.rid)
        if state is None:
            return list(tokens[:room])
        if not state.takes_drafts or state.matcher is None or state.error is not None:
            return []
        try:
            self._advance(state)
            return self._path(state, tokens, room)
        except RequestError:  # the mask tells it again, if it is so without drafts
            state.takes_drafts = False
            state.start()
            return []

    def _path(self, state: _State, tokens: Sequence[int], room: int) -> list[int]:
        """The drafts that the grammar allows. Forced tokens come first, then those of ``tokens``
        that agree with them, then what is forced behind these."""
        assert state.matcher is not None
        start, num_accepted = (state.after, state.tail), 0
        path: list[int] = []
        forced = self._forced(state)
        while len(path) < room:
            is_guided = list(tokens[: len(path)]) == path and len(path) < len(tokens)
            if not forced and not is_guided:
                forced = self._forced(state)
            if not forced and not is_guided:
                break
            token = forced.pop(0) if forced else tokens[len(path)]
            is_accepted = self._step(state, token) if token < self._vocab else None
            if is_accepted is None:
                break
            num_accepted += is_accepted
            path.append(token)
        state.matcher.rollback(num_accepted)
        state.after, state.tail = start
        return path

    def _forced(self, state: _State) -> list[int]:
        assert state.matcher is not None
        return state.matcher.forced_tokens() if state.after is None else []

    def _step(self, state: _State, token: int) -> int | None:
        """Go one draft ahead; how many tokens the matcher accepted, None if the draft is
        refused."""
        assert state.matcher is not None
        if state.after is not None:
            self._look_for_marker(state, token)
            return 0
        return 1 if not state.matcher.is_terminated and state.matcher.accept(token) else None

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
        for token in tokens:
            if state.committed in state.errors:
                raise state.errors[state.committed]
            state.committed = (*state.committed, token)
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
        if state is None:
            return ()
        tokens: list[int] = []
        if state.committed:
            tokens = state.forced.get(state.committed[:-1], [])
        state.forced = {}
        tokens = tokens or self._forced_now(state)
        self.num_forced += len(tokens)
        return tokens

    def _forced_now(self, state: _State) -> list[int]:
        """What must follow the committed tokens."""
        if not state.jumps or state.error is not None:
            return []
        try:
            self._advance(state)
            if not self._forced(state):
                return []
            row = np.zeros((self._vocab + 31) // 32, np.int32)
            rest = self._fill(state, row)  # forced is what the next step's mask would force
        except RequestError as error:
            state.error = error
            return []
        bits = np.unpackbits(row.view("u1"), bitorder="little") if _allows_one(row) else row[:0]
        return [int(bits.argmax()), *rest] if len(bits) else []

    def _look_for_marker(self, state: _State, token: int) -> None:
        assert state.after is not None and self._tokenizer is not None
        state.tail += self._tokenizer.token_bytes(token)
        if state.after in state.tail:
            state.after = None
        else:
            state.tail = state.tail[-len(state.after) :]

    def release(self, request: Request) -> None:
        self._states.pop(request.rid, None)


def _allow_alone(row: Mask, token: int) -> None:
    row[:] = 0
    row.view("u4")[token // 32] = 1 << (token % 32)


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
