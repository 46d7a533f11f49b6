"""Decode steps under torch.compile (``--enable-torch-compile``).

A decode step of a few rows is one graph, from the token ids to the logits. Attention and the
package's kernels are custom operations that the compiler does not trace (kernels/custom_ops.py); it
fuses the torch operations between them. Page tables, lengths and pools belong to the attention
backend, not to the graph, so that a graph serves all lengths. One row has its own graph, all other
counts share one. A model should need these two and gets at most MAX_GRAPHS.

If compilation fails, the steps run uncompiled, after one warning.

Legend: T tokens, R rotated channels, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import lookup_backend, mark_dynamic
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
)
from torch._inductor import config as inductor_config
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
)

from radixlm.base.units import format_seconds
from radixlm.kernels.custom_ops import OPS, FunctionHandle, flat_norm, norm_of
from radixlm.kernels.ops.lora import LoraRows
from radixlm.kernels.ops.rope import QkNorm
from radixlm.layers.rope import Angles, RopeTables
from radixlm.models.decoder import DecoderModel
from radixlm.step.batch import AttentionSite, ForwardBatch

log = logging.getLogger(__name__)

BACKEND = "inductor"
# kernels are compiled by this process, without a pool of others that would stay; halves are rounded
# where they are without the compiler
_INDUCTOR = {"compile_threads": 1, "emulate_precision_casts": True}
MAX_GRAPHS = 4
_FAILURES = (
    TorchDynamoException,
    ConstraintViolationError,
    FailOnRecompileLimitHit,
    GuardOnDataDependentSymNode,
)
# steps with any other optional part of a batch are rare and run uncompiled
_COMPILED_PARTS = ("is_decode", "fused_attn", "leaves_taps", "scratch")
_OTHER_PARTS = tuple(
    one.name
    for one in fields(ForwardBatch)
    if (one.default is not MISSING or one.default_factory is not MISSING)
    and one.name not in _COMPILED_PARTS
)


class _TooMany(RuntimeError):
    """More graphs than a model should need."""


class OpaqueAttention:
    """The attention of a traced step: each call is an operation that reaches the real backend."""

    def __init__(self, sites: Sequence[AttentionSite]) -> None:
        self.pools: Sequence[Any] = ()
        self.real: Any = None  # the backend, and where it prepares q and k itself, the same again
        self._numbers: dict[int, int] = {}
        self._handles: list[FunctionHandle] = []
        for site in sites:
            pair = (FunctionHandle(self._calling(site)), FunctionHandle(self._preparing(site)))
            self._numbers[id(site)] = pair[0].number
            assert pair[1].number == pair[0].number + 1
            self._handles += [*pair]

    def _calling(self, site: AttentionSite) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor | None, v: Tensor | None, width: int) -> Tensor:
            return cast(Tensor, self.real.run(q, k, v, site))

        return call

    def _preparing(self, site: AttentionSite) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            norm, (angles, interleaved, _) = norm_of(rest[:7]), rest[7:]
            return cast(Tensor, self.real.prepare_and_run(q, k, v, site, norm, angles, interleaved))

        return call

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """See step/batch.py: AttentionRunner."""
        width = site.heads * site.v_dim
        return cast(Tensor, OPS["attend"](self._numbers[id(site)], q_THD, k_TKD, v_TKV, width))

    def prepare_and_run(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        site: AttentionSite,
        norm: QkNorm | None,
        cos_sin_T2R: Tensor | None,
        interleaved: bool,
    ) -> Tensor:
        """See step/batch.py: FusedAttentionRunner."""
        number, width = self._numbers[id(site)] + 1, site.heads * site.v_dim
        arguments = (*flat_norm(norm), cos_sin_T2R, interleaved)
        return cast(
            Tensor, OPS["prepare_and_attend"](number, q_THD, k_TKD, v_TKV, *arguments, width)
        )


@dataclass(slots=True)
class TracedBatch(ForwardBatch):
    """A step as the compiler sees it. The ``angles`` of its ropes are an input of the graph: they
    may depend on the host's numbers."""

    angles: list[Angles] = field(default_factory=list)


class _TracedRopes:
    """Replaces the ropes of the traced model: the angles are in the batch."""

    def angles(self, batch: TracedBatch) -> list[Angles]:
        return batch.angles


def _logits(model: DecoderModel, batch: TracedBatch) -> Tensor:
    """What is compiled: [T, V]."""
    return model.logits(model.forward(batch))


class CompiledSteps:
    """A model whose small decode steps are compiled; otherwise the model."""

    def __init__(self, model: DecoderModel, max_rows: int) -> None:
        """``model`` is loaded and does not change. Steps of more than ``max_rows`` are not
        compiled."""
        self._model, self.max_rows = model, max_rows
        self._attention = OpaqueAttention(model.sites)
        ropes = cast(RopeTables, _TracedRopes())
        self._traced_model = model.without_program(self._attention, ropes)
        self._backend = lookup_backend(BACKEND)
        # torch caches graphs by code object: each model has its own
        code = _logits.__code__.replace(co_name=f"logits_of_{id(self):x}")
        function = FunctionType(code, _logits.__globals__)
        self._run = torch.compile(function, fullgraph=True, dynamic=False, backend=self._compile)
        self.num_graphs = 0
        self.is_on = True

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        if self.is_on and not need_hidden and self._takes(batch):
            try:
                return None, self._run(self._traced_model, self._traced(batch))
            except _FAILURES as error:
                self.is_on = False
                log.warning("--enable-torch-compile: steps run as they are: %s", _cause(error))
        return self._model.step(batch, need_hidden)

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        return self._model.logits(hidden_RD, lora)

    def _takes(self, batch: ForwardBatch) -> bool:
        if not batch.is_decode or batch.num_tokens > self.max_rows:
            return False
        return not any(_is_set(getattr(batch, name)) for name in _OTHER_PARTS)

    def _traced(self, batch: ForwardBatch) -> TracedBatch:
        """The step with opaque attention and with its angles; the number of rows above 1 is
        dynamic."""
        attention = self._attention
        attention.real = batch.attn
        values = {one.name: getattr(batch, one.name) for one in fields(batch)}
        traced = TracedBatch(**values)
        traced.attn, traced.angles = attention, self._model.ropes.angles(batch)
        traced.fused_attn = None if batch.fused_attn is None else attention
        if batch.num_tokens > 1:
            for tensor in (traced.token_ids_T, traced.positions_T, *traced.angles):
                mark_dynamic(tensor, 0)
        return traced

    def _compile(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Call the backend; count and time it."""
        if self.num_graphs == MAX_GRAPHS:
            raise _TooMany(f"more than {MAX_GRAPHS} graphs of decode steps are needed")
        self.num_graphs += 1
        began_s = time.perf_counter()
        with inductor_config.patch(_INDUCTOR):
            compiled = self._backend(graph, inputs, **options)
        log.info(
            "torch.compile: graph %d of decode steps compiled in %s",
            self.num_graphs,
            format_seconds(time.perf_counter() - began_s),
        )
        return compiled


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, bool | tuple | dict) and not value)


def _cause(error: Exception) -> str:
    """The first cause of an error, in a line."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])
