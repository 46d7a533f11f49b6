"""Chunks of hidden states -> one vector, against the whole at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixlm.arch.spec import Pool
from radixlm.models.pooled_head import PooledHead
from radixlm.models.pooler import Pooler
from radixlm.step.plan import Item
from radixlm.wire.requests import PoolingParams

TOKENS = [7, 5, 9, 5, 3, 8]
HIDDEN = torch.randn(len(TOKENS), 4, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.arange(1.0, len(TOKENS) + 1)[:, None]
WANTED = {
    "last": HIDDEN[-1],
    "cls": HIDDEN[0],
    "mean": HIDDEN.mean(0),
    "max": HIDDEN.max(0).values,
    "mean_sqrt": HIDDEN.sum(0) / len(TOKENS) ** 0.5,
    "weighted": (HIDDEN * WEIGHTS).sum(0) / WEIGHTS.sum(),
    "marked": HIDDEN[3],
    "steps": HIDDEN[[1, 3]].flatten(),
    "late": HIDDEN.square().mean(0),
    "cls+mean": torch.cat((HIDDEN[0], HIDDEN.mean(0))),
}


class Identity:
    """A head that changes nothing, or squares every number."""

    def __init__(self, pooling: str, marks: tuple[int, ...] = (5,)) -> None:
        self.pool = Pool(pooling, marks=marks)

    def run(self, x_RI: Tensor, is_raw: bool = False) -> Tensor:
        return x_RI.square() if self.pool.pooling == "late" else x_RI


def feed(pooler: Pooler, cuts: tuple[int, ...], first: int = 0) -> list[list[float] | None]:
    """The results of the chunks between `cuts`."""
    got = []
    for start, end in itertools.pairwise((first, *cuts, len(TOKENS))):
        tokens = np.array(TOKENS[start:end], np.int32)
        item = Item("r", 0, start, end - start, tokens, False, pooling=PoolingParams())
        got.append(pooler.add(item, HIDDEN[start:end], len(TOKENS)))
    return got


@pytest.mark.parametrize("kind", WANTED)
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 5)])
def test_chunks_pool_to_the_same_vector(kind: str, cuts: tuple[int, ...]) -> None:
    pooler = Pooler(Identity(kind))
    *before, last = feed(pooler, cuts)
    assert before == [None] * len(cuts)
    assert last == pytest.approx(WANTED[kind].tolist(), abs=1e-6)
    assert not pooler.num_kept


@pytest.mark.parametrize("kind", ["mean", "mean_sqrt", "weighted"])
def test_sums_do_not_depend_on_the_chunks(kind: str) -> None:
    hidden = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for size in (300, 64, 7):
        pooler = Pooler(Identity(kind))
        for i in range(0, 300, size):
            part = hidden[i : i + size]
            item = Item("r", 0, i, len(part), None, False, pooling=PoolingParams())
            got = pooler.add(item, part, 300)
        found.append(got)
    assert found[0] == found[1] == found[2]


def test_rows_of_tokens_are_not_pooled() -> None:
    assert torch.equal(Pooler(Identity("late")).rows(HIDDEN[:2]), HIDDEN[:2].square())
    assert torch.equal(Pooler(Identity("mean")).rows(HIDDEN.double()), HIDDEN)


def test_without_a_step_token_the_last_position_counts() -> None:
    assert feed(Pooler(Identity("marked", (99,))), (2,))[-1] == pytest.approx(HIDDEN[-1].tolist())
    assert feed(Pooler(Identity("steps", (99,))), (2,))[-1] == []


def test_the_last_position_needs_no_prefix() -> None:
    """A prompt whose beginning came from the prefix cache."""
    assert feed(Pooler(Identity("last")), (), first=4) == [pytest.approx(HIDDEN[-1].tolist())]


def test_a_restarted_request_drops_its_chunks() -> None:
    pooler = Pooler(Identity("mean"))
    start = Item("r", 0, 0, 2, np.array(TOKENS[:2], np.int32), False, pooling=PoolingParams())
    assert pooler.add(start, HIDDEN[:2] * 100, len(TOKENS)) is None
    assert feed(pooler, (3,))[-1] == pytest.approx(WANTED["mean"].tolist(), abs=1e-6)


def test_the_default_is_the_last_position_normalised() -> None:
    unit = HIDDEN[-1] / HIDDEN[-1].norm()
    assert feed(Pooler(), (1,))[-1] == pytest.approx(unit.tolist(), abs=1e-6)


@pytest.mark.parametrize("after", ["unit", "sigmoid", "softmax", "second", ""])
def test_raw_outputs_are_those_before_the_end_of_the_head(after: Any) -> None:
    head = PooledHead(Pool("last", after=after), [], [])
    hidden = HIDDEN[:, :2]
    raw, found = head.run(hidden, True), head.run(hidden)
    ends = {
        "unit": lambda x: x / x.norm(dim=-1, keepdim=True),
        "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
        "": lambda x: x,
    }
    end = ends.get(after, lambda x: 1 / (1 + (-x).exp()))
    torch.testing.assert_close(found, end(raw))
    item = Item("r", 0, 0, 6, None, False, pooling=PoolingParams(is_raw=True))
    assert Pooler(head).add(item, hidden, 6) == raw[5].tolist()
