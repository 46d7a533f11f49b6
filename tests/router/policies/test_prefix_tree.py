"""The tree of prefixes against a list of all texts, and its memory."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from radixlm.router.policies.prefix_tree import NODE_BYTES, PrefixTree, _common

TEXTS = st.lists(
    st.tuples(st.binary(max_size=12).map(lambda b: bytes(c % 3 for c in b)), st.integers(0, 2))
)


def holders(tree: PrefixTree, text: bytes) -> list[tuple[int, int]]:
    """(depth, bits) after each node of the path."""
    depth, found = 0, []
    for node in tree.path(text):
        depth += len(node.edge)
        found.append((depth, node.workers))
    return found


@given(TEXTS, st.binary(max_size=12).map(lambda b: bytes(c % 3 for c in b)), st.integers(1, 4))
def test_a_tree_knows_what_a_list_knows(
    sent: list[tuple[bytes, int]], asked: bytes, page: int
) -> None:
    tree = PrefixTree(1 << 20, page)
    for text, worker in sent:
        tree.mark(tree.path(text), 1 << worker)
    for depth, bits in holders(tree, asked):
        assert bits == sum(
            1 << worker
            for worker in range(3)
            if any(w == worker and text.startswith(asked[:depth]) for text, w in sent)
        )
    found = holders(tree, asked)
    whole = len(asked) - len(asked) % page
    assert found[-1][0] == whole if whole else not found


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 40))
def test_the_first_difference_is_found(same: int, more: int, at: int) -> None:
    text = bytes(at) + b"a" * same
    edge = b"a" * same + b"b" + bytes(more)
    for rest in (b"", b"c" + b"b" * more):
        assert _common(edge, text + rest, at, len(text + rest)) == same


@given(TEXTS, st.integers(0, 4000), st.integers(1, 4))
def test_the_bound_holds_and_the_count_is_exact(
    sent: list[tuple[bytes, int]], limit: int, page: int
) -> None:
    tree = PrefixTree(limit, page)
    for text, worker in sent:
        tree.mark(tree.path(text), 1 << worker)
        assert tree.num_bytes <= limit
        assert {node for node in tree.nodes() if not node.children} == {*tree._leaves}
        assert tree.num_bytes == sum(NODE_BYTES + len(node.edge) for node in tree.nodes())


def test_what_was_used_last_stays() -> None:
    tree = PrefixTree(100_000)
    for i in range(1000):
        tree.mark(tree.path(b"often" * 20 + b"%d" % (i % 3)), 1)
        tree.mark(tree.path(random.Random(i).randbytes(300)), 2)
    assert holders(tree, b"often" * 20)[-1] == (96, 1)
    assert sum(1 for _ in tree.nodes()) < 150


def test_memory_is_what_the_tree_counts() -> None:
    draw = random.Random(0)
    tracemalloc.start()
    try:
        tree = PrefixTree(4 << 20)
        for _ in range(30_000):
            tree.mark(tree.path(draw.randbytes(150)), 1)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * tree.num_bytes < used < 1.1 * tree.num_bytes
    assert tree.num_bytes <= 4 << 20
