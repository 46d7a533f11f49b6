"""``allowed_token_ids`` and ``bad_words``: masks that depend on the last tokens of the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixlm.base.errors import InvalidRequest
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.step.masks import Mask, Masks
from radixlm.step.plan import Item, Items


class _Rules:
    """Of one request. ``first``: the mask without regard to earlier tokens."""

    __slots__ = ("first", "longer", "request")

    def __init__(self, request: Request, vocab: int) -> None:
        wire = request.wire
        self.request = request
        self.first: Mask = np.full((vocab + 31) // 32, -1, np.int32)
        if wire.sampling.allowed_token_ids:
            self.first[:] = 0
            ids = np.array(wire.sampling.allowed_token_ids)
            np.bitwise_or.at(
                self.first.view("u4"), ids // 32, np.uint32(1) << (ids % 32).astype("u4")
            )
        self.longer = [word for word in wire.bad_words if len(word) > 1]
        for word in wire.bad_words:
            if len(word) == 1:
                _forbid(self.first, word[0])
        if not self.first.any():
            raise InvalidRequest("bad_words forbids all of allowed_token_ids", "bad_words")

    def mask(self, drafts: Sequence[int]) -> Mask:
        """The mask of the next token; with drafts, also of those after each."""
        rows = np.tile(self.first, (len(drafts) + 1, 1))
        if self.longer:
            most = max(map(len, self.longer)) - 1
            known = [*self.request.output_ids[-most:].tolist(), *drafts]
            for row, end in zip(rows, range(len(known) - len(drafts), len(known) + 1), strict=True):
                for *before, last in self.longer:
                    if len(before) <= end and known[end - len(before) : end] == before:
                        _forbid(row, last)
        return rows if drafts else rows[0]


class TokenRules(Feature):
    """Hooks arrive, masks, release."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._rules: dict[str, _Rules] = {}

    def arrive(self, request: Request) -> bool:
        if request.wire.sampling.allowed_token_ids or request.wire.bad_words:
            self._rules[request.rid] = _Rules(request, self._vocab)
        return False

    def masks(self, items: Sequence[Item]) -> Masks:
        if not self._rules:
            return Masks()
        items = Items.of(items)
        found = ((i, self._rules.get(item.rid)) for i, item in enumerate(items) if item.emit)
        masks = {i: rules.mask(items.drafts_of(i).tolist()) for i, rules in found if rules}
        return Masks(masks)

    def release(self, request: Request) -> None:
        self._rules.pop(request.rid, None)


def _forbid(row: Mask, token: int) -> None:
    row.view("u4")[token // 32] &= 0xFFFFFFFF ^ (1 << (token % 32))
