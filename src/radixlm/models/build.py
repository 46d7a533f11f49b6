"""Make the model of a ``Decoder`` record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

from radixlm.arch.names import untied_with_bias
from radixlm.arch.spec import Decoder, Moe
from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.distributed.attention_groups import AttentionGroups
from radixlm.distributed.groups import ALONE, Ranks
from radixlm.distributed.topology import refuse_too_many_ranks
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.moe import MoeLayer
from radixlm.models.decoder import DecoderModel
from radixlm.models.encoders.text import EncoderModel
from radixlm.models.pooled_head import PooledHead, head_layers
from radixlm.models.stages import layer_costs, stage_of
from radixlm.quant.scheme import Scheme

if TYPE_CHECKING:
    from radixlm.models.transformers_backend.model import TransformersModel

NativeModel = DecoderModel | EncoderModel
Model: TypeAlias = "NativeModel | TransformersModel"


def build_model(
    decoder: Decoder,
    device: torch.device,
    compute_dtype: torch.dtype,
    kernels: Kernels,
    *,
    weight_dtype: torch.dtype | None = None,
    merge_windows: bool = False,
    scheme: Scheme | None = None,
    ranks: Ranks = ALONE,
    splits_head: bool = False,
    place_experts: Callable[[Sequence[MoeLayer], Ranks], None] | None = None,
    moe_dense_tp: int | None = None,
    cuts_output_head: bool = True,
    cuts_kv_heads: bool = True,
) -> NativeModel:
    """A model without weights; ``weights.load.load_weights`` fills it.

    ``compute_dtype`` is the dtype of activations, ``weight_dtype`` that of stored weights (None:
    as in the checkpoint). With ``merge_windows``, windowed layers live in a full KV group.
    ``ranks`` share its layers; ``place_experts`` tells those with experts which each rank holds,
    an even part unless given. ``moe_dense_tp`` 1: each rank has the dense feed-forwards of a
    mixture of experts whole; without ``cuts_output_head`` each has the whole output head, without
    ``cuts_kv_heads`` the queries of a KV head are not divided.
    With ``splits_head``, a group of data-parallel attention computes the logits of its own tokens.
    ConfigError for more ranks than attention heads.
    """
    heads = [block.attention.heads for block in decoder.blocks if block.attention is not None]
    refuse_too_many_ranks(ranks.attn.size, heads)
    scheme = scheme or Scheme()
    groups = AttentionGroups(ranks, splits_head) if ranks.place.attn_tp < ranks.place.tp else None
    context = LayerContext(
        kernels, device, compute_dtype, scheme, ranks, attention_groups=groups,
        cuts_output_head=cuts_output_head, cuts_kv_heads=cuts_kv_heads,
    )  # fmt: skip
    if moe_dense_tp == 1 and any(isinstance(block.ffn, Moe) for block in decoder.blocks):
        context = replace(context, cuts_dense=False)
    model: NativeModel
    if decoder.encoder is not None:
        _refuse_parts_of_encoder(ranks)
        model = EncoderModel(decoder, context, weight_dtype)
    else:
        decoder = untied_with_bias(decoder)

        def costs() -> list[float]:
            whole = replace(context, ranks=ALONE)
            blocks = DecoderModel(decoder, whole, weight_dtype, merge_windows).blocks
            return layer_costs(blocks, decoder.vocab * decoder.dim)

        stage = stage_of(decoder, ranks, costs)
        model = DecoderModel(decoder, context, weight_dtype, merge_windows, stage)
    _add_pool(model, decoder, context)
    if ranks.tp.size > 1:
        (place_experts or place_evenly)(mixtures_of(model), ranks)
    return model


def _add_pool(model: NativeModel, decoder: Decoder, context: LayerContext) -> None:
    """Further layers of the tree, which the loader fills with the rest."""
    if decoder.pool is not None:
        alone = replace(context, ranks=ALONE)  # the first rank computes it alone
        model.pool = head_layers(decoder.pool.head, decoder.dim, alone)
        model.gate = head_layers(decoder.pool.gate, decoder.dim, alone)


def _refuse_parts_of_encoder(ranks: Ranks) -> None:
    if ranks.place.pp > 1:
        raise ConfigError("--pp-size: an encoder has one stage; use --pp-size 1")
    if ranks.place.attn_tp < ranks.place.tp:
        raise ConfigError(
            "--enable-dp-attention: an encoder has no KV cache to divide; --dp-size alone works"
        )


def mixtures_of(model: Model) -> list[MoeLayer]:
    """The layers with experts, in order."""
    layers = model.layers() if isinstance(model, Module) else ()
    return [layer for _, layer in layers if isinstance(layer, MoeLayer)]


def place_evenly(mixtures: Sequence[MoeLayer], ranks: Ranks) -> None:
    """Give each rank an even part of the experts."""
    for layer in mixtures:
        layer.split(layer.even_split(ranks))


def attention_groups_of(model: Model) -> AttentionGroups | None:
    """Those of data-parallel attention; None without."""
    if isinstance(model, NativeModel):
        return model.context.attention_groups
    return model.attention_groups


def is_transformers(model: Model) -> TypeGuard[TransformersModel]:
    """Whether the model runs by transformers."""
    return not isinstance(model, NativeModel)


def head_of(model: Model) -> PooledHead | None:
    """The head of a loaded model that returns embeddings or scores."""
    pool = model.decoder.pool
    if pool is None:
        return None
    if isinstance(model, NativeModel):
        return PooledHead(pool, model.pool, model.gate)
    if pool.head:
        raise ConfigError("--model-impl transformers: pooling layers need a native model")
    return PooledHead(pool, (), ())
