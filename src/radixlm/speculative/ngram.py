"""NgramDrafter: drafts what followed the last tokens before: in the request's own text, in texts
that the same namespace has produced, and in corpora of the operator.

This is prompt lookup (Saxena, 2023) over hash chains, with the counts and the path probabilities of
suffix decoding (Oliaro et al., arXiv 2411.04975): the chance of a draft is the share of earlier
occurrences that go on alike, times what matches of that length have been worth so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from radixlm.base.errors import InvalidRequest, NotFound
from radixlm.base.record import Record
from radixlm.speculative.drafter import NOTHING, Float32Array, Proposal
from radixlm.speculative.text_index import MAX_MATCH, SEPARATOR, Matches, TextIndex
from radixlm.step.plan import Int32Array

_LEARNING_RATE = 0.05
_SINGLE = np.array([SEPARATOR], np.int32)


class NgramOptions(Record):
    """``min_match``: tokens that must match. ``depth``: tokens of the prompt that are kept before
    an output. ``by_frequency``: among the longest matches, follow the most frequent continuation,
    not the latest. ``capacity``: tokens of shared texts, of all namespaces together; 0: none.
    ``max_corpus_tokens``: of all corpora together. ``corpus_budget``: longest draft that is taken
    from a corpus; 0: no limit."""

    min_match: int = 2
    depth: int = 18
    by_frequency: bool = False
    capacity: int = 10_000_000
    max_corpus_tokens: int = 10_000_000
    corpus_budget: int = 0


class SharedTexts:
    """Finished texts by namespace, of at most ``capacity`` tokens. Each namespace fills a young
    index, which becomes the old one when it is half full; the old one of the namespace that was
    used least recently goes first."""

    def __init__(self, capacity: int, depth: int) -> None:
        self.capacity, self.depth = capacity, depth
        self._indexes: OrderedDict[Hashable, list[TextIndex]] = OrderedDict()
        self.num_tokens = 0

    def add(self, namespace: Hashable, ids: Int32Array, prompt_len: int) -> None:
        """Keep an output, with the end of its prompt."""
        text = ids[max(0, prompt_len - self.depth) :]
        if len(ids) <= prompt_len or len(text) + 1 > self.capacity // 2:
            return
        generations = self._indexes.setdefault(namespace, [TextIndex()])
        self._indexes.move_to_end(namespace)
        if generations[-1].num_tokens + len(text) >= self.capacity // 2:
            generations.append(TextIndex())
        generations[-1].extend(np.concatenate((text, _SINGLE)))
        self.num_tokens += len(text) + 1
        while self.num_tokens > self.capacity:
            self._evict()

    def _evict(self) -> None:
        namespace, generations = next(iter(self._indexes.items()))
        self.num_tokens -= generations.pop(0).num_tokens
        if not generations:
            del self._indexes[namespace]

    def indexes(self, namespace: Hashable) -> Sequence[TextIndex]:
        """The texts of the namespace, the youngest first."""
        if namespace not in self._indexes:
            return ()
        self._indexes.move_to_end(namespace)
        return self._indexes[namespace][::-1]

    def clear(self) -> None:
        """Forget all texts."""
        self._indexes.clear()
        self.num_tokens = 0


class _Text:
    """A running request: its tokens; what was proposed last with the length of its match; and the
    place of ``source`` that its last token stands for, if it goes on copying from there."""

    __slots__ = (
        "index",
        "last",
        "match_len",
        "namespace",
        "place",
        "prompt_len",
        "ratios",
        "source",
    )

    def __init__(self, namespace: Hashable, ids: Int32Array) -> None:
        self.namespace, self.prompt_len = namespace, len(ids)
        self.index = TextIndex(ids)
        self.last: Int32Array = NOTHING.tokens
        self.match_len = 0
        self.ratios: list[float] = []
        self.source: TextIndex | None = None
        self.place = 0


class NgramDrafter:
    """Drafts from tokens alone, on the host. A wrong draft costs time, never a token. Token ids
    outside [0, vocab_size) and ``never`` (placeholders of media) end a draft."""

    def __init__(
        self, options: NgramOptions, vocab_size: int, never: frozenset[int] = frozenset()
    ) -> None:
        self.options, self.vocab_size = options, vocab_size
        self._never = np.array(sorted(never), np.int32)
        self._texts: dict[str, _Text] = {}
        self._shared = SharedTexts(options.capacity, options.depth)
        self._corpora: dict[str, TextIndex] = {}
        # chance that the token behind a match of so many tokens is right: learnt as drafts are
        # compared with what came; the start is that of prompt lookup on chats
        self._worth = 1 - 0.6 / np.arange(1, MAX_MATCH + 1, dtype=np.float32) ** 0.7

    def start(self, rid: str, namespace: Hashable, ids: Int32Array) -> None:
        """A request runs, with ``ids`` known. What it writes is proposed to requests of equal
        namespaces only. A known rid starts again."""
        self._texts[rid] = _Text(namespace, ids)

    def append(self, rid: str, tokens: Int32Array) -> None:
        """Tokens were committed; an unknown rid is ignored, here and below."""
        text = self._texts.get(rid)
        if text is None:
            return
        if len(text.last):
            self._learn(text, np.asarray(tokens).tolist())
        text.place += len(tokens)
        text.index.extend(np.asarray(tokens, np.int32))

    def _learn(self, text: _Text, tokens: Sequence[int]) -> None:
        """What the last proposal would have been worth, verified or not. After a wrong guess that
        one token was replaced, the copy is over."""
        if text.match_len == 1 and text.last[0] != tokens[0]:
            text.source = None
        rows = zip(text.last.tolist(), tokens, text.ratios, strict=False)
        for depth, (draft, token, ratio) in enumerate(rows):
            place = min(text.match_len + depth, MAX_MATCH) - 1
            if ratio > 0.9:  # else the other continuations are to blame, not the length
                self._worth[place] += _LEARNING_RATE * ((draft == token) - self._worth[place])
            if draft != token:
                break
        text.last = NOTHING.tokens

    def finish(self, rid: str) -> None:
        """The request is over."""
        text = self._texts.pop(rid, None)
        if text is not None and self.options.capacity:
            self._shared.add(text.namespace, text.index.ids, text.prompt_len)

    def propose(self, rid: str, max_tokens: int) -> Proposal:
        """At most ``max_tokens`` tokens that may follow."""
        text = self._texts.get(rid)
        if text is None or max_tokens < 1:
            return NOTHING
        tail = text.index.ids[-MAX_MATCH:]
        best, source, limit = text.index.find(tail, self.options.min_match), text.index, max_tokens
        others = [(index, max_tokens) for index in self._shared.indexes(text.namespace)]
        budget = self.options.corpus_budget or max_tokens
        others += [(index, min(budget, max_tokens)) for index in self._corpora.values()]
        for index, most in others:
            known = 0 if best is None else int(best.lengths.max())
            found = index.find(tail, max(self.options.min_match, known + 1), lag=1)
            if found is not None:
                best, source, limit = found, index, most
        if best is None:
            # a token that differs from a source may have replaced the one there
            if text.source is None or text.place >= text.source.num_tokens - 1:
                return NOTHING
            source = text.source
            best = Matches(np.array([text.place]), np.array([1]))
        return self._draft(text, source, best, limit)

    def _draft(self, text: _Text, source: TextIndex, found: Matches, count: int) -> Proposal:
        """The likeliest continuation, up to the first token that cannot be drafted."""
        is_longest = found.lengths == found.lengths.max()
        ends, match_len = found.ends[is_longest], int(found.lengths.max())
        branches = source.following(ends, count)
        chosen, text.source, text.place = branches[0], source, int(ends[0])
        if self.options.by_frequency and len(ends) > 2:
            # the branch with which the others agree longest
            alike = np.logical_and.accumulate(branches[:, None] == branches[None], axis=2)
            best = int(alike.sum(axis=(1, 2)).argmax())
            chosen, text.place = branches[best], int(ends[best])
        is_bad = (chosen < 0) | (chosen >= self.vocab_size) | np.isin(chosen, self._never)
        if is_bad.any():
            chosen = chosen[: int(is_bad.argmax())]
        if not len(chosen):
            return NOTHING
        agree = np.logical_and.accumulate(branches[:, : len(chosen)] == chosen, axis=1).sum(axis=0)
        ratios = agree / np.concatenate(([len(ends)], agree[:-1]))
        places = np.minimum(match_len + np.arange(len(chosen)), MAX_MATCH) - 1
        survival: Float32Array = np.cumprod(ratios * self._worth[places]).astype(np.float32)
        text.last, text.match_len, text.ratios = chosen, match_len, ratios.tolist()
        return Proposal(chosen, survival)

    # ---- corpora and shared texts ------------------------------------------------------------

    @property
    def corpora(self) -> Mapping[str, int]:
        """Name of each corpus -> its tokens."""
        return {name: index.num_tokens for name, index in self._corpora.items()}

    def add_corpus(self, name: str, ids: Int32Array) -> int:
        """Draft from a corpus, for all namespaces. Texts are divided by SEPARATOR. Returns how many
        tokens were taken; raises InvalidRequest if the name is in use or no token fits."""
        if name in self._corpora:
            raise InvalidRequest(f"corpus_id: {name!r} is loaded; remove it first", "corpus_id")
        limit = self.options.max_corpus_tokens
        room = limit - sum(self.corpora.values())
        if room < 1 or not len(ids):
            raise InvalidRequest(
                f"documents: none fits, of {limit} tokens {room} are free "
                "(--speculative-ngram-external-corpus-max-tokens)"
                if len(ids)
                else "documents: they hold no token",
                "documents",
            )
        self._corpora[name] = TextIndex(ids[:room])
        return min(room, len(ids))

    def remove_corpus(self, name: str) -> None:
        """Forget a corpus; raises NotFound."""
        if self._corpora.pop(name, None) is None:
            known = ", ".join(self._corpora) or "none"
            raise NotFound(f"corpus_id: {name!r} is not loaded; loaded are: {known}")
        self._end_copies()

    def flush(self) -> None:
        """Forget what requests have written that are over; corpora stay."""
        self._shared.clear()
        self._end_copies()

    def _end_copies(self) -> None:
        for text in self._texts.values():
            text.source = None
