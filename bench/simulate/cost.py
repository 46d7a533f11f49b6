"""What the layers of a model cost, read from the records of radixlm.arch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch.hf import describe
from radixlm.arch.spec import Attention, Decoder, LatentAttention, Mlp, Moe
from radixlm.base.errors import ConfigError
from radixlm.base.record import Record


class Cost(Record):
    """Of a whole model. Weights are counted in numbers; ``kv_bytes``: of a token, in all layers.

    ``pair_flops``: of a new token and one earlier token while a prompt is computed, in all layers;
    ``cached_flops``: the same while it decodes (latent attention reads compressed rows then).
    ``expert``: weights of one expert of one layer. ``is_latent``: tensor parallelism does not cut
    the KV cache."""

    layers: int
    dim: int
    vocab: int
    attention: float
    dense: float
    embedding: float
    kv_bytes: float
    pair_flops: float
    cached_flops: float
    is_latent: bool = False
    moe_layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert: float = 0.0
    weight_bytes: float = 2.0
    traffic: float = 0.0  # bytes of activations that one token reads and writes beside the products

    @property
    def weights(self) -> float:
        """Numbers of the whole model."""
        return self.attention + self.dense + self.routed + self.embedding

    @property
    def routed(self) -> float:
        return self.moe_layers * self.experts * self.expert


def cost_of(
    config: Mapping[str, Any], weight_bytes: float = 2.0, kv_number_bytes: float = 2.0
) -> Cost:
    """The costs of a config.json; ConfigError for layers that the model of time does not know."""
    decoder = describe(config)
    attention = dense = kv = pair = cached = 0.0
    moe: Moe | None = None
    moe_layers, is_latent = 0, False
    for block in decoder.blocks:
        if isinstance(block.mixer, LatentAttention):
            part, is_latent = _latent(block.mixer, decoder.dim), True
        elif isinstance(block.mixer, Attention):
            part = _attention(block.mixer, decoder.dim)
        else:
            raise ConfigError(
                f"no model of the time of {type(block.mixer).__name__}: simulate a model with "
                "attention or latent attention in each layer"
            )
        attention, kv = attention + part[0], kv + part[1]
        pair, cached = pair + part[2], cached + part[3]
        if isinstance(block.ffn, Moe):
            moe, moe_layers = block.ffn, moe_layers + 1
            dense += decoder.dim * moe.experts + (_mlp(moe.shared, decoder.dim))
        elif isinstance(block.ffn, Mlp):
            dense += _mlp(block.ffn, decoder.dim)
    return Cost(
        layers=len(decoder.blocks),
        dim=decoder.dim,
        vocab=decoder.vocab,
        attention=attention,
        dense=dense,
        embedding=decoder.vocab * decoder.dim * (1 if decoder.tied else 2),
        kv_bytes=kv * kv_number_bytes,
        pair_flops=pair,
        cached_flops=cached,
        is_latent=is_latent,
        moe_layers=moe_layers,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert=(3 if moe.gated else 2) * decoder.dim * moe.inner if moe else 0.0,
        weight_bytes=weight_bytes,
        traffic=_traffic(decoder, moe, moe_layers),
    )


def _mlp(mlp: Mlp | None, dim: int) -> float:
    return (3 if mlp.gated else 2) * dim * mlp.inner if mlp is not None else 0.0


def _attention(mixer: Attention, dim: int) -> tuple[float, float, float, float]:
    """(weights, numbers of KV a token, operations of a pair in a prompt and in a decode)."""
    weights = dim * mixer.head_dim * 2 * (mixer.heads + mixer.kv_heads)
    pair = 4.0 * mixer.heads * mixer.head_dim
    return weights, 2.0 * mixer.kv_heads * mixer.head_dim, pair, pair


def _latent(mixer: LatentAttention, dim: int) -> tuple[float, float, float, float]:
    qk_dim, rank = mixer.nope_dim + mixer.rope_dim, mixer.kv_rank
    queries = mixer.heads * qk_dim
    weights = dim * mixer.q_rank + mixer.q_rank * queries if mixer.q_rank else dim * queries
    weights += dim * (rank + mixer.rope_dim) + mixer.heads * mixer.v_dim * dim
    weights += rank * mixer.heads * (mixer.nope_dim + mixer.v_dim)
    pair = 2.0 * mixer.heads * (qk_dim + mixer.v_dim)
    return weights, rank + mixer.rope_dim, pair, 2.0 * mixer.heads * (2 * rank + mixer.rope_dim)


def _traffic(decoder: Decoder, moe: Moe | None, moe_layers: int) -> float:
    """Norms, residuals and quantization pass some twelve times over the channels in 16 bits; a
    chosen expert's input and output three times, its inner channels twice."""
    found = 24.0 * decoder.dim * len(decoder.blocks)
    if moe is not None:
        found += moe_layers * moe.top_k * (6.0 * decoder.dim + 8.0 * moe.inner)
    return found


def _llama(dim: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int) -> Any:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def _opt(dim: int, layers: int, heads: int) -> Any:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * dim,
        "vocab_size": 50272,
        "word_embed_proj_dim": dim,
        "max_position_embeddings": 2048,
    }


_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}

# (config.json, bytes of a weight)
CONFIGS: dict[str, tuple[Mapping[str, Any], float]] = {
    "llama-8b": (_llama(4096, 32, 32, 8, 14336, 128256), 2.0),
    "llama-70b": (_llama(8192, 80, 64, 8, 28672, 128256), 2.0),
    "opt-13b": (_opt(5120, 40, 40), 2.0),
    "deepseek-v3": (_DEEPSEEK_V3, 1.0),
}


def model(name: str) -> Cost:
    """The costs of a model of the table, or of a folder with a config.json."""
    config, weight_bytes = CONFIGS.get(name, (name, 2.0))
    return cost_of(config, weight_bytes)  # type: ignore[arg-type]
