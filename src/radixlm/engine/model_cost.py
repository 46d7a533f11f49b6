"""The cost of a loaded model's steps, for --enable-mfu-metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from radixlm.arch.spec import Attention, CompressedSparseAttention, Decoder, LatentAttention
from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.features.cost import CacheCost, CostFeature, ModelCost
from radixlm.engine.parts import EngineParts
from radixlm.layers.embedding import Embedding
from radixlm.layers.moe import MoeLayer
from radixlm.models.build import NativeModel, build_model
from radixlm.pools.pool import KvPool


def make_cost(
    config: ServerConfig, decoder: Decoder, parts: EngineParts, num_bytes: int
) -> list[CostFeature]:
    """The feature that counts, of the part that this rank computes; none unless it is asked for.
    ``num_bytes``: of its weights."""
    if not config.observe.enable_mfu_metrics:
        return []
    if not isinstance(parts.model, NativeModel):
        raise ConfigError("--enable-mfu-metrics needs a model that --model-impl auto serves")
    context = parts.model.context
    model = build_model(
        decoder, torch.device("meta"), torch.bfloat16, context.kernels, ranks=parts.ranks
    )
    head_layer = model.embed if model.decoder.tied else getattr(model, "head", None)
    dense, head, experts, chosen, looked_up = 0, 0, 0, 0.0, 0
    for _, layer in model.layers():
        size = sum(math.prod(param.shape) for param in layer.own_params().values())
        if isinstance(layer, MoeLayer):
            experts += size
            chosen = layer.spec.top_k / layer.spec.experts
        elif layer is head_layer:
            head = size
        elif isinstance(layer, Embedding):
            looked_up += size
        else:
            dense += size
    weight_bytes = num_bytes / (dense + head + experts + looked_up)
    caches = _caches(decoder, parts.attn.pools, parts.ranks.attn.size)
    return [CostFeature(ModelCost(dense, head, experts, chosen, weight_bytes, caches))]


def _caches(
    decoder: Decoder, pools: Sequence[KvPool | None], num_ranks: int
) -> tuple[CacheCost, ...]:
    costs = []
    for pool in pools:
        if pool is not None:
            group = pool.group
            flops = sum(_flops_of_score(decoder.blocks[n].attention) for n in group.layers)
            tokens = pool.page_size * group.tokens_per_row(pool.page_size)
            num_bytes = pool.nbytes_per_page / tokens
            costs.append(CacheCost(flops / num_ranks, num_bytes, group.window))
    return tuple(costs)


def _flops_of_score(
    attention: Attention | LatentAttention | CompressedSparseAttention | None,
) -> int:
    """Operations of a layer for one query and one token: the product with its key and the share of
    its value, of all heads. Latent attention computes them in the latent space."""
    if attention is None:
        return 0
    if isinstance(attention, LatentAttention):
        return 2 * attention.heads * (2 * attention.kv_rank + attention.rope_dim)
    v_dim = attention.v_dim if isinstance(attention, Attention) else attention.head_dim
    return 2 * attention.heads * (attention.head_dim + v_dim)
