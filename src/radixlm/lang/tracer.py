"""Tracing: what a program would append, as a graph of expressions, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from radixlm.lang.ir import (
    SglArgument,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglFork,
    SglGen,
    SglGetForkItem,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglVariable,
    SglVarScopeBegin,
    SglVarScopeEnd,
    parts,
)
from radixlm.lang.state import ProgramState, ProgramStateGroup

if TYPE_CHECKING:
    from radixlm.lang.backend.base_backend import BaseBackend
    from radixlm.lang.function import SglFunction


class StopTracing(Exception):
    """The constant prefix has ended."""


class TracerProgramState(ProgramState):
    """Takes a program's expressions; ``nodes`` are those of this state, ``variables`` what stands
    for their values."""

    def __init__(
        self, backend: BaseBackend, arguments: dict[str, Any], only_trace_prefix: bool = False
    ) -> None:
        self.backend, self.arguments = backend, arguments
        self.only_trace_prefix = only_trace_prefix
        self.chat_template = backend.get_chat_template()
        self.nodes: list[SglExpr] = []
        self.last_node: SglExpr | None = None
        self.variables: dict[str, SglVariable] = {}
        self.messages_: list[dict[str, Any]] = []
        self.cur_role: str | None = None
        self.child_states: list[TracerProgramState] = []
        self._scopes: dict[str, SglExpr | None] = {}
        scope = TracingScope.get_current_scope()
        while scope is not None:
            scope.tracer_state.child_states.append(self)
            scope = scope.outer

    def __iadd__(self, other: SglExpr | str) -> TracerProgramState:
        for expr in parts(other):
            self._take(expr)
        return self

    def _role(self, name: str, expr: Any) -> Any:
        if expr is None:
            return self._traced_scope(name)
        message = SglExprList([SglRoleBegin(name), *parts(expr), SglRoleEnd(name)])
        self.__iadd__(message)
        return message

    @contextmanager
    def _traced_scope(self, name: str) -> Iterator[None]:
        self._take(SglRoleBegin(name))
        yield
        self._take(SglRoleEnd(name))

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        self._take(SglVarScopeBegin(name))
        yield
        self._take(SglVarScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> ProgramStateGroup:
        assert size >= 1
        if self.only_trace_prefix:
            raise StopTracing
        fork = SglFork(size, position_ids_offset)
        fork.prev_node = self.last_node
        states = []
        for index in range(size):
            state = TracerProgramState(self.backend, self.arguments)
            item = SglGetForkItem(index)
            item.prev_node = fork
            state.last_node, state.variables = item, dict(self.variables)
            state.messages_, state.cur_role = list(self.messages_), self.cur_role
            states.append(state)
        return ProgramStateGroup(states, self)

    def get_var(self, name: str) -> Any:
        """An argument, or what stands for a variable's value."""
        known = self.arguments.get(name)
        if known is not None:
            return known
        variable = self.variables[name]
        return SglVariable(variable.name, variable.source)

    def set_var(self, name: str, value: Any) -> None:
        self.variables[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.variables

    def __repr__(self) -> str:
        return f"TracerProgramState({self.nodes})"

    def flatten_nodes(self) -> list[SglExpr]:
        """The expressions in order."""
        return [one for node in self.nodes for one in parts(node)]

    def _take(self, expr: SglExpr) -> None:
        match expr:
            case SglRoleBegin():
                self._begin_role(expr.role)
            case SglRoleEnd():
                self._append(SglConstantText(self._around(expr.role)[1]))
                self.messages_.append({"role": expr.role, "content": ""})
                self.cur_role = None
            case SglVarScopeBegin():
                self._scopes[expr.name] = self.last_node
            case SglVarScopeEnd():
                self.variables[expr.name] = SglVariable(expr.name, self.last_node)
            case SglGen() | SglSelect():
                kind = "gen" if isinstance(expr, SglGen) else "select"
                name = expr.name if expr.name is not None else f"{kind}_{len(self.variables)}"
                self.variables[name] = SglVariable(name, expr)
                self._append(expr)
            case SglConstantText():
                self._append(expr)
            case _:
                if self.only_trace_prefix:
                    raise StopTracing
                self._append(expr)

    def _begin_role(self, role: str) -> None:
        assert self.cur_role is None, "Nested roles are not allowed."
        default = self.chat_template.default_system_prompt
        if not self.messages_ and role != "system" and default:
            for expr in (SglRoleBegin("system"), SglConstantText(default), SglRoleEnd("system")):
                self._take(expr)
        self.cur_role = role
        self._append(SglConstantText(self._around(role)[0]))

    def _around(self, role: str) -> tuple[str, str]:
        return self.chat_template.get_prefix_and_suffix(role, self.messages_)

    def _append(self, expr: SglExpr) -> None:
        self.nodes.append(expr)
        expr.prev_node, self.last_node = self.last_node, expr


class TracingScope:
    """Programs that are called inside of it are traced, too."""

    _current: ContextVar[TracingScope | None] = ContextVar("tracing", default=None)

    def __init__(self, tracer_state: TracerProgramState) -> None:
        self.tracer_state = tracer_state
        self.outer = self._current.get()

    def __enter__(self) -> TracingScope:
        self._token = self._current.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._current.reset(self._token)

    @classmethod
    def get_current_scope(cls) -> TracingScope | None:
        return cls._current.get()


def trace_program(
    program: SglFunction, arguments: dict[str, Any], backend: BaseBackend
) -> TracerProgramState:
    """Run a program's function with placeholders for the arguments that are not given."""
    unknown = {name: SglArgument(name) for name in program.arg_names if name not in arguments}
    known = {**arguments, **unknown, **program.bind_arguments}
    state = TracerProgramState(backend, known)
    with TracingScope(state):
        state.ret_value = program.func(state, **known)
    return state


def trace_prefix(program: SglFunction, backend: BaseBackend) -> str:
    """The constant text that every run of a program begins with. Its function is called once, with
    placeholders."""
    arguments = {name: SglArgument(name) for name in program.arg_names} | program.bind_arguments
    state = TracerProgramState(backend, arguments, only_trace_prefix=True)
    try:
        with TracingScope(state):
            program.func(state, **arguments)
    except (StopTracing, TypeError, AttributeError):
        pass  # what depends on an argument is no prefix
    prefix = ""
    for node in state.flatten_nodes():
        if not isinstance(node, SglConstantText):
            break
        prefix += node.value
    return prefix
