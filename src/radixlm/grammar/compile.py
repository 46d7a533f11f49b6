"""Compiles each grammar once, in threads beside the running engine.

The scheduler polls a ``GrammarFuture`` and never waits for a compiler. A grammar that takes too
long is refused and its thread is replaced, because a library call cannot be interrupted.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.base.registry import Registry
from radixlm.grammar.spec import (
    CompiledGrammar,
    GrammarBackend,
    GrammarOptions,
    GrammarSpec,
    Matcher,
    normalize_spec,
    refuse,
)
from radixlm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MAX_STUCK_THREADS = 8
BACKENDS = Registry(
    "--grammar-backend",
    {
        "llguidance": "radixlm.grammar.backends.llguidance:LlguidanceBackend",
        "xgrammar": "radixlm.grammar.backends.xgrammar:XgrammarBackend",
        "outlines": "radixlm.grammar.backends.outlines:OutlinesBackend",
    },
)
# A mask of 32,000 tokens takes 31 us, with xgrammar 150 (bench/grammar.py). For forced text it
# allows the tokens that the tokenizer would produce, xgrammar any that spell the text.
DEFAULT_BACKEND = "llguidance"


def create_backend(
    name: str | None,
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    vocab_size: int,
    options: GrammarOptions | None = None,
) -> GrammarBackend | None:
    """The backend called ``name`` (None is the default), None for "none".

    ``eos_ids`` end an output; ``vocab_size`` is the width of the model's logits.
    """
    if name == "none":
        return None
    maker = BACKENDS.resolve(name or DEFAULT_BACKEND)
    backend: GrammarBackend = maker(tokenizer, eos_ids, vocab_size, options)
    return backend


class GrammarFuture:
    """A grammar that is being compiled, compiled or refused. Shared by all its requests."""

    def __init__(self, spec: GrammarSpec, timeout_s: float) -> None:
        self.spec = spec
        self.was_cached = False
        self._timeout_s = timeout_s
        self._started_s: float | None = None  # time in the queue does not count
        self._done = threading.Event()
        self._grammar: CompiledGrammar | None = None
        self._error: InvalidRequest | None = None
        self.compile_s = 0.0

    @property
    def is_late(self) -> bool:
        """Whether the compiler exceeded its time limit."""
        started = self._started_s
        late = started is not None and time.monotonic() - started > self._timeout_s
        return late and not self._done.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether ``matcher`` returns or raises now."""
        return self._done.is_set() or self.is_late

    def matcher(self) -> Matcher:
        """A matcher for one request, once ``is_ready``. InvalidRequest if the grammar was refused
        or is too slow."""
        return self.grammar().matcher()

    def grammar(self) -> CompiledGrammar:
        """The compiled grammar; errors as for ``matcher``."""
        if self._error is not None:
            raise InvalidRequest(self._error.message, self._error.param)
        if self._grammar is None:
            reason = f"compiling took longer than {self._timeout_s:g} s"
            raise refuse(self.spec.kind, reason)
        return self._grammar

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until ready (offline use and tests); False if ``timeout_s`` passed first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_ready:
            if end is not None and time.monotonic() > end:
                return False
            self._done.wait(0.05)
        return True

    def run(self, compile_: Callable[[GrammarSpec], CompiledGrammar]) -> None:
        """Compile; called by a worker."""
        self._started_s = time.monotonic()
        try:
            grammar = compile_(self.spec)
            for warning in grammar.warnings:
                log.warning("a %s is not enforced in full: %s", self.spec.kind, warning)
            self._grammar = grammar
        except InvalidRequest as error:
            self._error = error
        except Exception as error:  # top of a worker: fail the request, not the thread
            self._error = refuse(self.spec.kind, f"{type(error).__name__}: {error}")
        finally:
            self.compile_s = time.monotonic() - self._started_s
            self._done.set()


class _Worker(threading.Thread):
    """Compiles grammars from the queue until it is dismissed."""

    def __init__(
        self, backend: GrammarBackend, jobs: queue.SimpleQueue[GrammarFuture | None]
    ) -> None:
        super().__init__(name="grammar", daemon=True)  # a stuck compiler must not stop the exit
        self._backend = backend
        self._jobs = jobs
        self.current: GrammarFuture | None = None
        self.is_dismissed = False

    def run(self) -> None:
        """See Thread."""
        while not self.is_dismissed:
            future = self._jobs.get()
            if future is None:
                return
            self.current = future
            future.run(self._backend.compile)
            self.current = None


class GrammarCache:
    """The compiled grammars of one server, least recently used evicted first."""

    def __init__(
        self,
        backend: GrammarBackend,
        max_entries: int = 256,
        num_threads: int = 2,
        timeout_s: float = 30.0,
    ) -> None:
        self._backend = backend
        self._max_entries = max_entries
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._entries: OrderedDict[GrammarSpec, GrammarFuture] = OrderedDict()
        self._jobs: queue.SimpleQueue[GrammarFuture | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._stuck: list[_Worker] = []
        self._lock = threading.Lock()
        self.num_hits = 0
        self.num_requests = 0

    def request(self, spec: GrammarSpec) -> GrammarFuture:
        """The future of a grammar, which a worker compiles if it is new. Overloaded if too many
        compilers are stuck."""
        spec = normalize_spec(spec)
        with self._lock:
            self.num_requests += 1
            future = self._entries.get(spec)
            if future is not None:
                self._entries.move_to_end(spec)
                self.num_hits += 1
                future.was_cached = True
                return future
            self._replace_stuck()
            future = self._entries[spec] = GrammarFuture(spec, self._timeout_s)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            self._jobs.put(future)
            return future

    def clear(self) -> None:
        """Drop all grammars; requests keep theirs."""
        with self._lock:
            self._entries.clear()

    def close(self) -> None:
        """Stop the workers."""
        with self._lock:
            for worker in self._workers:
                worker.is_dismissed = True
                self._jobs.put(None)

    def _replace_stuck(self) -> None:
        self._stuck = [worker for worker in self._stuck if worker.is_alive()]
        for worker in list(self._workers):
            future = worker.current
            if future is not None and future.is_late:
                worker.is_dismissed = True  # it ends when the library returns
                self._workers.remove(worker)
                self._stuck.append(worker)
        if len(self._stuck) >= _MAX_STUCK_THREADS:
            raise Overloaded("too many grammars are still being compiled", retry_after_s=10)
        while len(self._workers) < self._num_threads:
            worker = _Worker(self._backend, self._jobs)
            self._workers.append(worker)
            worker.start()
