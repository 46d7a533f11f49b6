"""Trees of drafts: which drafts fit into so many rows."""

import torch
from trees import Node, leaves, nodes_once

none = torch.zeros(0)
PATHS = [(5,), (5, 6), (7,), (5, 6, 8), (5, 9), (7, 1)]  # the surest first
DRAFTS = [Node(path, -float(n), none, none, none) for n, path in enumerate(PATHS)]


def test_each_node_takes_a_row() -> None:
    assert nodes_once(DRAFTS, 4) == set(PATHS[:3])


def test_each_leaf_takes_the_rows_of_its_path() -> None:
    assert leaves(DRAFTS, 3) == {(5,), (5, 6)}
    assert leaves(DRAFTS, 4) == {(5,), (5, 6), (5, 6, 8)}  # (7,) would take two more
    assert leaves(DRAFTS, 6) == {(5,), (5, 6), (7,), (5, 6, 8)}
    assert leaves(DRAFTS, 9) == {(5,), (5, 6), (7,), (5, 6, 8), (5, 9)}
