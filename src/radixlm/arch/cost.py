"""What a described model costs: parameters, bytes of KV cache, operations. No weights needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from radixlm.arch.cost_shared import bank_parameters, call_parameters
from radixlm.arch.cost_state import state_parameters
from radixlm.arch.cost_summed import summed_flops, summed_parameters
from radixlm.arch.spec import (
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    LatentAttention,
    Mlp,
    Moe,
    Norm,
    Straight,
    SummedAttention,
    Variant,
)

_NUM_NORMS = {
    "pre": 2,
    "post": 2,
    "post_sum": 2,
    "sandwich": 4,
    "parallel": 1,
    "parallel2": 2,
    "carried": 2,
    "bare": 1,
    "crossed": 2,
}


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes that one token occupies in the KV cache, by how long its layers keep it."""

    full: int  # layers that see everything (latent ones too)
    window: int  # layers that forget tokens outside their window

    @property
    def total(self) -> int:
        return self.full + self.window


def num_parameters(decoder: Decoder) -> int:
    """Parameters of the model; a tied embedding counts once."""
    is_shared = decoder.encoder is not None and decoder.encoder.is_shared
    blocks = decoder.blocks[: 1 if is_shared else None]
    if decoder.cycles is not None:  # two stacks, and the second stream's beginning
        size, inner = decoder.cycles.size, decoder.cycles.inner
        blocks = (*blocks[:size], *blocks[inner * size : (inner + 1) * size])
    streams = _streams(decoder)
    banks = {block.asks.bank: block.asks for block in blocks if block.asks is not None}
    return (
        _outside(decoder)
        + _altup(decoder)
        + streams
        + sum(_block(block, decoder.dim) for block in blocks)
        + sum(bank_parameters(bank, decoder.dim) for bank in banks.values())
    )


def active_parameters(decoder: Decoder) -> int:
    """Parameters that take part in one token: of the experts only those that it is routed to."""
    return num_parameters(decoder) - sum(
        _idle(ffn, decoder.dim) for b in decoder.blocks for ffn in _ffns(b)
    )


def weight_bytes(decoder: Decoder, dtype_bytes: float) -> int:
    """Bytes of all parameters at ``dtype_bytes`` each (2 for bf16, 0.5 for packed 4 bit)."""
    return int(num_parameters(decoder) * dtype_bytes)


def kv_bytes_per_token(decoder: Decoder, dtype_bytes: int) -> KvBytes:
    """Bytes of KV cache a token, keys and values of all layers, apart by kind of layer."""
    full = window = 0
    for block in decoder.blocks:
        mixer = block.attention
        if mixer is None:
            continue
        if isinstance(mixer, SummedAttention):
            rows = math.gcd(mixer.sums.rate, 16) if mixer.sums else 1  # in pages of 16 tokens
            full += mixer.entry * dtype_bytes // rows
        if isinstance(mixer, LatentAttention | SummedAttention):
            size = mixer.row * dtype_bytes
        elif mixer.more and mixer.more.kv_from is not None:
            continue
        else:
            size = mixer.kv_heads * (mixer.k_row + mixer.v_dim) * dtype_bytes
        if mixer.window:
            window += size
        else:
            full += size
    return KvBytes(full, window)


def flops_per_token(decoder: Decoder, context: int) -> int:
    """Multiply-adds times two for one more token that sees ``context`` tokens, itself included.

    Matrix products only: two for every active parameter of a matrix (the embedding is looked up,
    not multiplied), and the attention scores and sums. Latent attention as its plain expansion.
    """
    dim = decoder.dim
    width = decoder.embed_dim or dim
    total = 0 if decoder.pool else 2 * decoder.vocab * width  # the head, tied or not
    for block in decoder.blocks:
        matrices = _mixers(block, dim, matrices_only=True)
        for ffn in _ffns(block):
            matrices += _ffn_matrices(ffn, dim) - _idle(ffn, dim, matrices_only=True)
        total += 2 * matrices
        if block.attention is not None:
            total += _attention_flops(block.attention, context)
    return total


def _attention_flops(mixer: Attention | LatentAttention | SummedAttention, context: int) -> int:
    if isinstance(mixer, SummedAttention):
        return summed_flops(mixer, context)
    seen = min(context, mixer.window) if mixer.window else context
    if isinstance(mixer, LatentAttention):
        return 2 * seen * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
    if mixer.more and mixer.more.chunk:
        seen = min(seen, mixer.more.chunk)
    return 2 * seen * mixer.heads * (mixer.head_dim + mixer.v_dim)


def _outside(decoder: Decoder) -> int:
    """Embeddings, the last norm and the head."""
    encoder = decoder.encoder or Encoder()
    width = encoder.embed_dim or decoder.embed_dim or decoder.dim
    tables = decoder.vocab * width * (1 if decoder.tied else 2) + encoder.token_types * width
    if decoder.positions and not decoder.sinusoids:
        tables += decoder.positions[0] * width
    if encoder.embed_dim:
        tables += (width + 1) * decoder.dim
    if encoder.distances:
        tables += encoder.distances[0] * encoder.distances[2]
    if encoder.disentangled:
        tables += 2 * encoder.disentangled.span * decoder.dim
        tables += _norm(encoder.disentangled.norm, decoder.dim) if encoder.disentangled.norm else 0
    tables += 2 * decoder.embed_dim * decoder.dim
    before = decoder.head_layer
    if before is not None:
        tables += decoder.dim * (decoder.dim + before.bias) + _norm(before.norm, decoder.dim)
    head_bias = decoder.vocab if decoder.head_bias else 0
    norms = _norm(decoder.norm, decoder.dim) if encoder.has_final_norm else 0
    norms += _norm(decoder.embed_norm, width) if decoder.embed_norm else 0
    norms += decoder.dim * ((decoder.cycles is not None) + 2 * decoder.embed_affine)
    return tables + head_bias + norms + _pool(decoder)


def _pool(decoder: Decoder) -> int:
    """The layers of a head that gives vectors or scores."""
    pool, dim = decoder.pool, decoder.dim
    total = 0
    for step in (*pool.head, *pool.gate) if pool is not None else ():
        if isinstance(step, Norm):
            total += _norm(step, dim)
        else:
            total += step.outputs * (step.inputs + step.bias)
            dim = step.outputs
    return total


def _altup(decoder: Decoder) -> int:
    """Parameters of the streams: at both ends, and of each block."""
    altup, dim, count = decoder.altup, decoder.dim, len(decoder.blocks)
    if decoder.layer_inputs is not None:
        own = decoder.layer_inputs
        width = count * own.dim
        return (own.vocab + dim) * width + own.dim + count * dim * (2 * own.dim + 1)
    if altup is None:
        return 0
    width, streams = count * altup.layer_dim, altup.streams
    ends = (altup.layer_vocab + dim) * width + altup.layer_dim + 2 * (streams - 1) * dim * dim
    block = streams**3 + streams**2 + dim * (streams + 2 * altup.rank + 2 * altup.layer_dim + 4)
    return ends + count * block


def _streams(decoder: Decoder) -> int:
    """Parameters of what joins branches to several streams, and the streams at the end."""
    streams, gated = decoder.streams, decoder.gated_streams
    if gated is not None:
        wide, count = gated.count * decoder.dim, len(decoder.blocks)
        return (2 * count + 1) * wide * (2 * gated.rank + 1) + 2 * count * gated.count * wide
    if streams is None:
        return 0
    branch = streams.rows * (streams.count * decoder.dim + 1) + (3 if streams.rounds else 2)
    end = streams.count * (streams.count * decoder.dim + 1) + 1
    return 2 * len(decoder.blocks) * branch + (end if streams.ends == "weighted" else 0)


def _block(block: Block, dim: int) -> int:
    lacks_one = block.mixer is None or block.ffn is None
    count = int(block.mixer is not block.ffn) if lacks_one else _NUM_NORMS[block.layout]
    norms = (count + 3 * (block.beside is not None) + (block.cross is not None)) * _norm(
        block.norm, dim
    )
    ffn = sum(_ffn(one, dim) for one in _ffns(block))
    if block.post_norms is not None:
        norms += sum(_norm(norm, dim) - _norm(block.norm, dim) for norm in block.post_norms)
    gates = dim * (
        2 * (block.gate_temperature > 0)
        + 8 * block.affine_residual
        + 2 * block.residual_channels
        + 2 * sum(block.norm_ranks)
    )
    return norms + _mixers(block, dim) + ffn + block.out_scale + gates


def _ffns(block: Block) -> list[Mlp | Moe | Straight]:
    return [one for one in (block.ffn, block.side, block.beside) if one is not None]


def _mixers(block: Block, dim: int, *, matrices_only: bool = False) -> int:
    total = 0
    if block.asks is not None:
        total += call_parameters(block.asks, dim)
        total += bank_parameters(block.asks, dim, matrices_only=True) if matrices_only else 0
    elif block.attention is not None:
        total += _mixer(block.attention, dim, matrices_only=matrices_only)
    if block.state is not None:
        matrices, vectors = state_parameters(block.state, dim)
        total += matrices if matrices_only else matrices + vectors
    if isinstance(block.mixer, CrossAttention):
        total += _crossed(block.mixer, dim, matrices_only) + (0 if matrices_only else 2)
    if block.cross is not None:
        total += _crossed(block.cross, dim, matrices_only)
    if isinstance(block.mixer, Straight):
        total += dim * (dim + block.mixer.bias * (not matrices_only))
    return total


def _crossed(cross: CrossAttention, dim: int, matrices_only: bool) -> int:
    q_rows, kv_rows = cross.rows
    norms = 0 if cross.norm is None else 2 * _norm(cross.norm, cross.head_dim)
    vectors = norms + cross.bias * (q_rows + 2 * kv_rows + dim)
    return 2 * dim * (q_rows + kv_rows) + (0 if matrices_only else vectors)


def _norm(norm: Norm, width: int) -> int:
    return width * (norm.affine + norm.bias)


def _mixer(
    mixer: Attention | LatentAttention | SummedAttention, dim: int, *, matrices_only: bool = False
) -> int:
    if isinstance(mixer, SummedAttention):
        matrices, vectors = summed_parameters(mixer, dim)
        return matrices if matrices_only else matrices + vectors
    if isinstance(mixer, LatentAttention):
        return _latent(mixer, dim, matrices_only)
    more = mixer.more or Variant()
    reads = more.kv_from is not None
    q_heads = mixer.heads * (2 if mixer.gate else 1)
    v_dim = mixer.v_dim // 2 if more.differs else mixer.v_dim
    kv_row = 0 if reads else mixer.head_dim + (0 if more.v_is_k else v_dim)
    q_rows, kv_rows = q_heads * mixer.head_dim, mixer.kv_heads * kv_row
    qkv_rows = q_rows + kv_rows
    gate_rows = mixer.heads * {"": 0, "head": 1, "channel": mixer.v_dim}[more.gate]
    o_columns = mixer.heads * v_dim
    matrices = (qkv_rows + gate_rows + o_columns) * dim
    if more.keeps:
        matrices += mixer.kv_heads**2 * mixer.v_dim
    if more.experts:  # of q and o, each for as many heads as there are of keys
        share = mixer.kv_heads * mixer.head_dim
        matrices += (2 * more.experts * share + more.experts) * dim - (q_rows + o_columns) * dim
    if more.q_rank:
        matrices += more.q_rank * (dim + q_rows) - q_rows * dim
    if more.index:
        matrices += dim * (more.index.heads + 1) * more.index.dim
    if matrices_only:
        return matrices
    vectors = qkv_rows * mixer.qkv_bias + dim * mixer.o_bias + mixer.heads * mixer.sinks
    vectors += mixer.kv_heads * (1 + mixer.qkv_bias) * (more.keeps > 0)
    vectors += (more.q_rank if more.q_rank_norm else 0) + dim * (more.experts > 0)
    vectors += 4 * mixer.head_dim * bool(more.differs)
    vectors += 2 * _norm(more.index.norm, more.index.dim) if more.index else 0
    vectors += gate_rows * more.gate_bias
    if mixer.qk_norm_spec is not None:
        kv_heads = 0 if reads else mixer.kv_heads
        heads = 2 - reads if mixer.qk_norm == "head" else mixer.heads + kv_heads
        vectors += _norm(mixer.qk_norm_spec, heads * mixer.head_dim)
    if more.out_norm is not None:
        vectors += _norm(more.out_norm, mixer.v_dim if more.out_norm_heads else o_columns)
    if more.v_norm is not None and not reads:
        vectors += _norm(more.v_norm, mixer.v_dim)
    return matrices + vectors


def _latent(mixer: LatentAttention, dim: int, matrices_only: bool) -> int:
    q_rows = mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim * mixer.gates_by_q)
    read = mixer.q_rank * (1 + mixer.gates_by_q)
    kv_a_rows = mixer.kv_rank + mixer.rope_dim
    matrices = (
        (dim * mixer.q_rank + read * q_rows if mixer.q_rank else dim * q_rows)
        + dim * kv_a_rows
        + mixer.kv_rank * mixer.heads * (mixer.nope_dim + mixer.v_dim)
        + mixer.heads * mixer.v_dim * dim
        + dim * mixer.heads * {"": 0, "head": 1, "channel": mixer.v_dim}[mixer.gate]
    )
    index = mixer.index if mixer.index and not mixer.index.is_shared else None
    if index is not None:
        matrices += mixer.q_rank * index.heads * index.dim + dim * (index.row + index.heads)
    if matrices_only:
        return matrices
    biases = (mixer.q_rank + kv_a_rows + dim) * mixer.bias
    if index is not None:
        biases += _norm(index.norm, index.dim) + index.pool * index.dim
    biases += mixer.heads * mixer.sinks
    biases += _norm(mixer.rope_norm, mixer.rope_dim) if mixer.rope_norm is not None else 0
    return matrices + biases + _norm(mixer.norm, mixer.q_rank + mixer.kv_rank)


def _ffn(ffn: Mlp | Moe | Straight, dim: int) -> int:
    if isinstance(ffn, Straight):
        return dim * (dim + ffn.bias)
    if isinstance(ffn, Mlp):
        vectors = (_up_rows(ffn) + dim) * ffn.bias + dim * ffn.down_bias
        vectors += (4 if ffn.act == "xielu" else 0) + ffn.out_scale
        vectors += _norm(ffn.sub_norm, ffn.inner) if ffn.sub_norm else 0
        return _ffn_matrices(ffn, dim) + vectors
    shared = sum(_ffn(one, dim) for one in (ffn.shared, ffn.vision) if one)
    choices = ffn.experts + ffn.zero_experts
    matrices = (
        (ffn.experts + ffn.sinks) * _expert(ffn, dim) + _router(ffn, dim) + 2 * ffn.width * dim
    )
    biases = (ffn.experts * (_expert_rows(ffn) + dim) + choices) * ffn.bias
    norm = sum(_norm(one, dim) for one in (ffn.out_norm, ffn.router_norm) if one)
    if ffn.deep_router is not None:
        deep = ffn.deep_router
        norm += _norm(deep.norm, deep.width) + (3 + deep.chained) * deep.width
    norm += sum(_norm(one, ffn.width) for one in (ffn.width_norm, ffn.expert_norm) if one)
    vectors = dim * ffn.shared_gate + choices * (ffn.correction + ffn.expert_scale) + norm
    vectors += (ffn.sinks > 0) + dim * ffn.out_bias
    return matrices + biases + shared + vectors


def _ffn_matrices(ffn: Mlp | Moe | Straight, dim: int) -> int:
    if isinstance(ffn, Straight):
        return dim * dim
    if isinstance(ffn, Mlp):
        return (_up_rows(ffn) + ffn.inner) * dim
    shared = sum(_ffn_matrices(one, dim) for one in (ffn.shared, ffn.vision) if one)
    routers = _router(ffn, dim) + dim * (ffn.shared_gate + 2 * ffn.width)
    return (ffn.experts + ffn.sinks) * _expert(ffn, dim) + routers + shared


def _router(ffn: Moe, dim: int) -> int:
    """Parameters of the matrices that choose experts."""
    choices, deep = ffn.experts + ffn.zero_experts + ffn.sinks, ffn.deep_router
    return dim * choices if deep is None else deep.width * (dim + 2 * deep.width + choices)


def _idle(ffn: Mlp | Moe | Straight, dim: int, *, matrices_only: bool = False) -> int:
    """Parameters of the experts that one token does not visit."""
    if not isinstance(ffn, Moe):
        return 0
    biases = 0 if matrices_only else (_expert_rows(ffn) + dim) * ffn.bias
    idle = (ffn.experts - ffn.top_k) * (_expert(ffn, dim) + biases)
    if ffn.vision is None:
        return idle
    whole = _ffn_matrices(ffn.vision, dim) if matrices_only else _ffn(ffn.vision, dim)
    return idle + whole


def _expert(ffn: Moe, dim: int) -> int:
    return (_expert_rows(ffn) + ffn.inner) * (ffn.width or dim)


def _expert_rows(ffn: Moe) -> int:
    return ffn.inner * (2 if ffn.gated else 1)


def _up_rows(ffn: Mlp) -> int:
    return ffn.inner * (2 if ffn.gated else 1)
