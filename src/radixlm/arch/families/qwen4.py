"""Qwen 4 (experimental): gated hyper-connections, delta nets that read hashed n-grams, and
attention to blocks that an indexer chooses."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    Mixer,
    activation,
    build_decoder,
    moe,
    rms,
)
from radixlm.arch.families.linear import DELTA, delta_net, gated_attention
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import GroupedParts
from radixlm.base.record import replace

_PLE, _INDEX = LAYER + "ple.", LAYER + "self_attn.indexer."
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _splitmix(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _multipliers(vocab: int, length: int, layer: int, seed: int) -> tuple[int, ...]:
    """Odd numbers whose products with tokens fit 63 bits."""
    bound = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    base = seed + 10007 * layer
    draws = ((base + _GAMMA * (index + 1)) & _MASK for index in range(length))
    return tuple(2 * (_splitmix(draw) % bound) + 1 for draw in draws)


@lru_cache(maxsize=8)
def _primes(start: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes from ``start`` on."""
    found: list[int] = []
    value = max(start, 2)
    while len(found) < count:
        if all(value % divisor for divisor in range(2, int(value**0.5) + 1)):
            found.append(value)
        value += 1
    return tuple(found)


def _ngrams(c: Config, index: int) -> spec.Ngrams:
    """The n-grams of the ``index``-th layer that has them."""
    heads = (c.ngram_size - 1) * c.heads_per_ngram
    dim = c.get("ple_embed_dim") or c.hidden_size
    for key in ("ngram_size", "heads_per_ngram", "ple_conv_kernel_size", "ngram_vocab_size_base"):
        if not isinstance(c.get(key), int) or c.get(key) < 1:
            raise c.error(key, f"= {c.get(key)!r} must be a positive integer")
    if heads < 1 or dim % heads:
        raise c.error("ple_embed_dim", f"= {dim} is not a multiple of the {heads} heads of n-grams")
    ends = c.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if not isinstance(end, int):
        raise c.error("eos_token_id", "is needed by layers with n-grams")
    sizes = _primes(c.ngram_vocab_size_base, (index + 1) * heads)[index * heads :]
    step = c.make_ngram_vocab_size_divisible_by
    return spec.Ngrams(
        dim,
        -(-sum(sizes) // step) * step,
        sizes,
        _multipliers(c.vocab_size, c.ngram_size, index, c.seed),
        c.ngram_size,
        end,
        c.hc_count,
        c.hidden_size,
        c.ple_conv_kernel_size,
        rms(c, offset=1.0),
    )


def _index(c: Config) -> spec.BlockIndexer:
    size, budget = c.get("indexer_compress_ratio"), c.get("indexer_budget")
    for key in ("n_heads", "head_dim", "budget", "compress_ratio"):
        value = c.get(f"indexer_{key}")
        if not isinstance(value, int) or value < 1:
            raise c.error(f"indexer_{key}", f"= {value!r} must be a positive integer")
    c.refuse("indexer_kv_heads", 1)
    if budget % size:
        raise c.error("indexer_budget", f"= {budget} is no multiple of 'indexer_compress_ratio'")
    norm = rms(c, offset=1.0)
    top = budget // size
    return spec.BlockIndexer(
        c.indexer_n_heads, c.indexer_head_dim, size, top, 0, norm, is_mean=True
    )


def _streams(role: str, stored: str) -> Names:
    parts = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
    parts["inject"] = "block_inject_weight"
    return {f"{role}.{part}": f"{stored}.{name}" for part, name in parts.items()}


def _names(c: Config) -> Names:
    heads, dim = c.get("indexer_n_heads", 1), c.get("indexer_head_dim", 1)
    qk, rows = (_INDEX + "index_qk_proj",), (heads * dim, dim)
    table = _PLE + "ple_embedding.ngram_embedding"
    shards = tuple(f"{table}.shard_{part}" for part in range(c.get("split_ngram_parts", 1)))
    return {
        **DELTA,
        **_streams("streams1", LAYER + "attn_hyper_connection"),
        **_streams("streams2", LAYER + "mlp_hyper_connection"),
        **_streams("streams.reader", "model.hyper_connection_mixer"),
        "mixer.index.q": Named(qk, GroupedParts(1, rows, (0,))),
        "mixer.index.k": Named(qk, GroupedParts(1, rows, (1,))),
        "mixer.index.q_norm": _INDEX + "q_layernorm",
        "mixer.index.k_norm": _INDEX + "k_layernorm",
        "ngrams.table": AnyOf(table, shards),
        "ngrams.key": _PLE + "key_proj",
        "ngrams.value": _PLE + "value_proj",
        "ngrams.key_norm": _PLE + "norm_key",
        "ngrams.stream_norm": _PLE + "norm_query",
        "ngrams.conv_norm": _PLE + "norm_conv",
        "ngrams.conv": _PLE + "conv1d",
    }


def qwen4_exp(c: Config) -> spec.Decoder:
    shared, reading = c.shared_expert_intermediate_size, sorted(set(c.get("ple_layer_ids", ())))
    act: Any = c.get("output_gate_type") or activation(c)
    kinds, every = c.layer_types, c.get("full_attention_interval", 4)
    net = replace(delta_net(c), gate_act=act)
    if act not in ("silu", "sigmoid"):
        raise c.error("output_gate_type", f"= {act!r} is unknown; known: silu, sigmoid")
    if not isinstance(c.hc_count, int) or not 2 <= c.hc_count <= 64:
        raise c.error("hc_count", f"= {c.hc_count!r} must be an integer from 2 on")

    def attends(i: int) -> bool:
        if kinds is None:
            return bool((i + 1) % every == 0)
        if kinds[i] not in ("linear_attention", "full_attention", "indexed_attention"):
            raise c.error("layer_types", f"has the unknown type {kinds[i]!r} at layer {i}")
        return bool(kinds[i] != "linear_attention")

    def mixer(i: int) -> Mixer:
        if not attends(i):
            has_runs = i + 1 in reading
            return replace(net, ngrams=_ngrams(c, reading.index(i + 1))) if has_runs else net
        attention = gated_attention(c)
        if attention.rope is not None and attention.rope.depends_on_length:
            raise c.error(
                "rope_parameters",
                "must not depend on the length: the keys of blocks are cached rotated",
            )
        return replace(attention, extras=spec.AttentionExtras(indexer=_index(c)))

    if any(not 1 <= one <= c.num_hidden_layers or attends(one - 1) for one in reading):
        raise c.error("ple_layer_ids", f"= {reading!r} are not all linear layers, counted from 1")
    sparse = moe(
        c, renorm=c.norm_topk_prob, shared=spec.Mlp(shared, activation(c)), shared_gate=True
    )
    bare = spec.Norm(c.rms_norm_eps, "none", affine=False)
    streams = spec.GatedHyperConnections(c.hc_count, c.hc_lowrank, rms(c, offset=1.0))
    return build_decoder(c, mixer, sparse, bare, gated_streams=streams, names=_names(c))
