"""The gateway's metrics, against prometheus_client's reader and its own counters."""

import random
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as ReferenceHistogram
from prometheus_client.parser import text_string_to_metric_families

from radixlm.router.answer import Routes
from radixlm.router.call import Call
from radixlm.router.metrics import MAX_MODELS, RouterMetrics, endpoint_of
from radixlm.router.worker import Load, State, Worker


def _call(path: str = "/v1/chat/completions", method: str = "POST") -> Call:
    return Call(method, path, "", [], b"{}")


def _samples(metrics: RouterMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.exposition().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    """The sum of the samples of ``name`` that have ``labels``."""
    found = [
        value
        for (sample, shown), value in _samples(metrics).items()
        if sample == name and set(labels.items()) <= shown
    ]
    assert found, (name, labels)
    return sum(found)


def _request(metrics: RouterMetrics, model: str, status: int, streaming: bool) -> None:
    call = _call()
    metrics.request_started(call, model, "chat", streaming)
    metrics.request_ended(
        call, model, "chat", streaming, status=status, seconds=0.3,
        ttft_s=0.02 if streaming else None,
    )  # fmt: skip
    metrics.http_ended(call, status)


def test_both_sets_of_names_count_the_same_requests() -> None:
    metrics = RouterMetrics(route_of=lambda path: path)
    for number in range(12):
        _request(metrics, "ab"[number % 2], 500 if number == 3 else 200, number % 3 == 0)
    fixed = {"router_type": "http", "backend_type": "regular", "connection_mode": "http"}
    count = "smg_router_requests_total"
    assert _value(metrics, count, model="a", endpoint="chat", **fixed) == 6
    assert _value(metrics, count, streaming="true") == 4
    assert _value(metrics, "sgl_router_requests_total", route="/v1/chat/completions") == 12
    assert _value(metrics, "smg_router_request_errors_total", error_type="backend_error") == 1
    assert _value(metrics, "smg_router_ttft_seconds_count") == 4
    assert _value(metrics, "sgl_router_request_duration_seconds_count", model_id="a") == 6
    route = {"route": "/v1/chat/completions", "method": "POST"}
    assert _value(metrics, "sgl_router_responses_total", status_code="500", **route) == 1
    assert _value(metrics, "smg_http_responses_total", status_code="200") == 11
    assert _value(metrics, "smg_http_requests_total", path="/v1/chat/completions") == 12


def test_histogram_equals_prometheus_clients() -> None:
    random_ = random.Random(1)
    registry = CollectorRegistry()
    bounds = (0.1, 1.0, 10.0)
    theirs = ReferenceHistogram("h", "Some.", ["x"], registry=registry, buckets=bounds)
    metrics = RouterMetrics()
    metrics._families.clear()
    ours = metrics.histogram("h", "Some.", ("x",), bounds=bounds)
    for value in [0.1, 1.0, 10.0, *(random_.expovariate(0.3) for _ in range(300))]:
        label = random_.choice("ab")
        theirs.labels(label).observe(value)
        ours.observe(value, label)
    lines = {
        line for line in generate_latest(registry).decode().splitlines() if "created" not in line
    }
    assert set(metrics.exposition().decode().splitlines()) == lines


def test_workers_are_read_at_a_scrape_and_forgotten_when_gone() -> None:
    one, two = Worker("http://a:1"), Worker("http://b:1", model_id="m", worker_type="decode")
    workers = [one, two]
    metrics = RouterMetrics(workers)
    for worker in workers:
        worker.state = State.READY
        metrics.worker_state(worker, State.READY)
        metrics.worker_selected(worker, "m", "random")
        metrics.breaker_outcome(worker, True)
    metrics.breaker_outcome(one, False)
    metrics.breaker_outcome(one, False)
    metrics.breaker_transition(one, "closed", "open")
    one.state, two.num_inflight = State.SUSPECT, 3
    two.load = Load(num_queued_tokens=7, kv_usage=0.5)
    assert _value(metrics, "radix_router_worker_queued_tokens") == 7
    assert _value(metrics, "radix_router_worker_kv_usage", worker=two.name) == 0.5
    assert _value(metrics, "smg_worker_health", worker=one.name) == 0
    assert _value(metrics, "smg_worker_cb_state", worker=one.name) == 1
    assert _value(metrics, "smg_worker_cb_consecutive_failures", worker=one.name) == 2
    assert _value(metrics, "smg_worker_cb_consecutive_successes", worker=two.name) == 1
    assert _value(metrics, "sgl_router_worker_load", worker=two.name) == 3
    assert _value(metrics, "smg_worker_pool_size", worker_type="decode", model="m") == 1
    assert _value(metrics, "sgl_router_active_workers") == 1
    url = {"worker_url": two.name}
    assert _value(metrics, "sgl_router_worker_requests_total", outcome="success", **url) == 1
    assert _value(metrics, "sgl_router_worker_inflight_requests", **url) == 3
    assert _value(metrics, "sgl_router_worker_health", worker=two.name, **url) == 1
    assert _value(metrics, "sgl_router_workers", mode="decode") == 1
    assert _value(metrics, "radix_router_worker_state", state="suspect") == 1
    workers.remove(one)
    metrics.worker_state(one, State.GONE)
    assert one.name not in metrics.exposition().decode()
    assert _value(metrics, "sgl_router_processed_requests_total", worker=two.name) == 1


def test_names_of_clients_are_bounded() -> None:
    metrics = RouterMetrics()
    for number in range(600):
        metrics.http_ended(_call(f"/x{number}/1234567890abcdef", "OPTIONS"), 200)
        metrics.request_started(_call(), f"model {number}", "chat", False)
    samples = _samples(metrics)
    assert len([1 for name, _ in samples if name == "smg_http_requests_total"]) == 1
    assert len([1 for name, _ in samples if name == "smg_router_requests_total"]) == MAX_MODELS + 1
    assert _value(metrics, "smg_http_requests_total", path="other") == 600


def test_names_of_clients_are_escaped() -> None:
    metrics = RouterMetrics()
    name = 'a"b\\c\nd\\n%s{}'
    metrics.request_started(_call(), name, "chat", False)
    assert _value(metrics, "smg_router_requests_total", model=name) == 1


def test_gauges_and_tables_that_are_read_at_a_scrape() -> None:
    metrics = RouterMetrics()
    metrics.gauge("some_things", "Things.", lambda: {("a",): 2.0}, ("x",))
    metrics.gauge("some_events_total", "Events.", lambda: {("a",): 3.0}, ("x",))
    assert _value(metrics, "some_things", x="a") == 2
    assert _value(metrics, "some_events_total", x="a") == 3
    assert "# TYPE some_events_total counter" in metrics.exposition().decode()


def test_ids_in_paths_share_a_label() -> None:
    routes, path = Routes(), "/v1/responses/{response_id}/input_items"
    for known in (path, "/workers"):
        routes.add("GET", known, AsyncMock())
    metrics = RouterMetrics(route_of=routes.shown)
    for name in ("resp_1", "resp_2"):
        metrics.http_ended(_call(f"/v1/responses/{name}/input_items", "GET"), 200)
    metrics.http_ended(_call("/workers", "GET"), 401)
    assert _value(metrics, "smg_http_requests_total", path=path) == 2
    assert _value(metrics, "smg_http_requests_total", path="/workers") == 1


def test_requests_under_way_are_counted_by_age() -> None:
    calls = [_call() for _ in range(3)]
    metrics = RouterMetrics(calls=lambda: calls, num_connections=lambda: 5)
    for call, age_s in zip(calls, (1, 40, 100_000), strict=True):
        call.arrival_s -= age_s
    name = "smg_http_inflight_request_age_count"
    assert _value(metrics, name, gt="0", le="30") == 1
    assert _value(metrics, name, gt="30", le="60") == 1
    assert _value(metrics, name, gt="86400", le="+Inf") == 1
    assert _value(metrics, "smg_http_connections_active") == 5
    calls.pop()
    assert _value(metrics, name) == 2


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("/v1/chat/completions", "chat"), ("/generate", "generate"), ("/v1/embeddings", "embeddings"),
     ("/v1/audio/speech", "audio_speech")],
)  # fmt: skip
def test_endpoint_of_a_path(path: str, endpoint: str) -> None:
    assert endpoint_of(path) == endpoint
