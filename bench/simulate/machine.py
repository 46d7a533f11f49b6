"""GPUs, nodes and links, and what the model expects of the kernels that run on them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record

FloatArray = NDArray[np.float64]


class Gpu(Record):
    """Data sheet of a GPU: dense operations and bytes a second, bytes of memory."""

    name: str
    flops_16bit: float
    flops_8bit: float
    bandwidth: float
    memory_bytes: float
    nvlink: float  # bytes a second in one direction to the GPUs of its node
    nic: float  # bytes a second of its network card

    def flops(self, weight_bytes: float) -> float:
        """Operations a second with weights of so many bytes."""
        return self.flops_8bit if weight_bytes <= 1 else self.flops_16bit


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 312e12, 624e12, 2.04e12, 80e9, 300e9, 25e9),
        Gpu("H100", 989e12, 1979e12, 3.35e12, 80e9, 450e9, 50e9),
        Gpu("H800", 989e12, 1979e12, 3.35e12, 80e9, 200e9, 50e9),
        Gpu("H200", 989e12, 1979e12, 4.8e12, 141e9, 450e9, 50e9),
    )
}


class Engine(Record):
    """What an engine makes of a GPU: shares of its data sheet, and time beside the kernels.

    ``step_s`` and ``row_s``: time of a step, and of each of its sequences, during which the device
    waits for the host. ``layer_s``: launches and gaps of a layer. ``overlap``: the share of the
    shorter of communication and computation that two-batch overlap hides; 0 without it.
    ``is_prefill_first``: prompts and decodes never share a step (vLLM of 2023)."""

    gemm: float = 0.6
    attention: float = 0.5
    bandwidth: float = 0.8
    step_s: float = 2e-4
    row_s: float = 0.0
    layer_s: float = 2.5e-5
    overlap: float = 0.0
    is_prefill_first: bool = False


# Latency of DeepEP's low-latency kernels with 128 tokens of 7,168 channels and 8 experts each, in
# microseconds by the number of ranks, as its authors publish it for H800 with 400 Gb/s.
_RANKS = np.array([8, 16, 32, 64, 128, 256])
_DISPATCH_US = np.array([77, 118, 155, 173, 192, 194])
_COMBINE_US = np.array([114, 195, 273, 314, 369, 360])
_TABLE_TOKENS, _TABLE_DIM, _TABLE_TOP_K = 128, 7168, 8
_ALPHA_US = 20.0  # of a message without tokens
# The same of its kernels for prompts: bytes a second that a rank sends over the slowest link.
_NORMAL_RANKS = np.array([8, 16, 32, 64])
_NORMAL_BANDWIDTH = np.array([153e9, 43e9, 58e9, 51e9])

GPUS_A_NODE = 8
ALL_REDUCE_ALPHA_S = 6e-6  # one shot over NVLink; DeepSeek and vLLM publish 4 to 8 us
RING_ALPHA_S = 3e-5  # between nodes
PIPELINE_ALPHA_S = 1e-5


def all_reduce_s(num_bytes: FloatArray, ranks: int, gpu: Gpu) -> FloatArray:
    """Seconds of an all-reduce of a tensor of so many bytes over ``ranks`` GPUs."""
    if ranks == 1:
        return np.zeros_like(num_bytes)
    is_local = ranks <= GPUS_A_NODE
    alpha = ALL_REDUCE_ALPHA_S if is_local else RING_ALPHA_S
    link = gpu.nvlink if is_local else gpu.nic
    return alpha + 2 * (ranks - 1) / ranks * num_bytes / (0.8 * link)


def all_to_all_s(
    tokens: FloatArray, dim: int, top_k: int, ranks: int, is_prefill: NDArray[np.bool_], gpu: Gpu
) -> FloatArray:
    """Seconds of dispatch and combine of so many tokens a rank, in one layer. The card of the table
    has 50 GB/s; others scale with theirs."""
    if ranks == 1:
        return np.zeros_like(tokens)
    scale = tokens * dim * top_k / (_TABLE_TOKENS * _TABLE_DIM * _TABLE_TOP_K)
    scale = scale * (50e9 / gpu.nic if ranks > GPUS_A_NODE else 200e9 / min(gpu.nvlink, 200e9))
    log = np.log2(_RANKS)
    low = sum(
        _ALPHA_US + (np.interp(math.log2(ranks), log, table) - _ALPHA_US) * scale
        for table in (_DISPATCH_US, _COMBINE_US)
    )
    bandwidth = float(np.interp(math.log2(ranks), np.log2(_NORMAL_RANKS), _NORMAL_BANDWIDTH))
    # a token goes once to each node that has some of its experts, 4 at most: 1 byte a channel
    # there, 2 bytes back
    nodes = min(max(ranks // GPUS_A_NODE, 1), 4)
    copies = nodes if nodes > 1 else min(top_k, ranks) * (ranks - 1) / ranks
    normal = 2 * RING_ALPHA_S + tokens * copies * dim * 3 / bandwidth
    return np.where(is_prefill, normal, 1e-6 * low)


def transfer_s(num_bytes: float, gpu: Gpu, gpus: int) -> float:
    """Seconds until a request's KV has reached another node, over the cards of ``gpus`` GPUs."""
    return 50e-6 + num_bytes / (0.8 * gpu.nic * gpus)
