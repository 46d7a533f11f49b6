"""Tensors that do not fit are refused before the kernels, which trust their addresses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from radixlm.kernels.cpu import activation, fused, linear, moe, norm, rope, scan
from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.cache import CacheShape
from radixlm.kernels.ops.rope import QkNorm

SHAPE = CacheShape(2, 8, 8, 16, torch.float32)
X, INT = torch.zeros(3, 8), torch.int32
K, SLOTS, POSITIONS = torch.zeros(3, 2, 8), torch.arange(3), torch.arange(3)
WEIGHT = linear.pack(torch.randn(8, 8), None)
ADD = norm.add_rms_norm


def attend(**changed: Tensor) -> Tensor:
    tables = {
        "q_THD": torch.zeros(3, 4, 8), "page_table_SP": torch.zeros(1, 1, dtype=INT),
        "query_start_S1": torch.tensor([0, 3], dtype=INT), "kv_len_S": torch.full((1,), 3).int(),
    }  # fmt: skip
    sinks_H = changed.pop("sinks_H", None)
    k_cache, v_cache = SHAPE.allocate(1)
    layer = PagedAttention(4, SHAPE, 1.0, sinks_H=sinks_H)
    return layer.run(k_cache=k_cache.zero_(), v_cache=v_cache.zero_(), **{**tables, **changed})


def store(k: Tensor = K, v: Tensor = K, slots: Tensor = SLOTS, **more: object) -> None:
    rope.qk_norm_rope_store(None, k, v, SHAPE.allocate(1), slots, **more)  # type: ignore[arg-type]


def delta(state: Tensor, keys: int = 4, heads: int = 2) -> None:
    q, v = torch.zeros(1, 5, heads, keys), torch.zeros(1, 5, 2, 6)
    scan.delta_rule(q, q, v, torch.zeros(1, 5, 2, 1), torch.zeros(1, 5, 2), state)


def experts(ids: Tensor, weights: Tensor) -> None:
    up = linear.pack(torch.randn(16, 8), None, is_paired=True)
    moe.Experts([up], [WEIGHT], "silu").run(X, weights, ids)


def normed(weight: Tensor) -> QkNorm:
    return QkNorm("head", False, 1e-6, weight, weight)


WRONG: dict[str, Callable[[], object]] = {
    "residual": lambda: WEIGHT.run(X, residual=torch.zeros(2, 8)),
    "out": lambda: WEIGHT.run(X, out=torch.zeros(3, 7)),
    "ids that are not contiguous": lambda: WEIGHT.embed(torch.zeros(3, 2, dtype=INT)[:, 0]),
    "rows of ids": lambda: WEIGHT.embed(torch.zeros(3, dtype=INT), out=torch.zeros(2, 8)),
    "out of an activation": lambda: activation.activate(X, "silu", torch.zeros(2, 8)),
    "sum of a norm": lambda: ADD(X, torch.zeros(3, 4), torch.zeros(8), 1e-6),
    "columns as weights": lambda: norm.rms_norm(X, torch.zeros(8, 2)[:, 0], 1e-6),
    "queries": lambda: attend(q_THD=torch.zeros(3, 4, 4)),
    "queries of float64": lambda: attend(q_THD=torch.zeros(3, 4, 8).double()),
    "page table": lambda: attend(page_table_SP=torch.zeros(1, 1, dtype=torch.int64)),
    "starts": lambda: attend(query_start_S1=torch.tensor([0], dtype=INT)),
    "rows": lambda: attend(out=torch.zeros(2, 4, 8)),
    "sinks": lambda: attend(sinks_H=torch.zeros(3)),
    "tree": lambda: attend(tree_mask_TN=torch.zeros(2, 3, dtype=torch.uint8)),
    "slots": lambda: store(slots=SLOTS[:2]),
    "heads of keys": lambda: store(torch.zeros(3, 1, 8), torch.zeros(3, 1, 8)),
    "rows of values": lambda: store(v=K[:2]),
    "angles": lambda: store(cos_sin=torch.zeros(3, 16)),
    "rows of angles": lambda: store(cos_sin=torch.zeros(2, 8)),
    "positions": lambda: store(cos_sin=torch.zeros(9, 8), positions_T=POSITIONS[:2]),
    "weights of bfloat16": lambda: store(norm=normed(torch.zeros(8).bfloat16())),
    "size of a state": lambda: delta(torch.zeros(1, 2, 4, 5)),
    "numbers of a state": lambda: delta(torch.zeros(1, 2, 4, 6).double()),
    "heads of a scan": lambda: delta(torch.zeros(1, 2, 4, 6), heads=1),
    "tokens of experts": lambda: experts(torch.zeros(2, 1), torch.zeros(2, 1)),
    "weights of experts": lambda: experts(torch.zeros(3, 1), torch.zeros(3, 2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        WRONG[name]()


def test_what_fits_is_taken() -> None:
    assert attend(sinks_H=torch.zeros(4), out=torch.zeros(3, 4, 8)).shape == (3, 4, 8)
    store(cos_sin=torch.zeros(9, 4), positions_T=POSITIONS, norm=normed(torch.zeros(8)))
    delta(torch.zeros(1, 2, 4, 6))
    experts(torch.zeros(3, 1), torch.zeros(3, 1))


def test_ids_of_a_tied_table_may_be_a_column() -> None:
    table = torch.randn(9, 8)
    ids = torch.tensor([[3, 0], [8, 0], [1, 0]], dtype=INT)[:, 0]
    got = fused.pack_tied(table).rows(ids, 1.0, torch.float32)
    assert torch.equal(got, table[ids.long()])
