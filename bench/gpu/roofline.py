"""Model shapes, minimal step times on a device with given ceilings, and goals.

A decode step reads all weights and each sequence's keys and values once, and does the products; a
mixture reads the experts that uniform routing is expected to touch. The head has 16 bits always.
"""

from __future__ import annotations

from typing import Any

from radixlm.base.record import Record


class Shape(Record):
    """A decoder. `inner`: width of the MLP, or of one expert if there are `experts`."""

    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    inner: int
    experts: int = 0
    top_k: int = 0
    architecture: str = "Qwen3ForCausalLM"
    tied: bool = False

    @property
    def mixer(self) -> int:
        """Weights of one layer's attention."""
        return self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def active(self) -> int:
        """Weights that one token multiplies, without the output layer."""
        ffn = 3 * self.dim * self.inner * (self.top_k or 1)
        return self.layers * (self.mixer + ffn)

    @property
    def kv_numbers(self) -> int:
        """Numbers of K and V of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def config(self, dtype: str = "bfloat16", max_len: int = 40960) -> dict[str, Any]:
        """config.json."""
        is_llama = self.architecture.startswith("Llama")
        found: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": {"L": "llama"}.get(self.architecture[0], "qwen3"),
            "hidden_size": self.dim,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": max_len,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0 if is_llama else 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "torch_dtype": dtype,
        }
        if self.experts:
            found |= {
                "model_type": "qwen3_moe",
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.inner,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return found


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.6B", 28, 1024, 16, 8, 128, 151936, 3072, tied=True),
        Shape("8B", 32, 4096, 32, 8, 128, 128256, 14336, architecture="LlamaForCausalLM"),
        Shape("30B-A3B", 48, 2048, 32, 4, 128, 151936, 768, 128, 8, "Qwen3MoeForCausalLM"),
    )
}


# the same kinds, for smoke tests of the program
TINY = {
    "0.6B": Shape("0.6B", 2, 64, 4, 2, 16, 512, 96, tied=True),
    "8B": Shape("8B", 2, 64, 4, 2, 16, 512, 96, architecture="LlamaForCausalLM"),
    "30B-A3B": Shape("30B-A3B", 2, 64, 4, 2, 16, 512, 32, 8, 2, "Qwen3MoeForCausalLM"),
}


class Ceilings(Record):
    """Bytes and operations a second; the defaults are measured on an H200."""

    bandwidth: float = 4.3e12
    flops_bf16: float = 790e12
    flops_fp8: float = 1580e12

    def flops(self, weight_bytes: int) -> float:
        """Operations a second with weights of `weight_bytes` bytes a number."""
        return self.flops_fp8 if weight_bytes == 1 else self.flops_bf16


def decode_s(
    shape: Shape,
    batch: int,
    context: int,
    ceilings: Ceilings,
    weight_bytes: int = 2,
    kv_bytes: int = 2,
) -> float:
    """Seconds of a decode step of `batch` sequences with `context` tokens."""
    head = shape.dim * shape.vocab
    ffn = 3 * shape.dim * shape.inner
    if shape.experts:
        touched = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** batch)
        read = touched * ffn * weight_bytes + 2 * shape.dim * shape.experts
    else:
        read = ffn * weight_bytes
    weights = shape.layers * (shape.mixer * weight_bytes + read) + 2 * head
    products = 2 * batch * shape.active / ceilings.flops(weight_bytes)
    products += 2 * batch * head / ceilings.flops_bf16
    kv = batch * context * shape.kv_numbers * kv_bytes
    return max(weights / ceilings.bandwidth, products) + kv / ceilings.bandwidth


def prefill_s(
    shape: Shape, batch: int, count: int, prefix: int, ceilings: Ceilings, weight_bytes: int = 2
) -> float:
    """Seconds of a step that computes `count` tokens of each of `batch` prompts after `prefix`
    cached ones: operations only, half of the square of attention, one row of logits."""
    products = 2 * batch * count * shape.active / ceilings.flops(weight_bytes)
    pairs = batch * (count * prefix + count * count / 2)
    attention = 4 * pairs * shape.heads * shape.head_dim * shape.layers
    return products + attention / ceilings.flops_bf16


CONTEXT, PROMPT = 1024, 8192  # tokens of the goals
# (shape, weights) -> ms of a decode step at that context by batch, and of that prompt, that an H200
# must reach; sampling included
MUST: dict[tuple[str, str], dict[int | str, float]] = {
    ("0.6B", "bf16"): {1: 1.30, 8: 1.45, 64: 3.2, 256: 10.5, "prefill": 34},
    ("8B", "bf16"): {1: 4.7, 8: 5.1, 64: 7.6, 256: 17.9, "prefill": 255},
    ("8B", "fp8"): {1: 3.2, 8: 3.5, 64: 6.0, 256: 15.8, "prefill": 190},
    ("30B-A3B", "bf16"): {1: 3.2, 8: 9.5, 64: 22, 256: 30, "prefill": 180},
    ("30B-A3B", "fp8"): {1: 2.3, 8: 5.9, 64: 14.2, 256: 21.8, "prefill": 150},
}
STRETCH: dict[tuple[str, str], dict[int | str, float]] = {
    ("0.6B", "bf16"): {1: 0.90, 8: 1.05, 64: 2.8, 256: 9.5, "prefill": 28},
    ("8B", "bf16"): {1: 4.2, 8: 4.6, 64: 6.9, 256: 16.1, "prefill": 215},
}
MUST_TOKENS_S = 20_000  # out, of 256 requests U(100, 1024) in and out on the 0.6B
MUST_IDLE = 0.05  # max share of idle time between decode steps of 32 rows and more
MUST_HOST_US = 400  # max host time of a step of 256 rows


def verdict(shape: Shape, weights: str, what: int | str, share: float) -> str:
    """How a share fares: "stretch", "must", "missed", "" without a goal. Any card is judged by its
    own roofline, though the goals are milliseconds of an H200."""
    num_bytes = 1 if weights == "fp8" else 2
    if isinstance(what, int):
        least_s = decode_s(shape, what, CONTEXT, Ceilings(), num_bytes)
    else:
        least_s = prefill_s(shape, 1, PROMPT, 0, Ceilings(), num_bytes)
    key = shape.name, weights
    for name, goals in (("stretch", STRETCH), ("must", MUST)):
        if what in goals.get(key, {}) and share >= 1e3 * least_s / goals[key][what]:
            return name
    return "missed" if what in MUST.get(key, {}) else ""
