"""BaseBackend: what a program calls of a model. A backend of your own overrides ``generate``."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.chat_template import ChatTemplate, get_chat_template
from radixlm.lang.choices import ChoicesDecision, ChoicesSamplingMethod

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams, SglSelect

Done = Callable[..., None]
"""Called with a result, or with None and an exception."""


@cache
def _pool() -> ThreadPoolExecutor:
    """The threads in which backends without an event loop wait."""
    return _new_pool(max(96, 16 * (os.cpu_count() or 1)))


def _new_pool(count: int) -> ThreadPoolExecutor:
    pool: ThreadPoolExecutor = load("concurrent.futures:ThreadPoolExecutor")(
        count, thread_name_prefix="program-call"
    )
    return pool


class BaseBackend:
    """Names and defaults as in SGLang. ``is_immediate``: calls return at once, so that they run in
    the thread that makes them."""

    is_immediate = False
    is_chat_model = False
    support_concate_and_append = False

    def __init__(self) -> None:
        self.chat_template: ChatTemplate = get_chat_template("default")

    def get_model_name(self) -> str:
        raise NotImplementedError

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        """The text that follows ``s.text_`` (or ``s.messages_``), a list of n texts for n > 1, and
        its meta_info."""
        raise NotImplementedError

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        """The same piece by piece."""
        raise NotImplementedError

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        raise NotImplementedError

    # ---- how a program waits for them ------------------------------------------------------

    def start(self, work: Callable[[], Any], done: Done, *, waits: bool = False) -> None:
        """Call ``work``, then ``done`` with its result or its exception. Work that ``waits`` for
        other calls gets a thread of its own: they need those of the pool."""
        if self.is_immediate:
            try:
                result = work()
            except Exception as error:
                done(None, error)
            else:
                done(result)
            return
        pool = _new_pool(1) if waits else _pool()
        future = pool.submit(contextvars.copy_context().run, work)
        future.add_done_callback(lambda ended: tell(ended, done))
        if waits:
            pool.shutdown(wait=False)

    def start_generate(self, s: StreamExecutor, params: SglSamplingParams, done: Done) -> None:
        """Begin ``generate``; a backend with an event loop overrides it."""
        self.start(lambda: self.generate(s, sampling_params=params), done)

    def start_stream(
        self,
        s: StreamExecutor,
        params: SglSamplingParams,
        add: Callable[[str, Any], None],
        done: Done,
    ) -> None:
        """Begin ``generate_stream``, whose pieces ``add`` gets."""

        def work() -> None:
            for text, meta_info in self.generate_stream(s, sampling_params=params):
                add(text, meta_info)

        self.start(work, done)

    def start_select(self, s: StreamExecutor, expr: SglSelect, done: Done) -> None:
        args = (s, expr.choices, expr.temperature, expr.choices_method)
        self.start(lambda: self.select(*args), done)

    # ---- chat backends that answer a turn by one call (num_api_spec_tokens) -----------------

    def spec_fill(self, s: StreamExecutor, value: str) -> None:
        raise NotImplementedError

    def spec_gen(self, s: StreamExecutor, params: SglSamplingParams, name: str) -> None:
        raise NotImplementedError

    def role_end_generate(self, s: StreamExecutor) -> None:
        raise NotImplementedError

    # ---- hooks that most backends do not need ----------------------------------------------

    def cache_prefix(self, prefix_str: str) -> None:
        """Have the server compute a text that many requests will begin with."""

    def begin_program(self, s: StreamExecutor) -> None: ...

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None: ...

    def shutdown(self) -> None: ...

    def flush_cache(self) -> Any: ...

    def get_server_info(self) -> Any: ...


def tell(future: Future[Any], done: Done, read: Callable[[Any], Any] = lambda it: it) -> None:
    """Pass on how a future has ended: what ``read`` makes of its result, or an exception."""
    error = future.exception() if not future.cancelled() else RuntimeError("the call was cancelled")
    result = None
    if error is None:
        try:
            result = read(future.result())
        except Exception as failed:
            error = failed
    if error is not None:
        done(None, error)
    else:
        done(result)
