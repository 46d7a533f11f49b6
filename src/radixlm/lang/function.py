"""SglFunction: a program, and how it is run, many at once, or traced."""

from __future__ import annotations

import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from radixlm.lang.executor import StreamExecutor
from radixlm.lang.global_config import backend_of, global_config
from radixlm.lang.ir import SglSamplingParams
from radixlm.lang.state import ProgramState
from radixlm.lang.tracer import TracerProgramState, TracingScope, trace_prefix, trace_program

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
}


class SglFunction:
    """A function whose first parameter is the state ``s``."""

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        spec = inspect.getfullargspec(func)
        assert spec.args and spec.args[0] == "s", 'The first argument must be "s"'
        self.func, self.num_api_spec_tokens = func, num_api_spec_tokens
        self.bind_arguments = dict(bind_arguments or {})
        self.arg_names, self.arg_defaults = spec.args[1:], list(spec.defaults or ())
        self.__name__, self.__doc__ = getattr(func, "__name__", "program"), func.__doc__

    run_parameters = _SAMPLING
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
        temperature, stop ...) are for calls that name none; all other arguments are the function's.
        With ``stream`` it runs in a thread, and this returns at once. ``use_thread`` changes
        nothing."""
        params, rest = _split(kwargs)
        state = self._state(backend, rest, params, stream)
        if not stream:
            self._call(state, args, rest)
            return state

        name = f"program {self.__name__}"
        thread = threading.Thread(
            target=self._call, args=(state, args, rest), name=name, daemon=True
        )
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
        assert isinstance(batch_kwargs, list | tuple)
        params, rest = _split(kwargs)
        if rest:
            raise TypeError(f"run_batch() got an unexpected keyword argument {min(rest)!r}")
        batch = [self._arguments(one) for one in batch_kwargs]
        count = max(96, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else int(num_threads)
        states = self._run_all(batch, params, backend, min(count, len(batch)))
        shown = tqdm(states, total=len(batch), disable=not progress_bar, unit="program")
        if generator_style:
            return iter(shown)
        return list(shown)

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

    def _state(
        self, backend: Any, arguments: dict[str, Any], params: SglSamplingParams, stream: bool
    ) -> ProgramState:
        found = backend_of(backend)
        executor = StreamExecutor(found, arguments, params, None, stream, self.num_api_spec_tokens)
        found.begin_program(executor)
        return ProgramState(executor)

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
        params: SglSamplingParams,
        backend: Any,
        count: int,
    ) -> Iterator[ProgramState]:
        """The states in order, each when its calls are over. A function that waits for none of its
        calls needs no thread of its own while they go on."""
        found = backend_of(backend)

        def run(arguments: dict[str, Any]) -> ProgramState:
            state = self._state(found, arguments, params, False)
            self._call(state, (), arguments)
            return state

        if count <= 1 or found.is_immediate:
            yield from (_finished(run(arguments)) for arguments in batch)
            return
        ahead: deque[Future[ProgramState]] = deque()
        with ThreadPoolExecutor(count, thread_name_prefix="program") as pool:
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


def _split(kwargs: dict[str, Any]) -> tuple[SglSamplingParams, dict[str, Any]]:
    """Sampling parameters, and the function's own arguments."""
    own = {name: value for name, value in kwargs.items() if name in _SAMPLING}
    named = {name: value for name, value in own.items() if value is not None}
    return SglSamplingParams(**named), {k: v for k, v in kwargs.items() if k not in own}
