"""The gateway's metrics: smg_* as sglang-router 0.3 names them, sgl_router_* as 0.2 did, and
radix_router_* for what only this gateway has.

The data path reports events by plain methods; gauges are read from the workers at a scrape.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from radixlm.router.call import Call
from radixlm.router.series import Counter, Family, Gauge, Histogram, Labels, View, text_of
from radixlm.router.worker import State, Worker

DURATION_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0),
    *(60.0, 90.0, 120.0, 180.0, 240.0),
)
AGES_S = (30, 60, 180, 300, 600, 1200, 3600, 7200, 14400, 28800, 86400)
MAX_MODELS = 200  # clients choose the names; those after are "other"
_ENDPOINTS = {
    "/": "generate",  # of Text Generation Inference
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/rerank": "rerank",
}
_LOADS = {
    "queued_tokens": "num_queued_tokens",
    "kv_usage": "kv_usage",
    "tokens_per_second": "tokens_per_s",
}
_BREAKER = {"closed": 0.0, "open": 1.0, "half_open": 2.0}


def endpoint_of(path: str) -> str:
    """The label of a data route: "chat", "generate", "responses", ..."""
    known = _ENDPOINTS.get(path)
    return known if known else path.removeprefix("/v1").strip("/").replace("/", "_")


class RouterMetrics:
    """All metrics of one gateway. Models that clients make up are bounded, and their paths are
    "other"."""

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        calls: Callable[[], Sequence[Call]] = lambda: (),
        num_connections: Callable[[], int] = lambda: 0,
        route_of: Callable[[str], str | None] = lambda path: None,
        backend: str = "regular",
        duration_buckets: Sequence[float] | None = None,
    ) -> None:
        """``workers``: the registry, iterated at a scrape. ``calls``: those under way.
        ``route_of``: the label of a path, None where no route has it. ``backend``: regular, pd or
        external.
        ``duration_buckets``: of --prometheus-duration-buckets."""
        self._workers, self._calls, self._num_connections = workers, calls, num_connections
        self._route_of = route_of
        self._bounds = tuple(sorted(duration_buckets or DURATION_S))
        self._families: list[Family] = []
        self._backend = backend
        self._models: set[str] = set()
        self._paths: dict[str, str] = {}
        self._breakers: dict[str, float] = {}
        self._runs: dict[str, tuple[int, int]] = {}  # failures, successes in a row
        self._define_requests()
        self._define_workers()
        self._define_gauges()

    # ---- families ------------------------------------------------------------------------------

    def counter(
        self,
        name: str,
        help_: str,
        labels: tuple[str, ...] = (),
        *aliases: View,
        fixed: bool = False,
        shown: tuple[str, ...] | None = None,
    ) -> Counter:
        """A counter, ``name`` with its "_total". ``aliases``: further names for it. ``fixed``: with
        the labels router_type, backend_type and connection_mode. ``shown``: the labels of ``name``,
        if not all."""
        view = self._view(name, labels if shown is None else shown, fixed)
        family = Counter(help_, labels, (view, *aliases))
        self._families.append(family)
        return family

    def histogram(
        self,
        name: str,
        help_: str,
        labels: tuple[str, ...] = (),
        *aliases: View,
        fixed: bool = False,
        bounds: Sequence[float] | None = None,
    ) -> Histogram:
        """A histogram of seconds, or of anything with ``bounds``."""
        views = (self._view(name, labels, fixed), *aliases)
        family = Histogram(help_, labels, views, bounds or self._bounds)
        self._families.append(family)
        return family

    def gauge(
        self,
        name: str,
        help_: str,
        read: Callable[[], Mapping[Labels, float]],
        labels: tuple[str, ...] = (),
        *aliases: View,
    ) -> None:
        """A gauge that ``read`` gives at a scrape: values of ``labels`` -> value."""
        self._families.append(Gauge(help_, labels, (View(name, labels), *aliases), read))

    def _view(self, name: str, labels: tuple[str, ...], fixed: bool) -> View:
        if not fixed:
            return View(name, labels)
        kinds = (
            ("router_type", "http"),
            ("backend_type", self._backend),
            ("connection_mode", "http"),
        )
        return View(name, tuple(label for label in labels if label != "route"), kinds)

    def _define_requests(self) -> None:
        route = ("route",)
        base = ("model", "endpoint", "route")
        self._http = self.counter(
            "smg_http_requests_total", "Requests of clients that were answered.",
            ("method", "path", "status_code", "error_code"),
            View("smg_http_responses_total", ("status_code", "error_code")),
            View("sgl_router_http_responses_total", ("status_code",)),
            View("sgl_router_responses_total", ("route=path", "method", "status_code")),
            shown=("method", "path"),
        )  # fmt: skip
        self._http_seconds = self.histogram(
            "smg_http_request_duration_seconds", "Seconds of a request.", ("method", "path")
        )
        self._limits = self.counter(
            "smg_http_rate_limit_total", "Requests let in or refused by a limit.", ("result",)
        )
        self._requests = self.counter(
            "smg_router_requests_total", "Requests to be routed.", (*base, "streaming"),
            View("sgl_router_requests_total", route, (("method", "POST"),)), fixed=True,
        )  # fmt: skip
        self._seconds = self.histogram(
            "smg_router_request_duration_seconds", "Seconds until a request's end.", base,
            View("sgl_router_request_duration_seconds", ("route", "model_id=model")), fixed=True,
        )  # fmt: skip
        self._errors = self.counter(
            "smg_router_request_errors_total", "Requests that failed.", (*base, "error_type"),
            View("sgl_router_request_errors_total", ("route", "error_type")), fixed=True,
        )  # fmt: skip
        self._ttft = self.histogram(
            "smg_router_ttft_seconds", "Seconds until the first event of a stream.", base,
            View("sgl_router_ttft_seconds", ("model_id=model",)), fixed=True,
        )  # fmt: skip
        self._upstream = self.counter(
            "smg_router_upstream_responses_total", "Answers of workers.",
            ("status_code", "error_code"), fixed=True,
        )  # fmt: skip
        self._queue_s = self.histogram(
            "radix_router_queue_seconds", "Seconds that requests waited to be let in.", ("result",)
        )

    def _define_workers(self) -> None:
        kind = ("worker_type", "connection_mode", "model", "policy", "worker")
        self._selections = self.counter(
            "radix_router_worker_selection_total", "Requests sent to a worker.", kind,
            View("smg_worker_selection_total", kind[:4]),
            View("sgl_router_processed_requests_total", ("worker",)),
            View("sgl_router_policy_decisions_total", ("policy", "worker")),
        )  # fmt: skip
        self._worker_errors = self.counter(
            "smg_worker_errors_total", "Failures of workers.",
            ("worker_type", "connection_mode", "error_type"),
        )  # fmt: skip
        self._checks = self.counter(
            "smg_worker_health_checks_total", "Health checks.", ("worker_type", "result")
        )
        self._outcomes = self.counter(
            "smg_worker_cb_outcomes_total", "What breakers counted.",
            ("worker", "outcome", "model", "mode"),
            View("sgl_router_cb_outcomes_total", ("worker", "outcome")),
            View("sgl_router_worker_requests_total",
                 ("worker_url=worker", "model_id=model", "mode", "outcome")),
            shown=("worker", "outcome"),
        )  # fmt: skip
        self._transitions = self.counter(
            "smg_worker_cb_transitions_total", "Changes of breakers.", ("worker", "from", "to"),
            View("sgl_router_cb_state_transitions_total", ("worker", "from", "to")),
        )  # fmt: skip
        self._states = self.counter(
            "radix_router_worker_transitions_total", "Changes of a worker's state.",
            ("worker", "state"),
        )  # fmt: skip
        self._retries = self.counter(
            "smg_worker_retries_total", "Further tries.", ("worker_type", "endpoint", "route"),
            View("sgl_router_retries_total", ("route",)),
        )  # fmt: skip
        self._exhausted = self.counter(
            "smg_worker_retries_exhausted_total", "Requests that failed at their last try.",
            ("worker_type", "endpoint", "route"), View("sgl_router_retries_exhausted_total",
            ("route",)),
        )  # fmt: skip
        self._backoff = self.histogram(
            "smg_worker_retry_backoff_seconds", "Seconds between two tries.", ("attempt",),
            View("sgl_router_retry_backoff_duration_seconds", ("attempt",)),
        )  # fmt: skip
        self._moved = self.counter(
            "radix_router_streams_moved_total", "Streams that went on elsewhere.", ("result",)
        )

    def _define_gauges(self) -> None:
        worker, url = ("worker",), ("worker_url=worker",)
        self.gauge("smg_http_connections_active", "Connections of clients.",
                   lambda: {(): self._num_connections()})  # fmt: skip
        self.gauge("smg_http_inflight_request_age_count", "Requests under way, by seconds.",
                   self._ages, ("gt", "le"))  # fmt: skip
        self.gauge("smg_worker_pool_size", "Workers.", self._pools,
                   ("worker_type", "connection_mode", "model"),
                   View("sgl_router_workers", ("mode=worker_type",)))  # fmt: skip
        self.gauge("smg_worker_connections_active", "Requests under way, by kind of worker.",
                   self._loads_by_type, ("worker_type", "connection_mode"))  # fmt: skip
        self.gauge("smg_worker_health", "1: the worker gets requests.",
                   self._of_workers(lambda w: w.is_available), worker,
                   View("sgl_router_worker_health", ("worker", "worker_url=worker")))  # fmt: skip
        self.gauge("smg_worker_requests_active", "Requests under way at a worker.",
                   self._of_workers(lambda w: w.num_inflight), worker,
                   View("sgl_router_worker_load", worker),
                   View("sgl_router_running_requests", worker),
                   View("sgl_router_worker_inflight_requests", url))  # fmt: skip
        self.gauge("smg_worker_cb_state", "Breaker: 0 closed, 1 open, 2 half open.",
                   self._of_workers(self.breaker), worker,
                   View("sgl_router_cb_state", worker),
                   View("sgl_router_worker_cb_state", url))  # fmt: skip
        self.gauge("smg_worker_cb_consecutive_failures", "Failures in a row.",
                   self._of_workers(lambda w: self._in_a_row(w)[0]), worker)  # fmt: skip
        self.gauge("smg_worker_cb_consecutive_successes", "Successes in a row.",
                   self._of_workers(lambda w: self._in_a_row(w)[1]), worker)  # fmt: skip
        self.gauge("sgl_router_active_workers", "Workers that get requests.",
                   lambda: {(): sum(w.is_available for w in self._workers)})  # fmt: skip
        self.gauge("radix_router_worker_state", "1: the state of a worker.",
                   lambda: {(w.name, str(w.state)): 1.0 for w in self._workers},
                   ("worker", "state"))  # fmt: skip
        self.gauge("radix_router_worker_tokens", "Tokens charged to a worker.",
                   self._of_workers(lambda w: w.num_tokens), worker)  # fmt: skip
        for name, field in _LOADS.items():
            self.gauge(f"radix_router_worker_{name}", "As the worker told last.",
                       self._loads(field), worker)  # fmt: skip

    # ---- requests ------------------------------------------------------------------------------

    def http_ended(self, call: Call, status: int, error_code: str = "") -> None:
        """A request is answered, or its client has left (499)."""
        path = self._paths.get(call.path) or self._path(call.path)
        self._http.values[call.method, path, status, error_code] += 1
        self._http_seconds.observe(time.monotonic() - call.arrival_s, call.method, path)

    def request_started(self, call: Call, model: str, endpoint: str, streaming: bool) -> None:
        """A request is about to be routed. ``endpoint``: of ``endpoint_of``."""
        model = model if model in self._models else self._model(model)
        self._requests.values[model, endpoint, call.path, "true" if streaming else "false"] += 1

    def request_ended(
        self,
        call: Call,
        model: str,
        endpoint: str,
        streaming: bool,
        *,
        status: int,
        error_type: str = "",
        seconds: float,
        ttft_s: float | None = None,
    ) -> None:
        """It has ended. ``error_type``: no_workers, timeout, backend_error, validation_error,
        internal_error, client_left; empty: by the status. ``ttft_s``: of streams."""
        model = model if model in self._models else self._model(model)
        self._seconds.observe(seconds, model, endpoint, call.path)
        if ttft_s is not None:
            self._ttft.observe(ttft_s, model, endpoint, call.path)
        if status >= 400 or error_type:
            error_type = error_type or ("backend_error" if status >= 500 else "validation_error")
            self._errors.inc(model, endpoint, call.path, error_type)

    def rate_limited(self, is_allowed: bool) -> None:
        """A limit has let a request in, or refused it."""
        self._limits.inc("allowed" if is_allowed else "rejected")

    def queued(self, seconds: float, result: str) -> None:
        """A request has left the queue. ``result``: entered, timeout, full or left."""
        self._queue_s.observe(seconds, result)

    def retry(self, worker_type: str, call: Call, attempt: int, backoff_s: float) -> None:
        """A further try, the ``attempt``-th (from 1), begins after ``backoff_s``."""
        self._retries.inc(worker_type, endpoint_of(call.path), call.path)
        self._backoff.observe(backoff_s, attempt)

    def retries_exhausted(self, worker_type: str, call: Call) -> None:
        """The last try has failed."""
        self._exhausted.inc(worker_type, endpoint_of(call.path), call.path)

    def stream_moved(self, result: str) -> None:
        """A stream has lost its worker. ``result``: resumed, or why it could not be."""
        self._moved.inc(result)

    # ---- workers -------------------------------------------------------------------------------

    def worker_selected(self, worker: Worker, model: str, policy: str) -> None:
        """A request goes to ``worker``."""
        model = model if model in self._models else self._model(model)
        self._selections.values[worker.worker_type, "http", model, policy, worker.name] += 1

    def selections(self) -> Mapping[Labels, float]:
        """Requests sent, by worker type, connection mode, model, policy and worker."""
        return self._selections.values

    def moves(self) -> dict[str, float]:
        """Streams that have lost their worker, by what became of them."""
        return {str(labels[0]): count for labels, count in self._moved.values.items()}

    def upstream_response(self, status: int, error_code: str = "") -> None:
        """A worker's status line has come."""
        self._upstream.values[status, error_code] += 1

    def worker_error(self, worker: Worker, error_type: str) -> None:
        """A worker has failed: unreachable, cut, timeout, status."""
        self._worker_errors.inc(worker.worker_type, "http", error_type)

    def health_checked(self, worker: Worker, is_good: bool) -> None:
        """A health check is over."""
        self._checks.inc(worker.worker_type, "success" if is_good else "failure")

    def worker_state(self, worker: Worker, state: State) -> None:
        """A worker has changed its state. Of one that is gone nothing is kept."""
        self._states.inc(worker.name, str(state))
        if state is State.GONE:
            self._breakers.pop(worker.name, None)
            self._runs.pop(worker.name, None)
            for family in self._families:
                family.forget("worker", worker.name)

    def breaker_outcome(self, worker: Worker, is_success: bool) -> None:
        """A breaker has counted an answer."""
        name = worker.name
        failures, successes = self._runs.get(name, (0, 0))
        self._runs[name] = (0, successes + 1) if is_success else (failures + 1, 0)
        outcome = "success" if is_success else "failure"
        labels = (name, outcome, worker.model_id or "unknown", worker.worker_type)
        self._outcomes.values[labels] += 1

    def breaker_transition(self, worker: Worker, before: str, after: str) -> None:
        """``before``, ``after``: closed, open, half_open."""
        self._breakers[worker.name] = _BREAKER[after]
        self._transitions.inc(worker.name, before, after)

    # ---- labels and gauges ---------------------------------------------------------------------

    def _model(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= MAX_MODELS or len(model) > 256:
                return "other"
            self._models.add(model)
        return model

    def _path(self, path: str) -> str:
        """The label of a path: its route's, with names in braces for ids."""
        label = self._route_of(path) or "other"
        if label == path:
            self._paths[path] = label
        return label

    def _ages(self) -> dict[Labels, float]:
        now, counts = time.monotonic(), [0.0] * (len(AGES_S) + 1)
        for call in self._calls():
            counts[bisect_left(AGES_S, now - call.arrival_s)] += 1
        ends = ["0", *map(str, AGES_S), "+Inf"]
        return {(ends[i], ends[i + 1]): count for i, count in enumerate(counts)}

    def _pools(self) -> dict[Labels, float]:
        found: dict[Labels, float] = {}
        for worker in self._workers:
            key = (worker.worker_type, "http", worker.model_id or "unknown")
            found[key] = found.get(key, 0) + 1
        return found

    def _loads_by_type(self) -> dict[Labels, float]:
        found: dict[Labels, float] = {}
        for worker in self._workers:
            key = (worker.worker_type, "http")
            found[key] = found.get(key, 0) + worker.num_inflight
        return found

    def _of_workers(self, read: Callable[[Worker], Any]) -> Callable[[], dict[Labels, float]]:
        return lambda: {(worker.name,): float(read(worker)) for worker in self._workers}

    def _loads(self, field: str) -> Callable[[], dict[Labels, float]]:
        return lambda: {
            (worker.name,): float(getattr(worker.load, field))
            for worker in self._workers
            if worker.load is not None
        }

    def _in_a_row(self, worker: Worker) -> tuple[int, int]:
        return self._runs.get(worker.name, (0, 0))

    def breaker(self, worker: Worker) -> float:
        """0 closed, 1 open, 2 half open."""
        return self._breakers.get(worker.name, float(worker.state is State.SUSPECT))

    def exposition(self) -> bytes:
        """What Prometheus reads."""
        return text_of(self._families)
