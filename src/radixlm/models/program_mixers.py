"""Writes what attends as operations of a C++ program: from a block's normed input to the heads'
values, which the output projection reads."""

from __future__ import annotations

from radixlm.arch.spec import Attention, Rope
from radixlm.kernels.cpu.checks import dtype_code
from radixlm.kernels.cpu.extension import address
from radixlm.kernels.cpu.heads import HeadLinear
from radixlm.kernels.cpu.rope import NORM_CODE
from radixlm.kernels.ops.rope import QkNorm
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.extended_attention import ExtendedAttentionLayer
from radixlm.layers.latent import LatentAttentionLayer
from radixlm.models.program_ops import GATES, Branch, Norming, ProgramOps
from radixlm.step.batch import AttentionSite

Q, K, CACHE = 1, 2, 4  # what a store op does
ALL = Q | K | CACHE
NO_NORM: tuple[object, ...] = (0, False, 0, 0, 0, 0, 0.0)


def attend_latents(ops: ProgramOps, layer: LatentAttentionLayer, source: int) -> Branch:
    """Projections, norms, absorbed queries, rope and store, attention to the latents, values of
    what it gives."""
    spec, site = layer.spec, layer.site
    absorb, expand = layer.kv_b.key, layer.kv_b.value
    assert isinstance(absorb, HeadLinear) and isinstance(expand, HeadLinear)
    q_head, row = spec.nope_dim + spec.rope_dim, spec.kv_rank + spec.rope_dim
    queries = _latent_queries(ops, layer, source)
    latents = ops.project(layer.kv_a, source, "latents")
    ops.norm_in_place(layer.kv_a_norm, latents, spec.kv_rank)
    if spec.rope_norm is not None:
        ops.norm_in_place(layer.k_rope_norm, latents, spec.rope_dim, spec.kv_rank)
    absorbed = ops.buffer("absorbed", spec.heads * row)
    ops.program.heads(queries, absorbed, absorb.handle, q_head, row, False)
    shape = [spec.heads, q_head, spec.rope_dim, spec.kv_rank]
    turn = _turn(layer.rope_index, spec.rope)
    ops.program.latent_store(
        queries, latents, absorbed, shape, *turn, site.group, _cache(ops, site)
    )
    if spec.logn_scaling is not None:
        ops.grow_queries(spec.logn_scaling, absorbed, (spec.heads, row, row))
    averaged = ops.buffer("averaged", spec.heads * spec.kv_rank)
    ops.keep += [site, absorb, expand]
    _attend(ops, site, absorbed, averaged, row)
    width = spec.heads * spec.v_dim
    values = ops.buffer("values", width)
    ops.program.heads(averaged, values, expand.handle, spec.kv_rank, spec.v_dim, False)
    if spec.gate:
        heads, is_one = (spec.heads, spec.v_dim), spec.gate == "head"
        _gate(ops, ops.project(layer.gate, source, "gates"), values, heads, "sigmoid", is_one)
    return Branch(values, width, layer.o)


def _latent_queries(ops: ProgramOps, layer: LatentAttentionLayer, source: int) -> int:
    spec = layer.spec
    if not spec.q_rank:
        return ops.project(layer.q, source, "queries")
    low = ops.project(layer.q_a, source, "low queries")
    ops.norm_in_place(layer.q_a_norm, low, spec.q_rank)
    return ops.project(layer.q_b, low, "queries")


def attend_heads(ops: ProgramOps, layer: AttentionLayer, source: int) -> Branch:
    """qkv, norms and rope, store, attention, gate."""
    spec, site = layer.spec, layer.site
    step = spec.head_dim * (2 if spec.gate else 1)
    qkv = ops.project(layer.qkv, source, "qkv")
    offsets = [0, layer.rows[0], layer.rows[0] + layer.rows[1]]
    turn = _turn(layer.rope_index, spec.rope)
    _store(ops, qkv, offsets, spec, site, norm_fields(ops, layer.qk_norm), turn)
    out = ops.buffer("attended", spec.heads * spec.head_dim)
    ops.keep.append(site)
    _attend(ops, site, qkv, out, step)
    if spec.gate:
        _gate_by_half(ops, spec, qkv, out)
    return Branch(out, spec.heads * spec.head_dim, layer.o)


def attend_variant(ops: ProgramOps, layer: ExtendedAttentionLayer, source: int) -> Branch:
    """As ``attend_heads``, with what ``spec.AttentionExtras`` says beside."""
    spec, extras, site = layer.spec, layer.extras, layer.site
    reads = extras.kv_from is not None
    kv_rows = (spec.kv_heads * spec.head_dim, spec.kv_heads * spec.v_dim)
    step = spec.head_dim * (2 if spec.gate else 1)
    q_rows = spec.heads * step
    width = q_rows if reads else q_rows + sum(kv_rows)
    qkv = ops.linear(layer._project.packed, source, ops.buffer("qkv", width))
    offsets = [0, q_rows, q_rows + kv_rows[0]]
    if extras.clip_qkv and not extras.clip_after_norm:
        ops.program.scale(qkv, 0, sum(layer.rows), 1.0, extras.clip_qkv, False, False)
    if not reads:
        _prepare_values(ops, layer, qkv, (offsets[1], offsets[2]))
    _turn_and_store(ops, layer, qkv, offsets)
    if extras.logn_scaling is not None:
        ops.grow_queries(extras.logn_scaling, qkv, (spec.heads, spec.head_dim, step))
    out_width = spec.heads * spec.v_dim
    out = ops.buffer("attended", out_width)
    ops.keep.append(site)
    _attend(ops, site, qkv, out, step)
    _finish_variant(ops, layer, source, qkv, out)
    return Branch(out, out_width, layer.o)


def _prepare_values(
    ops: ProgramOps, layer: ExtendedAttentionLayer, qkv: int, offsets: tuple[int, int]
) -> None:
    """``offsets`` of keys and of values, which may be the keys normed."""
    spec, extras = layer.spec, layer.extras
    if extras.v_norm is not None:
        weight, how = layer.v_norm.weight_D, Norming(extras.v_norm.eps)
        heads = (spec.kv_heads, spec.v_dim)
        source = offsets[0] if extras.k_is_v else offsets[1]
        ops.norm_heads((qkv, source), (qkv, offsets[1]), heads, weight, how)
    numbers = spec.kv_heads * spec.v_dim
    if extras.clip_after_norm:
        ops.program.scale(qkv, offsets[1], numbers, 1.0, extras.clip_qkv, False, False)
    if extras.v_scale != 1.0:
        ops.program.scale(qkv, offsets[1], numbers, extras.v_scale, 0.0, False, False)


def _turn_and_store(
    ops: ProgramOps, layer: ExtendedAttentionLayer, qkv: int, offsets: list[int]
) -> None:
    """Norm and rope in the record's order, what is between and behind them, the store."""
    spec, extras, site = layer.spec, layer.extras, layer.site
    reads = extras.kv_from is not None
    norm, turn = norm_fields(ops, layer.qk_norm), _turn(layer.rope_index, spec.rope)
    heads, last = (Q, Q) if reads else (Q | K, ALL)
    numbers = offsets[1] if reads else offsets[2]
    steps = [(norm, turn)]
    if extras.norm_after_rope:
        steps = [(NO_NORM, turn), (norm, NO_TURN)]
    elif extras.clip_after_norm:
        steps = [(norm, NO_TURN), (NO_NORM, turn)]
    if extras.k_scale != 1.0 and not reads:
        steps.append((NO_NORM, NO_TURN))
    for i, (own_norm, own_turn) in enumerate(steps):
        is_last = i == len(steps) - 1
        if i and extras.clip_after_norm:
            ops.program.scale(qkv, 0, numbers, 1.0, extras.clip_qkv, False, False)
        if is_last and extras.k_scale != 1.0 and not reads:
            keys = offsets[2] - offsets[1]
            ops.program.scale(qkv, offsets[1], keys, extras.k_scale, 0.0, False, False)
        parts = last if is_last else heads
        _store(ops, qkv, offsets, spec, site, own_norm, own_turn, parts)


def _finish_variant(
    ops: ProgramOps, layer: ExtendedAttentionLayer, source: int, qkv: int, out: int
) -> None:
    """Norm and gates of the heads' output."""
    spec, extras = layer.spec, layer.extras
    heads = (spec.heads, spec.v_dim)
    if extras.out_norm is not None and extras.out_norm_heads:
        weight, how = layer.out_norm.weight_D, Norming(extras.out_norm.eps)
        ops.norm_heads((out, 0), (out, 0), heads, weight, how)
    elif extras.out_norm is not None:
        ops.norm_in_place(layer.out_norm, out, spec.heads * spec.v_dim)
    if spec.gate:
        _gate_by_half(ops, spec, qkv, out)
    if extras.gate:
        is_one = extras.gate == "head"
        _gate(ops, ops.project(layer.gate, source, "gates"), out, heads, extras.gate_act, is_one)


def _gate(
    ops: ProgramOps, gates: int, out: int, heads: tuple[int, int], act: str, is_one: bool
) -> None:
    count, width = heads
    ops.program.gate(gates, out, count, width, 0, width, False, GATES[act], is_one)


def _gate_by_half(ops: ProgramOps, spec: Attention, qkv: int, out: int) -> None:
    """The second half of each head of q."""
    width = spec.head_dim
    ops.program.gate(qkv, out, spec.heads, width, width, 2 * width, False, 0, False)


Turn = tuple[int, bool, int]  # which rope, interleaved, channels
NO_TURN: Turn = (-1, False, 0)


def _turn(index: int, rope: Rope | None) -> Turn:
    return NO_TURN if rope is None or index < 0 else (index, rope.interleaved, rope.dim)


def norm_fields(ops: ProgramOps, norm: QkNorm | None) -> tuple[object, ...]:
    """Norms of q and k as a store op takes them."""
    if norm is None:
        return NO_NORM
    weights = (norm.q_weight, norm.k_weight, norm.q_bias, norm.k_bias)
    addresses = (ops.held(w) for w in weights)
    return (NORM_CODE[norm.kind], norm.is_layer_norm, *addresses, norm.eps)


def _cache(ops: ProgramOps, site: AttentionSite) -> tuple[int, int, int, int]:
    pool = ops.pools[site.group]
    k, v = pool.k[site.layer], pool.v[site.layer]
    return k.data_ptr(), v.data_ptr(), dtype_code(pool.dtype, "cache"), pool.page_size


def _store(
    ops: ProgramOps, qkv: int, offsets: list[int], spec: Attention, site: AttentionSite,
    norm: tuple[object, ...], turn: Turn, parts: int = ALL,
) -> None:  # fmt: skip
    step = spec.head_dim * (2 if spec.gate else 1)
    shape = [spec.heads, spec.kv_heads, spec.head_dim, spec.v_dim, step]
    ops.program.store(qkv, offsets, shape, norm, *turn, site.group, _cache(ops, site), parts)


def _attend(ops: ProgramOps, site: AttentionSite, queries: int, out: int, step: int) -> None:
    """Over the cache of the last store; ``step``: numbers from one query head to the next."""
    ops.program.attention(
        queries, out, site.heads, step, site.scale, site.window, site.softcap,
        address(site.sinks), site.chunk, address(site.slopes),
    )  # fmt: skip
