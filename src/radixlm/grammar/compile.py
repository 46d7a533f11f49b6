"""Compiles each grammar once, in threads beside the running engine.

The scheduler polls a ``GrammarFuture`` and never waits for a compiler. Each grammar is first tried
in a process that can be killed (``trial.py``): for a quarter of a second, and then, apart from the
others, for as long as a grammar may take. A thread whose library call does not return is replaced.
"""

import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from radixlm.base.errors import InvalidRequest, Overloaded, RequestError
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
from radixlm.grammar.trial import TooSlow, Trial, TrialSetup
from radixlm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MAX_STUCK_THREADS = 8
_MAX_QUEUED = 1024
_MAX_QUEUED_BY_CLIENT = 256
_QUICK_S = 0.25  # of a CPU; ordinary schemas take milliseconds
_STILL_S = 5.0
_IDLE_S = 300.0  # then the processes end
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


def trial_maker(
    name: str | None, tokenizer: Tokenizer, options: GrammarOptions | None = None
) -> Callable[[], Trial] | None:
    """What makes the processes that try grammars; None for outlines, which has its own."""
    name = name or DEFAULT_BACKEND
    if name == "outlines":
        return None
    setup = TrialSetup.of(name, tokenizer, options)
    return lambda: Trial(setup)


class _AwakeClock:
    """Monotonic seconds without those in which this process stood still, as a paused container
    does: of a longer time between two looks _STILL_S count. Whoever waits for a grammar looks each
    second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_s, self._seen_s = 0.0, time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            now_s = time.monotonic()
            self._now_s += min(max(now_s - self._seen_s, 0.0), _STILL_S)
            self._seen_s = now_s
            return self._now_s


_awake_s = _AwakeClock()


class GrammarFuture:
    """A grammar that is queued, compiled or refused. Shared by all its requests."""

    def __init__(self, spec: GrammarSpec, timeout_s: float, queue_timeout_s: float) -> None:
        self.spec = spec
        self.was_cached = False
        self._timeout_s, self._queue_timeout_s = timeout_s, queue_timeout_s
        self._done = threading.Event()
        self._grammar: CompiledGrammar | None = None
        self._error: RequestError | None = None
        self.done_s = 0.0  # when it was compiled or refused, monotonic
        self.is_compiling = False
        self._deadline_s: float | None = None  # of the queue or of the compiler; a trial ends alone
        self.queue()

    def queue(self) -> None:
        """The future waits for a worker from now on."""
        self._deadline_s = _awake_s() + self._queue_timeout_s

    def take(self) -> bool:
        """A worker takes the future from the queue; False if it has waited too long."""
        if self.is_late:
            self._fail(self._late_error())
            return False
        self._deadline_s = None
        return True

    @property
    def is_late(self) -> bool:
        """Whether it has waited too long, or the compiler exceeded its time limit."""
        deadline_s = self._deadline_s
        late = deadline_s is not None and _awake_s() > deadline_s
        return late and not self._done.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether ``matcher`` returns or raises now."""
        return self._done.is_set() or self.is_late

    @property
    def is_worth_another_try(self) -> bool:
        """Whether it failed because the server was busy."""
        return isinstance(self._error, Overloaded) or (self.is_late and not self.is_compiling)

    def matcher(self) -> Matcher:
        """A matcher for one request, once ``is_ready``. InvalidRequest if the grammar was refused
        or is too slow, Overloaded if it was not its turn in time."""
        return self.grammar().matcher()

    def grammar(self) -> CompiledGrammar:
        """The compiled grammar; errors as for ``matcher``."""
        if self._grammar is not None:
            return self._grammar
        error = self._error or self._late_error()
        if isinstance(error, Overloaded):
            raise Overloaded(error.message, retry_after_s=error.retry_after_s)
        raise InvalidRequest(error.message, error.param)

    def _late_error(self) -> RequestError:
        if self.is_compiling:
            return self.too_slow()
        reason = f"the grammar waited {self._queue_timeout_s:g} s for others to be compiled"
        return Overloaded(reason, retry_after_s=10)

    def too_slow(self) -> InvalidRequest:
        """The error for a grammar that exceeds the limit."""
        reason = f"compiling took longer than {self._timeout_s:g} s; simplify it"
        return refuse(self.spec.kind, reason)

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
        self._deadline_s = _awake_s() + self._timeout_s
        self.is_compiling = True
        try:
            grammar = compile_(self.spec)
            for warning in grammar.warnings:
                log.warning("a %s is not enforced in full: %s", self.spec.kind, warning)
            self._grammar = grammar
            self._finish()
        except InvalidRequest as error:
            self._fail(error)
        except Exception as error:  # top of a worker: fail the request, not the thread
            self._fail(refuse(self.spec.kind, f"{type(error).__name__}: {error}"))

    def _fail(self, error: RequestError) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self.done_s = time.monotonic()
        self._done.set()

    def give_up(self) -> None:
        """Others take its place in the queue."""
        self._fail(Overloaded("too many grammars wait to be compiled", retry_after_s=10))

    def attempt(self, trial: Trial, cpu_s: float, is_last: bool) -> bool | None:
        """Try the grammar; called by a worker. Whether it may be compiled here; None: it needs
        longer than ``cpu_s``, and it was not the last attempt."""
        try:
            trial.run(self.spec, cpu_s)
        except TooSlow:
            if not is_last:
                return None
            self._fail(self.too_slow())
            return False
        except RequestError as error:
            self._fail(error)
            return False
        return True


class _Queue:
    """Futures by client. Start-time fair queueing: the client whose grammars have taken the least
    time is next, and who comes back gets no credit for its absence. Clients whose last grammar was
    stopped have one worker together, so that the others find a free one."""

    def __init__(self) -> None:
        self._by_client: dict[str | None, deque[GrammarFuture]] = {}
        self._used_s: dict[str | None, float] = {}
        self._now_s = 0.0  # what the client had used whose grammar was taken last
        self._heavy: set[str | None] = set()  # clients whose last grammar was stopped
        self._heavy_jobs: Counter[str | None] = Counter()
        self._changed = threading.Condition()
        self.is_closed = False

    def put(self, client: str | None, future: GrammarFuture) -> None:
        """Overloaded if the client has too many in the queue. If all together have, the last one of
        the client with the most is refused."""
        with self._changed:
            futures = self._by_client.setdefault(client, deque())
            if not futures:
                self._used_s[client] = max(self._used_s.get(client, 0.0), self._now_s)
            futures.append(future)
            most = max(self._by_client.values(), key=len)
            is_full = sum(map(len, self._by_client.values())) > _MAX_QUEUED
            if len(futures) > _MAX_QUEUED_BY_CLIENT or (is_full and len(futures) == len(most)):
                futures.pop()
                if not futures:
                    del self._by_client[client]
                raise Overloaded("too many grammars wait to be compiled", retry_after_s=10)
            if is_full:
                most.pop().give_up()
            self._changed.notify()

    def get(self, timeout_s: float) -> tuple[str | None, GrammarFuture] | None:
        """The next future and its client; None after ``timeout_s`` or once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._eligible() or self.is_closed, timeout_s)
            eligible = self._eligible()
            if self.is_closed or not eligible:
                return None
            client = min(eligible, key=self._used_s.__getitem__)
            self._now_s = self._used_s[client]
            self._heavy_jobs[client] += client in self._heavy
            futures = self._by_client.pop(client)
            future = futures.popleft()
            if futures:
                self._by_client[client] = futures  # at the end
            return client, future

    def _eligible(self) -> list[str | None]:
        if not self._heavy_jobs.total():
            return list(self._by_client)
        return [client for client in self._by_client if client not in self._heavy]

    def charge(self, client: str | None, seconds: float, was_stopped: bool) -> None:
        """The client's grammar has been taken, and took so long."""
        with self._changed:
            if self._heavy_jobs[client]:
                self._heavy_jobs[client] -= 1
            (self._heavy.add if was_stopped else self._heavy.discard)(client)
            self._changed.notify_all()
            self._used_s[client] = self._used_s.get(client, 0.0) + seconds
            if len(self._used_s) > _MAX_QUEUED:
                ahead = {k: s for k, s in self._used_s.items() if s > self._now_s}
                self._used_s = {k: self._used_s[k] for k in self._by_client} | ahead
                self._heavy &= self._used_s.keys()
                self._heavy_jobs = +self._heavy_jobs

    def close(self) -> None:
        """Let every waiting worker end."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class _Worker(threading.Thread):
    """Compiles grammars from its queue until it is dismissed. ``slow``: the queue for what
    takes longer than that; None: this worker has that queue."""

    def __init__(
        self,
        backend: GrammarBackend,
        trial: Trial | None,
        jobs: _Queue,
        slow: _Queue | None,
        timeout_s: float,
    ) -> None:
        super().__init__(name="grammar", daemon=True)  # a stuck compiler must not stop the exit
        self._backend = backend
        self._trial = trial
        self._jobs, self._slow = jobs, slow
        self._timeout_s = timeout_s
        self.current: GrammarFuture | None = None
        self.is_dismissed = False

    def run(self) -> None:
        """See Thread."""
        try:
            while not self.is_dismissed:
                job = self._jobs.get(_IDLE_S)
                if job is not None:
                    began_s = time.monotonic()
                    was_stopped = self._do(*job)
                    self._jobs.charge(job[0], time.monotonic() - began_s, was_stopped)
                elif self._jobs.is_closed:
                    return
                elif self._trial is not None:
                    self._trial.close()
        finally:
            if self._trial is not None:
                self._trial.close()

    def _do(self, client: str | None, future: GrammarFuture) -> bool:
        """Whether the grammar was stopped, for want of time."""
        if not future.take():
            return False
        if self._trial is not None:
            cpu_s = self._timeout_s if self._slow is None else _QUICK_S
            may_compile = future.attempt(self._trial, cpu_s, is_last=self._slow is None)
            if may_compile is None and self._slow is not None:
                future.queue()
                try:
                    self._slow.put(client, future)
                except Overloaded:
                    future.give_up()
            if not may_compile:
                return may_compile is None
        self.current = future
        future.run(self._backend.compile)
        self.current = None
        return False


class GrammarCache:
    """The compiled grammars of one server, least recently used evicted first. Its workers end when
    it is closed or collected."""

    def __init__(
        self,
        backend: GrammarBackend,
        max_entries: int = 256,
        num_threads: int = 2,
        timeout_s: float = 20.0,
        queue_timeout_s: float = 30.0,
        make_trial: Callable[[], Trial] | None = None,
    ) -> None:
        self._backend = backend
        self._max_entries = max_entries
        self._num_threads = num_threads
        self._timeout_s, self._queue_timeout_s = timeout_s, queue_timeout_s
        self._make_trial = make_trial
        self._entries: OrderedDict[tuple[str | None, GrammarSpec], GrammarFuture] = OrderedDict()
        self._jobs, self._slow_jobs = _Queue(), _Queue()
        self._workers: list[_Worker] = []
        self._slow_worker: _Worker | None = None
        self._stuck: list[_Worker] = []
        self._lock = threading.Lock()
        for queue in (self._jobs, self._slow_jobs):  # the workers of a forgotten cache end
            weakref.finalize(self, queue.close)
        self.num_hits = 0
        self.num_requests = 0

    def request(
        self, spec: GrammarSpec, client: str | None = None, tenant: str | None = None
    ) -> GrammarFuture:
        """The future of a grammar, which a worker compiles if it is new. Overloaded if too many
        compilers are stuck or too many grammars queued. ``client``: clients take turns; ``tenant``:
        tenants share no grammars."""
        spec = normalize_spec(spec)
        key = tenant, spec
        with self._lock:
            self.num_requests += 1
            future = self._entries.get(key)
            if future is not None and not future.is_worth_another_try:
                self._entries.move_to_end(key)
                self.num_hits += 1
                future.was_cached = True
                return future
            self._start_workers()
            future = GrammarFuture(spec, self._timeout_s, self._queue_timeout_s)
            self._jobs.put(client, future)
            self._entries[key] = future
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            return future

    def clear(self) -> None:
        """Drop all grammars; requests keep theirs."""
        with self._lock:
            self._entries.clear()

    def close(self) -> None:
        """Stop the workers and their processes."""
        with self._lock:
            for worker in self._all_workers():
                worker.is_dismissed = True
            self._jobs.close()
            self._slow_jobs.close()

    def _start_workers(self) -> None:
        self._stuck = [worker for worker in self._stuck if worker.is_alive()]
        for worker in self._all_workers():
            future = worker.current
            if future is not None and future.is_late:
                worker.is_dismissed = True  # it ends when the library returns
                self._stuck.append(worker)
        if len(self._stuck) >= _MAX_STUCK_THREADS:
            raise Overloaded("too many grammars are still being compiled", retry_after_s=10)
        self._workers = [w for w in self._workers if not w.is_dismissed]
        while len(self._workers) < self._num_threads:
            self._workers.append(self._started(self._jobs, self._slow_jobs))
        is_slow_gone = self._slow_worker is None or self._slow_worker.is_dismissed
        if self._make_trial is not None and is_slow_gone:
            self._slow_worker = self._started(self._slow_jobs, None)

    def _all_workers(self) -> list[_Worker]:
        return [*self._workers, *([self._slow_worker] if self._slow_worker else ())]

    def _started(self, jobs: _Queue, slow: _Queue | None) -> _Worker:
        trial = self._make_trial() if self._make_trial is not None else None
        worker = _Worker(self._backend, trial, jobs, slow, self._timeout_s)
        worker.start()
        return worker
