"""Parameters of layers that several blocks share."""

from __future__ import annotations

from radixlm.arch.spec import SharedLayer


def bank_parameters(bank: SharedLayer, dim: int, *, matrices_only: bool = False) -> int:
    """What all calls of a bank have in common."""
    attention, ffn = bank.attention, bank.ffn
    rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    matrices = 2 * dim * rows + attention.heads * attention.head_dim * dim + 3 * dim * ffn.inner
    vectors = 3 * dim + (2 * ffn.inner + dim) * ffn.bias
    return matrices + (0 if matrices_only else vectors)


def call_parameters(call: SharedLayer, dim: int) -> int:
    """What each call has of its own: only matrices."""
    changed = call.rank * (dim + 2 * call.ffn.inner)
    if call.changes_qkv:
        attention = call.attention
        rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        changed += call.rank * (6 * dim + rows)
    return dim * dim + changed
