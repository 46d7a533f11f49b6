"""Decode steps under torch.compile (``--enable-torch-compile``).

A step of a few rows that only decodes is one graph: from the token ids to the logits. Attention and
whatever has a kernel of ours are operations that the compiler does not look into
(kernels/custom_ops.py); what is plain torch between them it fuses. The page tables, lengths and
pools
are the attention backend's, which was told of the step before: no graph knows them, so that it
holds for any lengths. One row makes a graph of its own, all other counts share one; two are all
that a model should need, and MAX_GRAPHS all that it gets.

What fails to compile runs as before, after one warning.

Legend: T tokens, R channels that a rope turns, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import copy
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
# a step in which any other of a batch's optional parts is given is rare and runs as it is
_USUAL = ("is_decode", "fused_attn", "scratch")
_RARE = tuple(
    one.name
    for one in fields(ForwardBatch)
    if (one.default is not MISSING or one.default_factory is not MISSING) and one.name not in _USUAL
)


class _TooMany(RuntimeError):
    """More graphs than a model should need."""


class OpaqueAttention:
    """The attention of a traced step: each call is an operation that reaches the real backend."""

    def __init__(self, sites: Sequence[AttentionSite]) -> None:
        self.pools: Sequence[Any] = ()
        self.real: Any = None  # the backend, and where it prepares q and k itself, the same again
        self._numbers: dict[int, int] = {}
        self._held: list[FunctionHandle] = []
        for site in sites:
            pair = (FunctionHandle(self._calling(site)), FunctionHandle(self._preparing(site)))
            self._numbers[id(site)] = pair[0].number
            assert pair[1].number == pair[0].number + 1
            self._held += [*pair]

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
        asked = (*flat_norm(norm), cos_sin_T2R, interleaved)
        return cast(Tensor, OPS["prepare_and_attend"](number, q_THD, k_TKD, v_TKV, *asked, width))


@dataclass(slots=True)
class TracedBatch(ForwardBatch):
    """A step as the compiler sees it. ``angles`` of its ropes come from outside, where they may be
    told by the host."""

    angles: list[Angles] = field(default_factory=list)


class _Given:
    """In the place of a model's ropes."""

    def angles(self, batch: TracedBatch) -> list[Angles]:
        return batch.angles


def _logits(model: DecoderModel, batch: TracedBatch) -> Tensor:
    """What is compiled: [T, V]."""
    return model.logits(model.forward(batch))


class CompiledSteps:
    """A model whose small decode steps are compiled; otherwise the model."""

    def __init__(self, model: DecoderModel, max_rows: int) -> None:
        """The model is loaded, and stays as it is. ``max_rows`` of a step at most."""
        self._model, self.max_rows = model, max_rows
        self._attention = OpaqueAttention(model.sites)
        self._seen_model = _without_program(model, self._attention)
        self._backend = lookup_backend(BACKEND)
        # torch keeps graphs by code: with code of its own a model does not see another's
        code = _logits.__code__.replace(co_name=f"logits_of_{id(self):x}")
        own = FunctionType(code, _logits.__globals__)
        self._run = torch.compile(own, fullgraph=True, dynamic=False, backend=self._compile)
        self.num_graphs = 0
        self.is_on = True

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        """As the model's."""
        if self.is_on and not need_hidden and self._takes(batch):
            try:
                return None, self._run(self._seen_model, self._seen(batch))
            except _FAILURES as error:
                self.is_on = False
                log.warning("--enable-torch-compile: steps run as they are: %s", _cause(error))
        return self._model.step(batch, need_hidden)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """As the model's."""
        return self._model.logits(hidden_RD)

    def _takes(self, batch: ForwardBatch) -> bool:
        if not batch.is_decode or batch.num_tokens > self.max_rows:
            return False
        return not any(_is_given(getattr(batch, name)) for name in _RARE)

    def _seen(self, batch: ForwardBatch) -> TracedBatch:
        """The step with hidden attention and with its angles; more rows than one are any number."""
        hidden = self._attention
        hidden.real = batch.attn
        values = {one.name: getattr(batch, one.name) for one in fields(batch)}
        seen = TracedBatch(**values)
        seen.attn, seen.angles = hidden, self._model.ropes.angles(batch)
        seen.fused_attn = None if batch.fused_attn is None else hidden
        if batch.num_tokens > 1:
            for tensor in (seen.token_ids_T, seen.positions_T, *seen.angles):
                mark_dynamic(tensor, 0)
        return seen

    def _compile(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """The backend, counted and timed."""
        if self.num_graphs == MAX_GRAPHS:
            raise _TooMany(f"a graph for each of {MAX_GRAPHS} steps, and more are asked for")
        self.num_graphs += 1
        began_s = time.perf_counter()
        with inductor_config.patch(_INDUCTOR):
            made = self._backend(graph, inputs, **options)
        log.info(
            "torch.compile: graph %d of decode steps made in %s",
            self.num_graphs,
            format_seconds(time.perf_counter() - began_s),
        )
        return made


def _without_program(model: DecoderModel, attention: OpaqueAttention) -> DecoderModel:
    """The same layers, always run one by one, and told of the angles."""
    twin = copy(model)
    twin.use_program, twin.program, twin._program_backend = False, None, attention
    twin.ropes = cast(RopeTables, _Given())
    return twin


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, tuple | dict) and not value)


def _cause(error: Exception) -> str:
    """What went wrong at first, in a line."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])
