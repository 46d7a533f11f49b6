"""Trees of drafts as the paths that verify them.

A path is a sequence of its own from the last known token on: kernels read keys by their place, so a
draft has the bits that it has in a chain only behind its own ancestors. The first path has the most
expected tokens, each further one adds the most to those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from radixlm.base.record import Record
from radixlm.speculative.drafter import Float32Array, Path, Proposal
from radixlm.step.plan import Int32Array

MAX_ROWS = 16  # requests whose trees a draft model grows together: each needs pages for that


class TreeShape(Record):
    """``branches`` drafts of each depth are gone on with, and ``size`` of all stay. ``depth``: the
    longest path. ``first_page``: that of the branches in the draft's pools."""

    branches: int
    size: int
    depth: int
    first_page: int = 0

    def pages_of_branch(self, page_size: int) -> int:
        """Pages for the entries of a branch, wherever its first one stands in a page."""
        return (self.depth + page_size - 2) // page_size + 1

    def num_pages(self, page_size: int) -> int:
        """Pages of all branches."""
        return MAX_ROWS * self.branches * self.pages_of_branch(page_size)


def tree_proposal(tokens: Int32Array, survival: Float32Array, parents: Int32Array) -> Proposal:
    """The paths of a tree, whose draft n follows draft ``parents[n]`` < n (-1: the last token)."""
    gains = survival.astype(np.float64).tolist()  # of the longest path from a draft on
    next_of = [-1] * (len(gains) + 1)  # the first draft of that path; the last: from the root
    for n in range(len(gains) - 1, -1, -1):
        if next_of[n] >= 0:
            gains[n] += gains[next_of[n]]
        best = next_of[parents[n]]
        if best < 0 or gains[n] >= gains[best]:
            next_of[parents[n]] = n
    heads = [n for n in range(len(gains)) if next_of[parents[n]] != n]
    first = _down(next_of[-1], next_of)
    others = []
    for head in sorted(heads, key=lambda n: -gains[n]):
        path = _up(int(parents[head]), parents)
        tail = _down(head, next_of)
        others.append(Path(tokens[path + tail], len(path), gains[head]))
    return Proposal(tokens[first], survival[first], tuple(others))


def distinct_paths(first: Int32Array, others: Iterable[Path]) -> tuple[Path, ...]:
    """Those of ``others`` that are no beginning of ``first`` or of a path before them."""
    known, kept = [first], list[Path]()
    for path in others:
        tokens = path.tokens
        num_shared = max(num_common(tokens, one) for one in known)
        if num_shared < len(tokens):
            kept.append(Path(tokens, num_shared, path.gain))
            known.append(tokens)
    return tuple(kept)


def num_common(one: Int32Array, other: Int32Array) -> int:
    """Tokens that both begin with."""
    num = min(len(one), len(other))
    is_other = np.flatnonzero(one[:num] != other[:num])
    return int(is_other[0]) if len(is_other) else num


def _down(first: int, next_of: Sequence[int]) -> list[int]:
    path = []
    while first >= 0:
        path.append(first)
        first = next_of[first]
    return path


def _up(last: int, parents: Int32Array) -> list[int]:
    path = []
    while last >= 0:
        path.append(last)
        last = int(parents[last])
    return path[::-1]
