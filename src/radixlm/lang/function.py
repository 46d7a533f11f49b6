"""SglFunction: a program, and how it is run, many at once, or traced."""

from __future__ import annotations

import inspect
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.backend.base_backend import BaseBackend
from radixlm.lang.budget import Budget
from radixlm.lang.executor import StreamExecutor
from radixlm.lang.global_config import backend_of, global_config
from radixlm.lang.ir import SglSamplingParams
from radixlm.lang.state import ProgramState
from radixlm.lang.tracer import TracerProgramState, TracingScope, trace_prefix, trace_program

if TYPE_CHECKING:
    from concurrent.futures import Future

_AWAITING = "radixlm.lang.awaiting"  # imports asyncio, which most programs do not need
MIN_CACHED_CHARS = 64
PRINTS = 2  # verbosity
CHUNK = 200  # programs begun ahead of the one that `generator_style` gives next
_SAMPLING = frozenset(inspect.signature(SglSamplingParams).parameters) - {
    "min_new_tokens",
    "json_schema",
    "dtype",
    "regex",
    "ebnf",
    "structural_tag",
    "seed",
    "skip_special_tokens",
}
_LIMITS = frozenset({"max_total_tokens", "timeout_s", "checkpoint"})


@dataclass
class _Setting:
    """What is the same for all runs of a call."""

    backend: BaseBackend
    params: SglSamplingParams
    max_total_tokens: int | None = None
    timeout_s: float | None = None


class SglFunction:
    """A function whose first parameter is the state ``s``."""

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        spec = inspect.getfullargspec(func)
        self.is_async = inspect.iscoroutinefunction(func)
        assert spec.args and spec.args[0] == "s", 'The first argument must be "s"'
        self.func, self.num_api_spec_tokens = func, num_api_spec_tokens
        self.bind_arguments = dict(bind_arguments or {})
        self.arg_names, self.arg_defaults = spec.args[1:], list(spec.defaults or ())
        self.__name__, self.__doc__ = getattr(func, "__name__", "program"), func.__doc__

    run_parameters = _SAMPLING | _LIMITS
    """Arguments of ``run`` and ``run_batch`` that are not the function's."""

    def bind(self, **kwargs: Any) -> SglFunction:
        """The program with some arguments set."""
        unknown = kwargs.keys() - set(self.arg_names)
        assert not unknown, f"{self.__name__} has no argument {', '.join(sorted(unknown))}"
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs})

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the function; calls may go on when it returns. Sampling parameters (max_new_tokens,
        temperature, stop ...) are for calls that name none; all other arguments are the function's,
        but for ``max_total_tokens`` and ``timeout_s`` (what the program may use in all) and
        ``checkpoint`` (a file that keeps its calls: the same run goes on from there). With
        ``stream`` it runs in a thread, and this returns at once. With ``use_thread`` false each
        call is over, and its error raised, before the function goes on."""
        if self.is_async and not stream:
            done: ProgramState = load("asyncio:run")(self.arun(*args, backend=backend, **kwargs))
            return done
        setting, rest = self.setting(backend, kwargs)
        state = self.state(setting, rest, stream, use_thread)
        if not stream:
            self._call(state, args, rest)
            return state

        name = f"program {self.__name__}"
        call: Any = self._call
        if self.is_async:
            call = partial(load(f"{_AWAITING}:run_in_thread"), self)
        thread = threading.Thread(target=call, args=(state, args, rest), name=name, daemon=True)
        state.stream_executor.thread = thread
        thread.start()
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the program once for each element, a dict or a tuple of arguments; a list of states
        in order, or with ``generator_style`` an iterator. ``num_threads``: how many of the
        functions run at a time; what they have begun goes on beside them."""
        count = max(96, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else int(num_threads)
        if self.is_async:
            work = self.arun_batch(batch_kwargs, backend=backend, concurrency=count, **kwargs)
            return load("asyncio:run")(work)
        batch, setting = self.batch(batch_kwargs, backend, kwargs)
        states = self._run_all(batch, setting, min(count, len(batch)))
        if progress_bar:
            states = iter(load("tqdm:tqdm")(states, total=len(batch), unit="program"))
        return states if generator_style else list(states)

    def arun(self, *args: Any, backend: Any = None, **kwargs: Any) -> Awaitable[ProgramState]:
        """``run`` for a caller with an event loop; all calls are over when it returns. An ``async
        def`` runs in this loop and awaits its results (AsyncProgramState); another function runs in
        a thread."""
        work: Awaitable[ProgramState] = load(f"{_AWAITING}:run")(self, args, backend, kwargs)
        return work

    def arun_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
        *,
        backend: Any = None,
        concurrency: int = 1024,
        **kwargs: Any,
    ) -> Awaitable[list[ProgramState]]:
        """``arun`` for each element, at most ``concurrency`` at a time; the states in order."""
        run: Any = load(f"{_AWAITING}:run_batch")
        work: Awaitable[list[ProgramState]] = run(self, batch_kwargs, backend, concurrency, kwargs)
        return work

    def trace(self, *, backend: Any = None, **kwargs: Any) -> TracerProgramState:
        """What the program would append, as a graph; arguments that are not given stay unknown."""
        return trace_program(self, kwargs, backend_of(backend, is_needed=False))

    def cache(self, backend: Any = None) -> None:
        """Have the backend compute the text that every run begins with."""
        found = backend_of(backend)
        prefix = trace_prefix(self, found)
        if len(prefix) > MIN_CACHED_CHARS:
            found.cache_prefix(prefix)

    def compile(self, *, backend: Any = None) -> SglFunction:
        """The program itself: its calls need no further preparation."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope = TracingScope.get_current_scope()
        if scope is None:
            return self.run(*args, **kwargs)
        named = dict(zip(self.arg_names, args, strict=False))
        return self.trace(backend=scope.tracer_state.backend, **named, **kwargs)

    def setting(self, backend: Any, kwargs: dict[str, Any]) -> tuple[_Setting, dict[str, Any]]:
        """What is the same for all runs of a call, and the function's own arguments."""
        taken = {name: kwargs[name] for name in kwargs if name not in self.arg_names}
        named = {name: taken[name] for name in _SAMPLING & taken.keys() if taken[name] is not None}
        limits = {name: taken.get(name) for name in _LIMITS}
        found = backend_of(backend)
        if (checkpoint := limits.pop("checkpoint")) is not None:
            found = load("radixlm.lang.cassette:Cassette")(checkpoint, found)
        rest = {k: v for k, v in kwargs.items() if k not in taken.keys() & (_SAMPLING | _LIMITS)}
        return _Setting(found, SglSamplingParams(**named), **limits), rest

    def batch(
        self, batch_kwargs: Any, backend: Any, kwargs: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], _Setting]:
        """The arguments of each run, and the rest."""
        assert isinstance(batch_kwargs, list | tuple)
        setting, rest = self.setting(backend, kwargs)
        if rest:
            raise TypeError(f"run_batch() got an unexpected keyword argument {min(rest)!r}")
        return [self._arguments(one) for one in batch_kwargs], setting

    def state(
        self,
        setting: _Setting,
        arguments: dict[str, Any],
        stream: bool = False,
        use_thread: bool = True,
    ) -> ProgramState:
        """A new state for one run."""
        is_limited = setting.max_total_tokens is not None or setting.timeout_s is not None
        executor = StreamExecutor(
            setting.backend,
            arguments,
            setting.params,
            None,
            stream,
            self.num_api_spec_tokens,
            use_thread,
            budget=Budget(setting.max_total_tokens, setting.timeout_s) if is_limited else None,
        )
        executor.program = self.__name__
        setting.backend.begin_program(executor)
        kind = load(f"{_AWAITING}:AsyncProgramState") if self.is_async else ProgramState
        state: ProgramState = kind(executor)
        return state

    def _call(self, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises what the function raises, in a thread of its own where the state is read."""
        executor = state.stream_executor
        try:
            state.ret_value = self.func(state, *args, **{**kwargs, **self.bind_arguments})
        except Exception as error:
            if executor.thread is None:
                raise
            executor.fail(error)
        finally:
            executor.end()
        if global_config.verbosity >= PRINTS:
            executor.error()
            print(executor.text_)

    def _arguments(self, given: Any) -> dict[str, Any]:
        if isinstance(given, Mapping):
            return dict(given)
        fewest = len(self.arg_names) - len(self.arg_defaults) - len(self.bind_arguments)
        if not isinstance(given, list | tuple) or not fewest <= len(given) <= len(self.arg_names):
            raise Exception("Given arguments mismatch the SGL function signature")
        free = [name for name in self.arg_names if name not in self.bind_arguments]
        return dict(zip(free, given, strict=False))

    def _run_all(
        self,
        batch: list[dict[str, Any]],
        setting: _Setting,
        count: int,
    ) -> Iterator[ProgramState]:
        """The states in order, each when its calls are over. A function that waits for none of its
        calls needs no thread of its own while they go on."""

        def run(arguments: dict[str, Any]) -> ProgramState:
            state = self.state(setting, arguments)
            self._call(state, (), arguments)
            return state

        if count <= 1 or setting.backend.is_immediate:
            yield from (_finished(run(arguments)) for arguments in batch)
            return
        ahead: deque[Future[ProgramState]] = deque()
        make_pool = load("concurrent.futures:ThreadPoolExecutor")
        with make_pool(count, thread_name_prefix="program") as pool:
            try:
                for arguments in batch:
                    ahead.append(pool.submit(run, arguments))
                    if len(ahead) >= max(CHUNK, 2 * count):
                        yield _finished(ahead.popleft().result())
                while ahead:
                    yield _finished(ahead.popleft().result())
            finally:
                for future in ahead:
                    future.cancel()


def _finished(state: ProgramState) -> ProgramState:
    state.error()
    return state
