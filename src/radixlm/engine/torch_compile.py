"""--enable-torch-compile: what of a model can be compiled, and the compiling at start."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from radixlm.attention.base import AttentionBackend
from radixlm.attention.cpu import CpuBackend
from radixlm.base.deferred import TORCH_SHAPES, run_deferred
from radixlm.base.lazy import load
from radixlm.base.record import replace
from radixlm.base.units import format_seconds
from radixlm.config.server_config import ServerConfig
from radixlm.cuda_graphs.dummy_run import DummyRun
from radixlm.engine.gpu import reads_on_host
from radixlm.executor.runner import Runner
from radixlm.kernels.dispatch import Kernels
from radixlm.models.build import Model
from radixlm.models.decoder import DecoderModel
from radixlm.models.program.step import why_no_program
from radixlm.scheduler.limits import Limits

if TYPE_CHECKING:  # torch's compiler takes a second to import
    from radixlm.models.compiled import CompiledSteps

log = logging.getLogger(__name__)

TRACE_LEN = 8  # context of the dummy requests while steps are compiled


def for_compiling(kernels: Kernels, config: ServerConfig) -> Kernels:
    """The kernels, as custom ops that torch.compile can put into graphs if it is enabled."""
    if not config.execute.enable_torch_compile:
        return kernels
    run_deferred(TORCH_SHAPES)
    return cast(Kernels, load("radixlm.kernels.custom_ops:with_custom_ops")(kernels))


def compiled_steps(
    config: ServerConfig, model: Model, attn: AttentionBackend
) -> CompiledSteps | None:
    """The model's small decode steps under torch.compile, if enabled; a warning says why if they
    cannot be compiled."""
    if not config.execute.enable_torch_compile:
        return None
    why = why_not_compiled(model, attn)
    if why:
        log.warning("--enable-torch-compile: every step runs as it is: %s", why)
        return None
    rows = config.execute.torch_compile_max_bs
    log.info(
        "torch.compile: steps that decode up to %d tokens and nothing else; all other steps, and "
        "any with a part of a prompt, run as they are",
        rows,
    )
    made = load("radixlm.models.compiled:CompiledSteps")(cast(DecoderModel, model), rows)
    return cast("CompiledSteps", made)


def why_not_compiled(model: Model, attn: AttentionBackend) -> str:
    """Why a model's decode steps cannot be compiled; "" if they can."""
    if not isinstance(model, DecoderModel):
        return "the model is not a native decoder"
    if not model.kv_groups or model.decoder.pool is not None:
        return "the model generates no tokens"
    place = model.context.ranks.place
    if place.tp * place.pp > 1:
        return "what ranks tell each other is not part of a graph"
    if model.state_layers:
        return "recurrent layers get their rows from the host"
    if model.decoder.cycles is not None:
        return "repeated blocks read entries of the cache that a graph cannot address"
    if model.use_program and isinstance(attn, CpuBackend) and not why_no_program(model):
        return "a whole step is one call into the C++ kernels"
    if why := next((why for b in model.decoder.blocks if (why := reads_on_host(b))), ""):
        return why
    names = [os.environ.get("CC", "gcc"), "cc", "clang"]
    if model.context.device.type == "cpu":
        names = [os.environ.get("CXX", "g++"), "c++", "clang++"]
    if not any(shutil.which(name) for name in names):
        return f"torch.compile needs a compiler, and there is none of {', '.join(names)}"
    return ""


def compile_now(
    steps: CompiledSteps, make_runner: Callable[[Limits], Runner], limits: Limits
) -> None:
    """Compile a step of one row and one of many before there are requests. All pages are page 0."""
    started_s = time.perf_counter()
    max_rows = min(limits.max_running, steps.max_rows)
    length = min(TRACE_LEN, limits.context_len)
    runner = make_runner(replace(limits, max_running=max_rows, context_len=length))
    dummy = DummyRun(runner, max_rows, length)
    for rows in sorted({1, max_rows}):
        dummy.decodes(rows)
    if steps.is_on:
        took = format_seconds(time.perf_counter() - started_s)
        log.info("torch.compile: decode steps compiled in %s", took)
