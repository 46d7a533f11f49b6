"""Which attention layers share a pool: layers of one KV shape and window."""

from radixlm.arch.spec import (
    Attention,
    AttentionExtras,
    Block,
    CompressedSparseAttention,
    Decoder,
    LatentAttention,
    ParallelHybrid,
)
from radixlm.base.record import replace
from radixlm.layers.attention import heads_of, local_heads
from radixlm.layers.context import LayerContext
from radixlm.layers.placement import ALL_HEADS
from radixlm.pools.group import KvGroup

# window, KV heads, head dim, v dim, latent, compress ratio (0: a row a token)
Key = tuple[int, int, int, int, bool, int]


def group_key(decoder: Decoder, layer: int, merge_windows: bool) -> Key:
    """Layers of one key share a pool."""
    mixer = decoder.blocks[layer].attention
    assert mixer is not None, "a layer without attention has no keys"
    window = 0 if merge_windows else mixer.window
    if isinstance(mixer, LatentAttention):
        return (window, 1, mixer.row, mixer.kv_rank, True, 0)
    if isinstance(mixer, CompressedSparseAttention):
        return (window, 1, mixer.row, mixer.head_dim, True, 0)
    return (window, mixer.kv_heads, mixer.k_row, mixer.v_dim, False, 0)


def own_kv_heads(
    decoder: Decoder, context: LayerContext | None = None
) -> dict[int, tuple[int, int, int]]:
    """Of each layer whose tokens attend to all before them by one kernel: KV heads of the whole
    model, and this rank's first and the one behind them. Without a ``context`` each has all."""
    heads = {}
    for layer, block in enumerate(decoder.blocks):
        mixer = block.attention
        if isinstance(mixer, Attention) and not mixer.window and _is_plain(mixer.extras):
            cut = ALL_HEADS
            if context is not None and block.shared_block is None:
                cut = heads_of(mixer, context)
            heads[layer] = (mixer.kv_heads, *(cut.kv if cut.heads else (0, mixer.kv_heads)))
    return heads


def _is_plain(extras: AttentionExtras | None) -> bool:
    return extras is None or not (
        extras.attention_chunk_size
        or extras.alibi_slopes
        or extras.indexer
        or extras.block_sparse
        or extras.dynamic_mask_topk
        or extras.dual_chunk
        or extras.later_window
    )


def entry_key(decoder: Decoder, layer: int) -> Key | None:
    """The key of a layer's compressed entries, which have a group of their own; None without."""
    mixer = decoder.blocks[layer].attention
    if not isinstance(mixer, CompressedSparseAttention) or mixer.sums is None:
        return None
    return (0, 1, mixer.entry, mixer.head_dim, True, mixer.sums.rate)


def local_decoder(decoder: Decoder, context: LayerContext) -> Decoder:
    """The decoder with the attention heads of this rank, as its layers cut them."""
    if context.ranks.attn.size == 1:
        return decoder
    return replace(decoder, blocks=tuple(_local(block, context) for block in decoder.blocks))


def _local(block: Block, context: LayerContext) -> Block:
    mixer, attention = block.mixer, block.attention
    if not isinstance(attention, Attention) or block.shared_block or mixer is None:
        return block
    own = local_heads(attention, heads_of(attention, context))
    if mixer is attention:
        return replace(block, mixer=own)
    if isinstance(mixer, ParallelHybrid):
        return replace(block, mixer=replace(mixer, attention=own))
    return block


def kv_groups(decoder: Decoder, merge_windows: bool = False) -> tuple[KvGroup, ...]:
    """The groups in a fixed order, full ones first. With ``merge_windows``, windowed layers keep
    all their tokens, in a full group."""
    members: dict[Key, list[int]] = {}
    for layer in range(len(decoder.blocks)):
        if decoder.blocks[layer].attention is None or source_of(decoder, layer) != layer:
            continue
        members.setdefault(group_key(decoder, layer, merge_windows), []).append(layer)
        if (entries := entry_key(decoder, layer)) is not None:
            members.setdefault(entries, []).append(layer)
    ordered = sorted(members.items(), key=lambda item: (item[0][0] > 0, item[1][0]))
    return tuple(
        KvGroup(
            index=index,
            name="window" if key[0] else "full",
            layers=tuple(layers),
            kv_heads=key[1],
            head_dim=key[2],
            v_dim=key[3],
            latent=key[4],
            window=key[0],
            compress_ratio=key[5],
        )
        for index, (key, layers) in enumerate(ordered)
    )


def source_of(decoder: Decoder, layer: int) -> int:
    """The layer whose keys and values this one reads, usually itself."""
    mixer = decoder.blocks[layer].attention
    extras = mixer.extras if isinstance(mixer, Attention) else None
    return layer if extras is None or extras.kv_from is None else extras.kv_from


def pool_places(decoder: Decoder, groups: tuple[KvGroup, ...]) -> dict[int, tuple[int, int]]:
    """Layer -> (group, row of its pool), of the layers whose group is here."""
    own = _places([group for group in groups if not group.compress_ratio])
    return {
        layer: own[source_of(decoder, layer)]
        for layer, block in enumerate(decoder.blocks)
        if block.attention is not None and source_of(decoder, layer) in own
    }


def entry_places(groups: tuple[KvGroup, ...]) -> dict[int, tuple[int, int]]:
    """Layer -> (group, row of its pool) of the layers with compressed entries."""
    return _places([group for group in groups if group.compress_ratio])


def _places(groups: list[KvGroup]) -> dict[int, tuple[int, int]]:
    return {layer: (group.index, row) for group in groups for row, layer in enumerate(group.layers)}


def state_rows(decoder: Decoder, first: int = 0, end: int | None = None) -> dict[int, int]:
    """Layer -> row of the state pool, of the layers [first, end) that keep a state."""
    here = list(enumerate(decoder.blocks))[first:end]
    layers = [layer for layer, block in here if block.state is not None]
    return {layer: row for row, layer in enumerate(layers)}
