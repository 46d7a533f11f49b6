"""Writes recurrent mixers as operations of a C++ program: from a block's normed input to what the
output projection reads. States are read and written in their pool, run by run (``StateRun`` of
csrc/common/api.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.kernels.cpu.linear import ACT_CODE
from radixlm.kernels.cpu.scan import DECAYED, DELTA, SELECTIVE
from radixlm.layers.state import (
    ConvLayer,
    DeltaNetLayer,
    Mamba1Layer,
    Mamba2Layer,
    ShortConvLayer,
    StateLayer,
)
from radixlm.models.program_ops import GATES, NOWHERE, Branch, Norming, ProgramOps
from radixlm.pools.state import StateStep

ProgramState = ShortConvLayer | Mamba1Layer | Mamba2Layer | DeltaNetLayer
MAX_CONV = 16  # tokens of a convolution: csrc/common/api.h
NO_LIMIT = float("inf")
Place = tuple[int, int]  # buffer, offset
ScanInput = tuple[int, int, int]  # buffer, offset, numbers from one head to the next


def runs_of(step: StateStep) -> Tensor:
    """How a step's sequences advance: int32 [runs, 4] of first row, tokens, source and target
    page."""
    parts = []
    for segment in step.segments:
        count = segment.num_sequences
        if isinstance(segment.rows, slice):
            each = (segment.rows.stop - segment.rows.start) // count
            first = torch.arange(segment.rows.start, segment.rows.stop, each)
        else:
            each, first = 1, segment.rows
        tokens = torch.full_like(first, each)
        parts.append(torch.stack((first, tokens, segment.source, segment.target), 1))
    return torch.cat(parts).int()


def mix_states(ops: ProgramOps, layer: ProgramState, source: int) -> Branch:
    """The outcome of a recurrent layer before its output projection."""
    if isinstance(layer, ShortConvLayer):
        return _short_conv(ops, layer, source)
    if isinstance(layer, DeltaNetLayer):
        return _delta_net(ops, layer, source)
    if isinstance(layer, Mamba2Layer):
        return _mamba2(ops, layer, source)
    return _mamba1(ops, layer, source)


def _states(ops: ProgramOps, layer: StateLayer) -> list[Tensor]:
    assert ops.states is not None
    return ops.states.layers[layer.row]


def _convolve(
    ops: ProgramOps, layer: StateLayer, conv: ConvLayer, source: int, target: int,
    offsets: tuple[int, int, int], act: str,
) -> None:  # fmt: skip
    """``offsets`` in the source's rows: what is convolved, what multiplies it first, what the
    outcome; -1 for none."""
    channels, width = conv.weight_CW.shape
    weight_WC = conv.weight_CW.T.contiguous()
    code = ACT_CODE[act] if act else 0
    ops.program.conv(
        source, target, offsets, (channels, width, code), ops.held(weight_WC),
        ops.held(conv.bias_C), _states(ops, layer)[0].data_ptr(),
    )  # fmt: skip


def _short_conv(ops: ProgramOps, layer: ShortConvLayer, source: int) -> Branch:
    channels = layer.spec.channels
    both = ops.project(layer.inp, source, "state in")
    out = ops.buffer("state out", channels)
    _convolve(ops, layer, layer.conv, both, out, (2 * channels, 0, channels), "")
    return Branch(out, channels, layer.out)


def _mamba1(ops: ProgramOps, layer: Mamba1Layer, source: int) -> Branch:
    spec = layer.spec
    rank, size, inner = spec.rank, spec.state, spec.inner
    both = ops.project(layer.inp, source, "state in")
    mixed = ops.buffer("mixed", inner)
    _convolve(ops, layer, layer.conv, both, mixed, (0, -1, -1), "silu")
    flat = ops.project(layer.x_proj, mixed, "state steps")
    if spec.norm is not None:
        ops.norm_in_place(layer.dt_norm, flat, rank)
        ops.norm_in_place(layer.b_norm, flat, size, rank)
        ops.norm_in_place(layer.c_norm, flat, size, rank + size)
    step = ops.project(layer.dt_proj, flat, "steps")
    ops.program.decay(step, 0, step, NOWHERE, inner, 0, 0, (0.0, NO_LIMIT, 0.0), False)
    out = ops.buffer("state out", inner)
    inputs: list[ScanInput] = [
        (flat, rank + size, 0),
        (flat, rank, 0),
        (mixed, 0, 0),
        (step, 0, 0),
    ]
    state, rates = _states(ops, layer)[1].data_ptr(), layer._a.contiguous()
    shape = (SELECTIVE, 1, size, inner, 1, 1)
    ops.program.scan(inputs, out, shape, ops.held(rates), ops.held(layer._d), state)
    ops.program.gate(both, out, 1, inner, inner, inner, False, GATES["silu"], False)
    return Branch(out, inner, layer.out)


def _mamba2(ops: ProgramOps, layer: Mamba2Layer, source: int) -> Branch:
    spec, inner = layer.spec, layer.spec.inner
    both = ops.project(layer.inp, source, "state in")
    mixed = ops.buffer("mixed", spec.conv_channels)
    _convolve(ops, layer, layer.conv, both, mixed, (inner, -1, -1), "silu")
    step, log = ops.buffer("steps", spec.heads), ops.buffer("decays", spec.heads)
    ops.program.decay(
        both, inner + spec.conv_channels, step, log, spec.heads, ops.held(layer._dt_bias),
        ops.held(layer._a), (*spec.dt_limit, 0.0), False,
    )  # fmt: skip
    keys = inner + spec.groups * spec.state
    inputs: list[ScanInput] = [
        (mixed, keys, spec.state),
        (mixed, inner, spec.state),
        (mixed, 0, spec.head_dim),
        (log, 0, 1),
        (step, 0, 1),
    ]
    out, state = ops.buffer("state out", inner), _states(ops, layer)[1].data_ptr()
    shape = (DECAYED, spec.heads, spec.state, spec.head_dim, 1, spec.heads // spec.groups)
    ops.program.scan(inputs, out, shape, 0, ops.held(layer._d), state)
    if spec.norm is None:
        ops.program.gate(both, out, 1, inner, 0, inner, False, GATES["silu"], False)
    else:
        heads = (spec.norm_groups, inner // spec.norm_groups)
        how = Norming(spec.norm.eps, act="silu", gates_last=spec.gate_after_norm)
        ops.norm_heads((out, 0), (out, 0), heads, layer.norm.weight_C, how, (both, 0))
    return Branch(out, inner, layer.out)


UNIT_EPS = 1e-6  # of layers/state.py: _unit


def _delta_net(ops: ProgramOps, layer: DeltaNetLayer, source: int) -> Branch:
    spec = layer.spec
    keys, values = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim
    given = ops.project(layer.qkv, source, "state in")
    mixed = ops.buffer("mixed", spec.conv_channels)
    _convolve(ops, layer, layer.conv, given, mixed, (0, -1, -1), "silu")
    heads = (spec.k_heads, spec.k_dim)
    for offset, scale in ((0, spec.k_dim**-0.5), (keys, 1.0)):
        how = Norming(UNIT_EPS, scale, is_sum=True)
        ops.norm_heads((mixed, offset), (mixed, offset), heads, None, how)
    log, gate = _decays_and_gate(ops, layer, source)
    beta = ops.project(layer.beta, source, "shares")
    ops.program.scale(beta, 0, spec.v_heads, spec.beta_scale, 0.0, True, False)
    decays = spec.k_dim if spec.channel_decay else 1
    inputs: list[ScanInput] = [
        (mixed, 0, spec.k_dim),
        (mixed, keys, spec.k_dim),
        (mixed, 2 * keys, spec.v_dim),
        (log, 0, decays),
        (beta, 0, 1),
    ]
    out, state = ops.buffer("state out", values), _states(ops, layer)[1].data_ptr()
    repeats = spec.v_heads // spec.k_heads
    shape = (DELTA, spec.v_heads, spec.k_dim, spec.v_dim, decays, repeats)
    ops.program.scan(inputs, out, shape, 0, 0, state)
    how = Norming(spec.norm.eps, act=spec.gate_act)
    v_heads = (spec.v_heads, spec.v_dim)
    ops.norm_heads((out, 0), (out, 0), v_heads, layer.norm.weight_C, how, (gate, 0))
    return Branch(out, values, layer.out)


def _decays_and_gate(ops: ProgramOps, layer: DeltaNetLayer, source: int) -> tuple[int, int]:
    """Buffers of the decays, logarithms of a head or factors of each channel, and of the gate."""
    spec = layer.spec
    count = spec.v_heads * (spec.k_dim if spec.channel_decay else 1)
    if spec.channel_decay and spec.low_rank:
        decay = ops.project(layer.f_b, ops.project(layer.f_a, source, "few"), "decays")
        gate = ops.project(layer.g_b, ops.project(layer.g_a, source, "few"), "state gate")
    else:
        decay = ops.project(layer.decay, source, "decays")
        gate = ops.project(layer.gate, source, "state gate")
    rates = layer._a if spec.decay_floor else -layer._a
    rates = rates.repeat_interleave(count // spec.v_heads)
    ops.program.decay(
        decay, 0, NOWHERE, decay, count, ops.held(layer._dt_bias), ops.held(rates),
        (0.0, NO_LIMIT, spec.decay_floor), spec.channel_decay,
    )  # fmt: skip
    return decay, gate
