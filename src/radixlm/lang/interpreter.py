"""The names of ``sglang.lang.interpreter``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from radixlm.lang.budget import ProgramError
from radixlm.lang.executor import StreamExecutor
from radixlm.lang.ir import SglSamplingParams
from radixlm.lang.state import ProgramState, ProgramStateGroup

if TYPE_CHECKING:
    from radixlm.lang.function import SglFunction

__all__ = [
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "StreamExecutor",
    "run_program",
    "run_program_batch",
]


def run_program(
    program: SglFunction,
    backend: Any,
    func_args: Sequence[Any],
    func_kwargs: Mapping[str, Any],
    default_sampling_para: SglSamplingParams,
    stream: bool,
    sync: bool = False,
    use_thread: bool = True,
) -> ProgramState:
    """``program.run`` with the sampling parameters as one object."""
    values = {k: v for k, v in vars(default_sampling_para).items() if v is not None}
    names = program.run_parameters
    kept = {name: value for name, value in values.items() if name in names}
    state = program.run(
        *func_args, stream=stream, backend=backend, use_thread=use_thread, **kept, **func_kwargs
    )
    if sync:
        state.error()
    return state


def run_program_batch(
    program: SglFunction,
    backend: Any,
    batch_arguments: Sequence[Mapping[str, Any]],
    default_sampling_para: SglSamplingParams,
    num_threads: str | int,
    progress_bar: bool,
    generator_style: bool = False,
) -> Any:
    """``program.run_batch`` with the sampling parameters as one object."""
    values = {k: v for k, v in vars(default_sampling_para).items() if v is not None}
    kept = {name: value for name, value in values.items() if name in program.run_parameters}
    return program.run_batch(
        list(batch_arguments),
        backend=backend,
        num_threads=num_threads,
        progress_bar=progress_bar,
        generator_style=generator_style,
        **kept,
    )
