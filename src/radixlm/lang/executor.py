"""StreamExecutor: what a program has appended so far, and the calls that it waits for.

Expressions take effect in the thread that appends them, at once, until one must wait for its
backend. Those behind it are queued, and the thread in which the answer arrives goes on with them.
So no program has a thread of its own.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from radixlm.lang import calls
from radixlm.lang.budget import Budget, ProgramError
from radixlm.lang.ir import (
    SglConcateAndAppend,
    SglConstantText,
    SglExpr,
    SglGen,
    SglImage,
    SglRoleBegin,
    SglRoleEnd,
    SglSamplingParams,
    SglSelect,
    SglSeparateReasoning,
    SglTemplate,
    SglToolLoop,
    SglVariable,
    SglVarScopeBegin,
    SglVarScopeEnd,
    SglVideo,
    parts,
    reasoning_name,
)
from radixlm.lang.media import encode_image, encode_video
from radixlm.lang.trace import CallRecord
from radixlm.text.reasoning.base import split_all
from radixlm.text.reasoning.registry import create

if TYPE_CHECKING:
    import asyncio

    from radixlm.lang.backend.base_backend import BaseBackend
    from radixlm.lang.chat_template import ChatTemplate

log = logging.getLogger(__name__)
_IDS = itertools.count()


Span = tuple[int, int, Sequence[int]]
"""Characters [start, end) of a state's text, and the token ids that made them."""


class _Fork(SglExpr):
    """The states that begin with what is there when this expression has its turn."""

    def __init__(self, children: list[StreamExecutor]) -> None:
        super().__init__()
        self.children = children


class StreamExecutor:
    """One state of a program. ``use_thread`` false: appending waits, and raises what fails. What
    ends with an underscore is for backends: media are (path, base64), messages as OpenAI's."""

    def __init__(
        self,
        backend: BaseBackend,
        arguments: dict[str, Any],
        default_sampling_para: SglSamplingParams,
        chat_template: ChatTemplate | None = None,
        stream: bool = False,
        num_api_spec_tokens: int | None = None,
        use_thread: bool = True,
        is_busy: bool = False,
        parent: StreamExecutor | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.sid = f"state-{next(_IDS)}"
        # of the whole program: shared with its forks
        self.calls: list[CallRecord] = parent.calls if parent else []
        self.states: list[tuple[str, str | None]] = parent.states if parent else []
        self.states.append((self.sid, parent.sid if parent else None))
        self.program: str = parent.program if parent else ""
        self.budget: Budget | None = parent.budget if parent else budget
        self.backend, self.arguments, self.stream = backend, arguments, stream
        self.default_sampling_para = default_sampling_para
        self.chat_template = chat_template or backend.get_chat_template()
        self.num_api_spec_tokens, self.use_thread = num_api_spec_tokens, use_thread
        self.variables: dict[str, Any] = {}
        self.meta_info: dict[str, Any] = {}
        self.streamed: dict[str, str] = {}  # texts of variables, before they are parsed
        self.text_ = self.speculated_text = ""
        self.messages_: list[dict[str, Any]] = []
        self.spans: list[Span] = []  # parts of the text whose token ids are known
        self.images_: list[tuple[Any, str]] = []
        self.cur_images: list[tuple[Any, str]] = []
        self.cur_role: str | None = None
        self.cur_role_begin_pos = self.fork_start_text_pos = 0
        self.error_: BaseException | None = None
        self.api_spec: list[Any] = []  # of a chat backend that speculates
        self._scopes: dict[str, int] = {}
        self._queue: deque[SglExpr] = deque()
        self._coming: Counter[str] = Counter()  # variables that queued expressions will set
        self.unnamed = itertools.count()
        self._busy, self._ended = is_busy, False
        self.thread: threading.Thread | None = None  # of the function of a program that streams
        self._outer: threading.Thread | None = None  # the same, of a fork's program
        self._children: WeakSet[StreamExecutor] | None = None  # made by the first fork
        self.lock = threading.RLock()
        self._changed: threading.Condition | None = None  # made by the first who waits
        self._listeners: list[Callable[[], None]] = []

    # ---- for the program's thread ----------------------------------------------------------

    def submit(self, expr: SglExpr | str) -> None:
        """Append. After an error nothing takes effect any more."""
        found = parts(expr)
        with self.lock:
            if self.error_ is not None:
                return
            self._queue += found
            for one in found:
                if type(one) in _SETTING:
                    self._coming.update(_sets(one, self.stream))
            if self._busy:
                return
            self._busy = True
        self._advance()
        if not self.use_thread:
            self.sync()

    def sync(self) -> None:
        """Wait until everything has taken effect. ProgramError if something failed."""
        self._wait(lambda: self.is_idle)
        self.raise_error()

    def get_var(self, name: str) -> Any:
        """A variable's value, when it is there. KeyError if nothing sets it, ProgramError if what
        sets it has failed."""
        self._wait(lambda: self.is_known(name))
        if name not in self.variables:
            self.raise_error()
        return self.variables[name]

    def is_known(self, name: str) -> bool:
        """Whether a variable has its value, or nothing will set it."""
        return not self._coming[name] and (name in self.variables or self._is_over())

    def set_var(self, name: str, value: Any) -> None:
        with self.lock:
            self.variables[name] = value
            self.notify()

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What the backend has told of the call that set a variable, None if nothing."""
        if not self._wait(lambda: not self._coming[name], timeout):
            raise TimeoutError(f"Timeout while waiting for event '{name}'")
        if name not in self.meta_info:
            self.raise_error()
        return self.meta_info.get(name)

    def text(self) -> str:
        self.sync()
        return self.text_

    def messages(self) -> list[dict[str, Any]]:
        self.sync()
        return self.messages_

    def error(self) -> BaseException | None:
        """The first error, None if there is none so far."""
        self._wait(lambda: self.is_idle)
        return self.error_

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> list[StreamExecutor]:
        """States that begin with what has been appended until now."""
        children = [
            StreamExecutor(
                self.backend,
                self.arguments,
                self.default_sampling_para,
                self.chat_template,
                self.stream,
                self.num_api_spec_tokens,
                is_busy=True,
                parent=self,
            )
            for _ in range(int(size))
        ]
        with self.lock:  # `end` ends them, too
            children_of = self._children = self._children or WeakSet()
            for child in children:
                child._outer, child._ended = self.thread or self._outer, self._ended
                children_of.add(child)
        self.submit(_Fork(children))
        if self.error_ is not None:
            self.fail(self.error_, children)
        return children

    def end(self) -> None:
        """Nothing more will be appended."""
        with self.lock:
            if self._ended:
                return
            self._ended = True
            children = list(self._children or ())
            self.notify()
        for child in children:
            child.end()
        self.backend.end_program(self)

    @property
    def is_finished(self) -> bool:
        is_own = (self.thread or self._outer) in (None, threading.current_thread())
        return self.error_ is not None or (not self._busy and (is_own or self._ended))

    def wait_change(self, is_done: Callable[[], bool]) -> None:
        """Wait until ``is_done``, or nothing is to come."""
        self._wait(lambda: is_done() or self.is_finished)

    def has_all_of(self, name: str) -> bool:
        """Whether a variable that is streamed is complete."""
        return name in self.variables and not self._coming[name]

    def listen(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
        """Set ``event`` at each change; the function that ends this."""

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(event.set)

        def stop() -> None:
            with self.lock:
                self._listeners.remove(tell)

        with self.lock:
            self._listeners.append(tell)
        tell()
        return stop

    @property
    def is_idle(self) -> bool:
        """Nothing is left to be done, and nothing will be appended by another thread."""
        return self.error_ is not None or (not self._busy and self._is_over())

    def _is_over(self) -> bool:
        """Whether the program's function will append nothing while this thread waits."""
        is_own = self.thread in (None, threading.current_thread())
        return is_own or self._ended or self.error_ is not None

    def _wait(self, is_done: Callable[[], bool], timeout: float | None = None) -> bool:
        with self.lock:
            if is_done():
                return True
            if self._changed is None:
                self._changed = threading.Condition(self.lock)
            return self._changed.wait_for(is_done, timeout)

    def raise_error(self) -> None:
        """ProgramError if something has failed."""
        if self.error_ is not None:
            kind = type(self.error_).__name__
            raise ProgramError(f"{kind}: {self.error_}") from self.error_

    def notify(self) -> None:
        """Called with the lock."""
        if self._changed is not None:
            self._changed.notify_all()
        for tell in self._listeners:
            tell()

    # ---- one expression after the other ----------------------------------------------------

    def _advance(self) -> None:
        """Let queued expressions take effect until one waits. The caller has set ``_busy``."""
        while True:
            try:
                expr = self._queue.popleft()
            except IndexError:
                with self.lock:
                    if self._queue:
                        continue  # appended since
                    self._busy = False
                    self.notify()
                    return
            try:
                take = _TAKES.get(type(expr))
                if take is None:
                    raise TypeError(f"{type(expr).__name__} cannot be appended")
                if take(self, expr):
                    return
            except BaseException as error:  # KeyboardInterrupt leaves no reader waiting either
                self.fail(error, expr.children if isinstance(expr, _Fork) else ())
                if not isinstance(error, Exception):
                    raise
                return

    def fail(self, error: BaseException, children: Sequence[StreamExecutor] = ()) -> None:
        """End with ``error``, and with it the forks that have not begun."""
        with self.lock:
            children = [
                *children,
                *(c for e in self._queue if isinstance(e, _Fork) for c in e.children),
            ]
            if self.error_ is None:
                self.error_ = error
                log.warning("a program failed: %s: %s", type(error).__name__, error)
            self._queue.clear()
            self._coming.clear()
            self._busy = False
            self.notify()
        for child in children:
            child.fail(error)

    def call(
        self,
        start: Callable[[Callable[..., None]], None],
        apply: Callable[[Any], None],
        record: CallRecord | None = None,
    ) -> bool:
        """Start a call of the backend; ``apply`` gets its result. Whether it goes on later, in the
        thread in which the result arrives. ``record``: tells of it in the trace."""
        has_returned = is_done = False
        if record is not None:
            self.calls.append(record)

        def done(result: Any, error: BaseException | None = None) -> None:
            nonlocal is_done
            if record is not None:
                record.end(error)
            if error is None:
                try:
                    apply(result)
                except Exception as caught:
                    error = caught
            if error is not None:
                self.fail(error)
            with self.lock:
                is_done, is_later = True, has_returned
            if is_later and error is None:
                self._advance()

        start(done)
        with self.lock:
            has_returned = True
            return not is_done or self.error_ is not None

    def assign(self, name: str, value: Any, meta_info: Any = None) -> None:
        with self.lock:
            self.variables[name] = value
            if meta_info is not None:
                self.meta_info[name] = meta_info
            if self._coming[name]:  # none after an error, when an answer still arrives
                self._coming[name] -= 1
            self.notify()

    def _begin_as(self, parent: StreamExecutor) -> None:
        self.variables, self.meta_info = dict(parent.variables), dict(parent.meta_info)
        self.text_, self.messages_ = parent.text_, list(parent.messages_)
        self.spans = list(parent.spans)
        self.cur_role, self.cur_role_begin_pos = parent.cur_role, parent.cur_role_begin_pos
        self.images_, self.cur_images = list(parent.images_), list(parent.cur_images)
        self._scopes = dict(parent._scopes)
        self.speculated_text, self.api_spec = parent.speculated_text, list(parent.api_spec)
        self.fork_start_text_pos = len(self.text_)
        self._advance()

    def _fork(self, expr: _Fork) -> None:
        for child in expr.children:
            child._begin_as(self)

    def _join_texts(self, expr: SglConcateAndAppend) -> None:
        states = [state.stream_executor for state in expr.states]
        self._fill("".join(one.text_[one.fork_start_text_pos :] for one in states))

    # ---- texts, roles, media ---------------------------------------------------------------

    def _fill(self, value: Any, is_template: bool = False) -> None:
        value = str(value)
        if not is_template and self.collects:
            self.backend.spec_fill(self, value)
            return
        if self.speculated_text:
            is_speculated = self.speculated_text.startswith(value)
            self.speculated_text = self.speculated_text[len(value) :] if is_speculated else ""
        self.text_ += value

    @property
    def collects(self) -> bool:
        """Whether a chat backend answers the whole turn by one call at its end."""
        if self.num_api_spec_tokens is None:
            return False
        return self.cur_role == "assistant" and self.backend.is_chat_model

    def _begin_role(self, role: str) -> None:
        if self.cur_role is not None:
            raise AssertionError("Nested roles are not allowed.")
        default = self.chat_template.default_system_prompt
        if not self.messages_ and role != "system" and default:
            self._begin_role("system")
            self._fill(default)
            self._close_role("system")
        self.cur_role = role
        self._fill(self.chat_template.get_prefix_and_suffix(role, self.messages_)[0], True)
        self.cur_role_begin_pos = len(self.text_)

    def _end_role(self, role: str) -> bool:
        if not self.collects:
            self._close_role(role)
            return False

        if self.budget is not None:  # the answer tells of no tokens: none are given back
            self.budget.limited(SglSamplingParams(self.num_api_spec_tokens))

        def apply(_: Any) -> None:
            for term in self.api_spec:
                if self._coming[term.name]:
                    self.assign(term.name, term.text)
            self.text_ += "".join(term.text for term in self.api_spec)
            self.api_spec = []
            self._close_role(role)

        def start(done: Callable[..., None]) -> None:
            self.backend.start(lambda: self.backend.role_end_generate(self), done)

        return self.call(start, apply, calls.record_of(self, "turn", role))

    def _close_role(self, role: str) -> None:
        self.cur_role = None
        text = self.text_[self.cur_role_begin_pos :].lstrip()
        self._fill(self.chat_template.get_prefix_and_suffix(role, self.messages_)[1])
        content: Any = text
        if self.cur_images:
            content = [{"type": "text", "text": text}]
            for _, data in self.cur_images:
                url = f"data:image/jpeg;base64,{data}"
                content.append({"type": "image_url", "image_url": {"url": url}})
            self.cur_images = []
        self.messages_.append({"role": role, "content": content})

    def _add_media(self, path: Any, data: str) -> None:
        self.images_.append((path, data))
        self.cur_images.append((path, data))
        self.text_ += self.chat_template.image_token

    def _separate_reasoning(self, expr: SglSeparateReasoning) -> None:
        for name in expr.variables if not self.stream else ():
            message = self.variables[name]
            reasoning, answer = split_all(create(expr.model_type), message)
            self.text_ = self.text_[: self.cur_role_begin_pos] + answer
            self.spans = [span for span in self.spans if span[1] <= self.cur_role_begin_pos]
            self.assign(reasoning_name(name), reasoning)
            self.assign(name, answer)

    def _add_variable(self, expr: SglVariable) -> bool:
        """Not in the thread of a backend's answers, which others wait for."""
        source = expr.source.stream_executor
        work, start = partial(source.get_var, expr.name), self.backend.start
        return self.call(lambda done: start(work, done, waits=True), self._fill)


_TAKES: dict[type[SglExpr], Callable[[StreamExecutor, Any], bool | None]] = {
    SglConstantText: lambda s, e: s._fill(e.value),
    SglGen: calls.generate,
    SglSelect: calls.select,
    SglToolLoop: calls.loop_tools,
    SglTemplate: calls.fill_template,
    SglRoleBegin: lambda s, e: s._begin_role(e.role),
    SglRoleEnd: lambda s, e: s._end_role(e.role),
    SglImage: lambda s, e: s._add_media(e.path, encode_image(e.path)),
    SglVideo: lambda s, e: s._add_media(e.path, encode_video(e.path)),
    SglVariable: StreamExecutor._add_variable,
    SglVarScopeBegin: lambda s, e: s._scopes.__setitem__(e.name, len(s.text_)),
    SglVarScopeEnd: lambda s, e: s.assign(e.name, s.text_[s._scopes[e.name] :]),
    SglSeparateReasoning: StreamExecutor._separate_reasoning,
    SglConcateAndAppend: StreamExecutor._join_texts,
    _Fork: StreamExecutor._fork,
}


_SETTING = {SglGen, SglSelect, SglTemplate, SglToolLoop, SglVarScopeEnd, SglSeparateReasoning}


def _sets(expr: SglExpr, is_stream: bool) -> list[str]:
    """The variables that an expression will set."""
    if isinstance(expr, SglGen | SglSelect | SglToolLoop | SglVarScopeEnd):
        return [expr.name] if expr.name is not None else []
    if isinstance(expr, SglTemplate):
        return [hole.name for hole in expr.holes if hole.name is not None]
    if isinstance(expr, SglSeparateReasoning) and not is_stream:
        return [n for name in expr.variables for n in (name, reasoning_name(name))]
    return []
