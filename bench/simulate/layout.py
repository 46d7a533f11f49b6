"""How a replica is cut over GPUs, how much KV it holds, and how long its steps take."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record, field
from simulate.cost import Cost
from simulate.machine import (
    PIPELINE_ALPHA_S,
    Engine,
    FloatArray,
    Gpu,
    all_reduce_s,
    all_to_all_s,
)

_RESERVED_BYTES = 4e9  # workspace, graphs and communicators of a GPU
_HALVES = 2.0  # micro batches of two-batch overlap
_QUANTILES = (np.arange(4096) + 0.5) / 4096
_NORMAL = np.array([NormalDist().inv_cdf(q) for q in _QUANTILES.tolist()])


def _no_skew(tokens: float) -> float:
    return 1.0


class Layout(Record):
    """A replica of ``tp * pp`` GPUs. ``attn_dp``: attention groups, each with its own requests;
    experts lie whole on the ``tp`` ranks then. ``redundant``: slots for copies of experts."""

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    redundant: int = 0

    def __post_init__(self) -> None:
        if self.tp % self.attn_dp:
            raise ConfigError(f"attn_dp {self.attn_dp} must divide tp {self.tp}")
        if self.pp > 1 and self.attn_dp > 1:
            raise ConfigError("pp and attn_dp together are not simulated: set one of them to 1")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def check(self, cost: Cost) -> None:
        """ConfigError where the slots of the experts do not divide among the ranks."""
        slots = cost.experts + self.redundant
        if self.attn_dp > 1 and slots % self.tp:
            raise ConfigError(
                f"{slots} slots of experts do not divide among {self.tp} ranks: set redundant to "
                f"{-cost.experts % self.tp}"
            )

    @property
    def groups(self) -> int:
        """Schedulers' worth of requests: attention groups, or the micro batches of a pipeline."""
        return self.attn_dp * self.pp

    @property
    def attn_tp(self) -> int:
        return self.tp // self.attn_dp


class Work(Record, eq=False):
    """A step of all groups [G]: rows that decode, tokens of prompts, (new, earlier) pairs of these,
    prompts that end; ``cached_GM``: tokens that the decodes read in each of M equal steps."""

    rows: NDArray[np.int64]
    chunks: NDArray[np.int64]
    pairs: FloatArray
    ends: NDArray[np.int64]
    cached_GM: FloatArray


class StepTime(Record):
    """Seconds of the steps of a replica. ``skew``: load of the busiest rank's experts over the
    mean, by the tokens of a step. ``sigma``: of the lognormal factor by which a rank is late."""

    cost: Cost
    gpu: Gpu
    engine: Engine
    layout: Layout
    skew: Callable[[float], float] = field(default_factory=lambda: _no_skew)
    sigma: float = 0.05

    def weights_bytes(self) -> float:
        """On one GPU."""
        c, layout = self.cost, self.layout
        own = (c.attention + c.dense) / layout.attn_tp / layout.pp
        routed = 0.0
        if c.experts:
            copies = (c.experts + layout.redundant) / c.experts
            routed = c.routed * copies / layout.gpus
        return (own + routed) * c.weight_bytes + 2 * c.embedding / layout.attn_tp

    def kv_tokens(self, fraction: float = 0.88) -> int:
        """Tokens that the KV cache of one group holds."""
        layout, c = self.layout, self.cost
        free = fraction * self.gpu.memory_bytes - self.weights_bytes() - _RESERVED_BYTES
        if free <= 0:
            raise ConfigError(
                f"{self.weights_bytes() / 1e9:.0f} GB of weights a GPU do not fit "
                f"{self.gpu.name}: raise tp"
            )
        cut = 1 if c.is_latent else layout.attn_tp
        # a stage holds its layers of the KV of all micro batches
        return int(free * cut / c.kv_bytes)

    def seconds(self, work: Work, draw: np.random.Generator | None = None) -> FloatArray:
        """Of each of the M steps; ``draw`` makes some rank late."""
        compute, wire = self._compute(work), self._wire(work)
        if self.layout.attn_dp > 1:
            compute = compute.max(0)
            wire = wire.max(0)
        hidden = self.engine.overlap * np.minimum(compute, wire)
        layers = self.cost.layers * self.engine.layer_s
        total = compute + wire - hidden + layers / self.layout.pp
        host = self.engine.step_s + self.engine.row_s * float(work.rows.max())
        if self.layout.attn_dp == 1:
            # a stage computes its micro batches one after another; each passes all stages
            is_busy = (work.rows + work.chunks > 0)[:, None]
            total = np.maximum(self.layout.pp * total.max(0), np.sum(total * is_busy, 0))
            total = total + (self.layout.pp > 1) * self.layout.pp * PIPELINE_ALPHA_S
        total = total + host
        return total if draw is None else total * self._late(draw, len(total))

    def _late(self, draw: np.random.Generator, num: int) -> FloatArray:
        """The factor of the latest of all ranks, each step anew."""
        quantiles = draw.random(num) ** (1 / self.layout.gpus)
        found: FloatArray = np.exp(self.sigma * np.interp(quantiles, _QUANTILES, _NORMAL))
        return found

    def _product(self, weights: float, tokens: Any, reads: Any = None) -> FloatArray:
        """Seconds of a product of ``tokens`` rows with so many weights; ``reads``: weights read."""
        c, engine = self.cost, self.engine
        flops = 2 * weights * np.asarray(tokens, np.float64)
        read = (weights if reads is None else reads) * c.weight_bytes
        return np.maximum(
            flops / (self.gpu.flops(c.weight_bytes) * engine.gemm),
            np.minimum(read, flops * c.weight_bytes / 2) / (self.gpu.bandwidth * engine.bandwidth),
        )

    def _compute(self, work: Work) -> FloatArray:
        """Seconds on one GPU [G, M]: of a stage, if there are several."""
        c, layout, gpu, engine = self.cost, self.layout, self.gpu, self.engine
        tokens = (work.rows + work.chunks)[:, None]
        bandwidth = gpu.bandwidth * engine.bandwidth
        found = self._product((c.attention + c.dense) / layout.attn_tp, tokens)
        found = found + tokens * c.traffic / bandwidth / layout.attn_tp**0.5
        sampled = (work.rows + work.ends)[:, None]
        head = c.dim * c.vocab / layout.attn_tp
        found = found + np.where(sampled > 0, 2 * head / bandwidth, 0.0)
        reads = c.kv_bytes / (1 if c.is_latent else layout.attn_tp) / bandwidth
        products = c.cached_flops / layout.attn_tp / (gpu.flops_16bit * engine.attention)
        found = found + work.cached_GM * max(reads, products)
        pairs = work.pairs[:, None] * c.pair_flops / layout.attn_tp
        found = found + pairs / (gpu.flops_16bit * engine.attention)
        if c.experts:
            found = found + self._experts(tokens)
        return found / layout.pp

    def _experts(self, tokens: NDArray[np.int64]) -> FloatArray:
        """Seconds of the experts of all layers on the busiest rank."""
        c, layout = self.cost, self.layout
        total = tokens if layout.attn_dp == 1 else np.full_like(tokens, tokens.sum())
        share = np.array([[self.skew(float(n))] for n in total[:, 0].tolist()])
        touched = 1 - (1 - c.top_k / c.experts) ** np.minimum(total, 1 << 20)
        read = c.routed / layout.tp * (c.experts + layout.redundant) / c.experts * touched
        routed = c.top_k * c.expert * c.moe_layers / layout.tp
        return self._product(routed, total * share, read)

    def _wire(self, work: Work) -> FloatArray:
        """Seconds of communication on one GPU [G, 1]: of a stage, if there are several."""
        c, layout = self.cost, self.layout
        tokens = (work.rows + work.chunks).astype(np.float64)[:, None]
        num_bytes = tokens * c.dim * 2
        if layout.attn_dp == 1:
            found = 2 * c.layers * all_reduce_s(num_bytes, layout.tp, self.gpu)
            return found / layout.pp
        found = c.layers * all_reduce_s(num_bytes, layout.attn_tp, self.gpu)
        is_prefill = np.full_like(tokens, bool(work.chunks.any()), np.bool_)
        parts = _HALVES if self.engine.overlap else 1.0
        each = all_to_all_s(
            tokens / layout.attn_tp / parts, c.dim, c.top_k, layout.tp, is_prefill, self.gpu
        )
        return found + c.moe_layers * parts * each
