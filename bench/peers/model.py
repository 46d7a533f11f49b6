"""Best times that the ceilings allow: bytes and operations of the work over measured rates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from peers.machine import Ceilings
from peers.workload import Case

# bytes a weight; 4 bits have a 16-bit scale for each group of 128
BYTES = {16: 2.0, 8: 1.0, 4: 0.5 + 2.0 / 128}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a dense decoder with grouped-query attention."""

    num_linear: int  # weights of all linear layers
    num_embedding: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's 16-bit keys and values in all layers."""
        return 2 * 2 * self.num_layers * self.kv_heads * self.head_dim


def read_size(folder: Path) -> ModelSize:
    """Sizes from config.json. KeyError or OSError for another kind of model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, inner = config["num_attention_heads"], config["intermediate_size"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or hidden // heads
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    return ModelSize(
        layers * layer, config["vocab_size"] * hidden, layers, heads, kv_heads, head_dim
    )


def step_bytes(size: ModelSize, bits: int, kv_tokens: float) -> float:
    """Bytes that one decode step must read: all weights with the output layer, and the cached
    tokens."""
    return (size.num_linear + size.num_embedding) * BYTES[bits] + kv_tokens * size.kv_bytes


def prefill_ops(size: ModelSize, num_tokens: int, num_seen: int = 0) -> tuple[float, float]:
    """(operations of linear layers, of attention) for `num_tokens` after `num_seen`."""
    pairs = num_tokens * num_seen + num_tokens * (num_tokens + 1) / 2
    attention = 4.0 * pairs * size.num_layers * size.num_heads * size.head_dim
    return 2.0 * size.num_linear * num_tokens, attention


def prefill_s(
    size: ModelSize, bits: int, ceilings: Ceilings, num_tokens: int, num_seen: int = 0
) -> float:
    """Seconds at the ceilings: linear layers in the weights' arithmetic (4 bits run as 8),
    attention in 16 bits."""
    linear, attention = prefill_ops(size, num_tokens, num_seen)
    rate = ceilings.gop_per_s
    return (linear / rate[max(bits, 8)] + attention / rate[16]) / 1e9


def decode_s(
    size: ModelSize,
    bits: int,
    ceilings: Ceilings,
    num_sequences: int,
    context: float,
    num_shared: int = 0,
) -> float:
    """Seconds of one step of `num_sequences`: the slower of reading (shared tokens once) and
    arithmetic."""
    kv_tokens = num_shared + num_sequences * (context - num_shared)
    read_s = step_bytes(size, bits, kv_tokens) / ceilings.gb_per_s / 1e9
    ops = 2.0 * (size.num_linear + size.num_embedding) * num_sequences
    ops += 4.0 * num_sequences * context * size.num_layers * size.num_heads * size.head_dim
    return max(read_s, ops / ceilings.gop_per_s[max(bits, 8)] / 1e9)


def predict(case: Case, size: ModelSize, bits: int, ceilings: Ceilings) -> float:
    """The best value of a case at the ceilings, in the case's unit. A shared prefix is computed
    once; the prompts of a case one after another."""
    context = case.num_input + case.num_output / 2
    steps_s = (case.num_output - 1) * decode_s(
        size, bits, ceilings, case.num_prompts, context, case.num_shared
    )
    if case.measure == "decode":
        return (case.num_output - 1) / steps_s
    rest = case.num_input - case.num_shared
    prompts_s = case.num_prompts * prefill_s(size, bits, ceilings, rest, case.num_shared)
    prompts_s += prefill_s(size, bits, ceilings, case.num_shared)
    if case.measure == "prefill":
        return case.num_prompts * case.num_input / prompts_s
    total_s = prompts_s + steps_s
    return total_s if case.measure == "total" else case.num_prompts * case.num_output / total_s
