"""ProgramState, the ``s`` of a program, and the group of states that ``fork`` gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from radixlm.base.lazy import load
from radixlm.lang.executor import StreamExecutor
from radixlm.lang.ir import (
    SglConcateAndAppend,
    SglExpr,
    SglExprList,
    SglRoleBegin,
    SglRoleEnd,
    SglVarScopeBegin,
    SglVarScopeEnd,
    parts,
)
from radixlm.lang.trace import Trace, make_trace


class ProgramState:
    """What a program appends to and reads from. Reading waits for what is read; it raises
    ProgramError if that has failed."""

    ret_value: Any = None  # what the program's function has returned

    def __init__(self, stream_executor: StreamExecutor) -> None:
        self.stream_executor = stream_executor

    def __iadd__(self, other: SglExpr | str) -> ProgramState:
        if other is None:
            raise ValueError("Tried to append None to state.")
        self.stream_executor.submit(other)
        return self

    @overload
    def _role(self, name: str, expr: None) -> AbstractContextManager[None]: ...
    @overload
    def _role(self, name: str, expr: SglExpr | str) -> SglExprList: ...
    def _role(
        self, name: str, expr: SglExpr | str | None
    ) -> SglExprList | AbstractContextManager[None]:
        if expr is None:
            return self._scope(SglRoleBegin(name), SglRoleEnd(name))
        message = SglExprList([SglRoleBegin(name), *parts(expr), SglRoleEnd(name)])
        self.stream_executor.submit(message)
        return message

    @contextmanager
    def _scope(self, begin: SglExpr, end: SglExpr) -> Iterator[None]:
        self.stream_executor.submit(begin)
        yield
        self.stream_executor.submit(end)

    def system(self, expr: SglExpr | str | None = None) -> Any:
        """Append a system message; without ``expr`` a context manager around its parts."""
        return self._role("system", expr)

    def user(self, expr: SglExpr | str | None = None) -> Any:
        """The same of a user message."""
        return self._role("user", expr)

    def assistant(self, expr: SglExpr | str | None = None) -> Any:
        """The same of an assistant's message."""
        return self._role("assistant", expr)

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """The text appended inside of it becomes the variable ``name``."""
        return self._scope(SglVarScopeBegin(name), SglVarScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> ProgramStateGroup:
        """``size`` states that go on from here."""
        children = self.stream_executor.fork(size, position_ids_offset)
        return ProgramStateGroup([type(self)(child) for child in children], self)

    @contextmanager
    def copy(self, position_ids_offset: Any = None) -> Iterator[ProgramState]:
        """One fork, whose variables are gathered at the end."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    def text(self) -> str:
        """All text, with what stands around roles."""
        return self.stream_executor.text()

    def messages(self) -> list[dict[str, Any]]:
        """The messages that have ended, in OpenAI's form."""
        return self.stream_executor.messages()

    def sync(self) -> None:
        """Wait for all calls."""
        self.stream_executor.sync()

    def error(self) -> BaseException | None:
        """The first error, after all calls are over; never raises."""
        return self.stream_executor.error()

    def get_var(self, name: str) -> Any:
        return self.stream_executor.get_var(name)

    def set_var(self, name: str, value: Any) -> None:
        self.stream_executor.set_var(name, value)

    def get_meta_info(self, name: str) -> Any:
        """What the server told of the call: tokens, log-probabilities, the reason of its end."""
        return self.stream_executor.get_meta_info(name)

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self.stream_executor.variables

    def __repr__(self) -> str:
        self.stream_executor.error()
        return f"ProgramState({self.stream_executor.text_})"

    def trace(self) -> Trace:
        """What the program has called so far, its forks too."""
        return make_trace(self.stream_executor, self.stream_executor.program)

    # ---- streams ---------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or a variable, as it comes; all at once unless the program streams. Raises at
        the end what has failed."""
        executor = self.stream_executor
        if not executor.stream:
            yield self.text() if var_name is None else self.get_var(var_name)
            return
        tail = Tail(executor, var_name)
        while not tail.is_over:
            executor.wait_change(tail.has_more)
            if piece := tail.take():
                yield piece
        executor.raise_error()

    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """``text_iter`` for a program with an event loop; with ``return_meta_data`` pairs of a
        piece and the call's meta_info, with the log-probabilities so far, or of a server with
        --incremental-streaming-output with the new ones."""
        pieces: AsyncIterator[Any] = load("radixlm.lang.awaiting:pieces")(
            self.stream_executor, var_name, return_meta_data
        )
        return pieces


class Tail:
    """What has come of a text since it was last asked."""

    def __init__(
        self, executor: StreamExecutor, var_name: str | None, is_stream: bool = True
    ) -> None:
        self._executor, self._name, self._is_stream = executor, var_name, is_stream
        self._length = 0
        self.is_over = False

    def _is_complete(self) -> bool:
        one = self._executor
        return one.is_finished or (self._name is not None and one.has_all_of(self._name))

    def _text(self) -> str:
        if self._name is None:
            return self._executor.text_
        streamed = self._executor.streamed.get(self._name)
        return str(self._executor.variables.get(self._name, "")) if streamed is None else streamed

    def has_more(self) -> bool:
        return len(self._text()) > self._length or self._is_complete()

    def take(self) -> str:
        is_complete = self._is_complete()  # before the text is read, which may grow
        if not is_complete and not self._is_stream:
            return ""
        piece = self._text()[self._length :]
        self._length += len(piece)
        self.is_over = is_complete
        return piece


class ProgramStateGroup:
    def __init__(
        self, states: Sequence[ProgramState], src_state: ProgramState | None = None
    ) -> None:
        self.states, self.src_state = list(states), src_state

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all states. "gather_variable": their new variables become lists of the parent.
        "concate_and_append": their texts since the fork are appended to the parent's in order."""
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"Invalid join mode: {mode}")
        assert self.src_state is not None
        for state in self.states:
            state.sync()
        if mode == "concate_and_append":
            self.src_state.stream_executor.submit(SglConcateAndAppend(self.states))
            self.src_state.sync()
        else:
            own = self.src_state.stream_executor.variables
            kept = set(own)
            for state in self.states:
                for name, value in state.stream_executor.variables.items():
                    if name not in kept:
                        own.setdefault(name, []).append(value)
        for state in self.states:
            state.stream_executor.end()

    async def ajoin(self, mode: str = "gather_variable") -> None:
        """``join`` for an ``async def`` program."""
        for state in (*self.states, self.src_state):
            await state.settled()  # type: ignore[union-attr]
        self.join(mode)

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        if self.states[index] is not value:  # what `group[i] += ...` assigns
            raise ValueError("a state of a group cannot be replaced; append to it with +=")

    def __iadd__(
        self, other: SglExpr | str | Sequence[SglExpr | str] | Callable[[int], SglExpr | str]
    ) -> ProgramStateGroup:
        """Append to each: the same expression, the one of a list, or what a function of the state's
        number gives."""
        for index in range(len(self.states)):
            if callable(other):
                self.states[index] += other(index)
            elif isinstance(other, list | tuple):
                self.states[index] += other[index]
            elif isinstance(other, SglExpr | str):
                self.states[index] += other
            else:
                raise ValueError(f"Invalid value: {other}")
        return self
