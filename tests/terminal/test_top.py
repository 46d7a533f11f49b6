"""`radixlm top`: percentiles against numpy, servers that come and go, and the screen."""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.http_server import ScriptedServer, listening, scripted_server
from tests.terminal.test_chat import Terminal

from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.observe.metrics import Buckets, Ended, Metrics
from radixlm.router.metrics import RouterMetrics
from radixlm.router.metrics_routes import joined
from radixlm.router.worker import State, Worker
from radixlm.terminal import top
from radixlm.terminal.api import Api, Refused
from radixlm.terminal.figures import clean, graph, line, rows
from radixlm.terminal.scrape import Histogram, Scrape
from radixlm.terminal.snapshot import Snapshot
from radixlm.terminal.watch import Watch
from radixlm.wire.replies import DraftTotals

LABELS = {"model_name": "m", "tp_rank": "0"}
VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} %d
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 100.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 40.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 8.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0"} 10.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 10.0
vllm:time_to_first_token_seconds_count{engine="0"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0"} 1.0
"""
bounds_drawn = st.lists(st.integers(1, 500), min_size=1, max_size=8, unique=True).map(sorted)
values_drawn = st.lists(st.integers(0, 600), min_size=1, max_size=60)


def histogram_of(values: Sequence[float], bounds: Sequence[float]) -> Histogram:
    counts = [float(sum(value <= bound for value in values)) for bound in (*bounds, math.inf)]
    return Histogram((*map(float, bounds), math.inf), tuple(counts))


@given(bounds_drawn, values_drawn, st.integers(1, 100))
def test_a_percentile_lies_in_the_bucket_of_numpys(
    bounds: list[int], values: list[int], percent: int
) -> None:
    got = histogram_of(values, bounds).quantile(percent / 100)
    true = np.quantile(values, percent / 100, method="inverted_cdf")
    low = max((b for b in bounds if b < true), default=0)
    high = min((b for b in bounds if b >= true), default=bounds[-1])
    assert got is not None and low <= got <= high


@given(bounds_drawn, st.lists(st.integers(0, 5), min_size=8, max_size=8), st.integers(1, 99))
def test_values_spread_evenly_have_numpys_percentiles(
    bounds: list[int], counts: list[int], percent: int
) -> None:
    edges = [0, *bounds]
    spread = [
        np.linspace(low, high, 400 * count, endpoint=False) + (high - low) / (400 * count)
        for low, high, count in zip(edges, bounds, counts, strict=False)
        if count
    ]
    values = np.concatenate(spread) if spread else np.array([])
    got = histogram_of(list(values), bounds).quantile(percent / 100)
    if not len(values):
        assert got is None
        return
    rank = percent / 100 * len(values)
    place = np.searchsorted(np.arange(1, len(values) + 1), rank)
    assert got == pytest.approx(values[place], abs=max(np.diff(edges)) / 100)


@given(bounds_drawn, values_drawn, values_drawn)
def test_what_came_between_two_looks(bounds: list[int], old: list[int], new: list[int]) -> None:
    before, after = histogram_of(old, bounds), histogram_of([*old, *new], bounds)
    assert after.since(before) == histogram_of(new, bounds)
    fresh = histogram_of([], bounds)
    assert fresh.since(before) == fresh  # the server counts from 0 again


def test_workers_with_other_bounds_share_those_that_all_have() -> None:
    text = "# TYPE a_b histogram\n" + "".join(
        f'a_b_bucket{{w="{worker}",le="{bound}"}} {count}\n'
        for worker, pairs in {"x": {"1": 2, "5": 4, "+Inf": 5}, "y": {"5": 1, "+Inf": 1}}.items()
        for bound, count in pairs.items()
    )
    assert Scrape(text).histogram("no", "a_b") == Histogram((5.0, math.inf), (5.0, 6.0))
    with pytest.raises(ValueError, match="invalid"):
        Scrape("<html>hello</html>")


class Fake:
    """An Api whose answers are a table: path -> text, or a status."""

    url = "http://fake"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def read(self, path: str, wait_s: float = 0) -> bytes:
        name = path.strip("/").replace("/", "_").partition("?")[0]
        self.asked.append(name)
        found = self.answers.get(name, 404)
        if isinstance(found, int):
            error = Refused(f"refused ({found})" if found else f"{self.url} does not answer: gone")
            error.status = found
            raise error
        return found if isinstance(found, bytes) else str(found).encode()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(fake: Fake) -> tuple[Watch, Clock]:
    clock: Any = Clock()
    return Watch(fake, clock=clock), clock  # type: ignore[arg-type]


def test_rates_and_percentiles_are_of_what_came_between() -> None:
    made = Metrics(LABELS, Buckets())
    fake = Fake(ready="", metrics=made.exposition({"num_running_reqs": 2, "token_usage": 0.25}))
    watch, clock = watched(fake)
    first = watch.poll()
    assert (first.state, first.running, first.kv_usage) == ("ready", 2, 0.25)
    assert first.is_first and first.tokens_in_per_s is None
    made.plain.first_token(0.3)
    made.plain.tokens(0.09, 9)
    made.ended(Ended(1.0, 0.0, 80, 10, 20, False, False, adapter="a\x1b[2J"), made.plain)
    made.drafts(DraftTotals(num_rounds=4, num_drafted=12, num_accepted=6))
    fake.answers["metrics"], clock.now = made.exposition({}), clock.now + 2
    got = watch.poll()
    assert (got.tokens_in_per_s, got.tokens_out_per_s, got.requests_per_s) == (40, 5, 0.5)
    assert 0.2 < got.latency["ttft"].p50 <= 0.4  # type: ignore[operator]
    assert 0.008 < got.latency["itl"].p99 <= 0.01  # type: ignore[operator]
    assert (got.cached_share, got.accept_rate, got.accept_length) == (0.25, 0.5, 2.5)
    text = "\n".join(text for _, text in rows(got))
    assert "accept length 2.50, accept rate 50 %" in text and "a?[2J: 1 requests" in text
    clock.now += 1
    assert watch.poll().tokens_out_per_s == pytest.approx(10 / 3)  # over the last seconds
    clock.now += 70
    assert watch.poll().latency["ttft"].p50 is None  # older than the window


def test_vllm_and_its_names() -> None:
    fake = Fake(ready=404, metrics=VLLM % 100)
    watch, clock = watched(fake)
    watch.poll()
    fake.answers["metrics"], clock.now = VLLM % 160, clock.now + 3
    got = watch.poll()
    assert (got.state, got.running, got.kv_usage, got.tokens_out_per_s) == ("up", 7, 0.375, 20)
    assert Scrape(VLLM % 1).histogram("vllm_time_to_first_token_seconds").quantile(0.8) == 0.1  # type: ignore[union-attr]


def test_sglang_without_metrics() -> None:
    loads = [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 9}]
    info = {"served_model_name": "m", "internal_states": [{"memory_usage": {"weight": 1.5}}]}
    fake = Fake(get_load=json.dumps(loads), get_server_info=json.dumps(info), v1_models="{}")
    got = watched(fake)[0].poll()
    assert (got.running, got.waiting, got.kv_used_tokens) == (3, 2, 9)
    assert got.memory == {"weights": 1.5 * 2**30} and got.model == "m"


def info_of(pid: int, uptime_s: float, is_ready: bool = True) -> str:
    return json.dumps({"uptime_s": uptime_s, "replicas": [{"pid": pid, "is_ready": is_ready}]})


def test_deaths_and_restarts_are_told() -> None:
    fake = Fake(ready="", metrics=VLLM % 1, server_info=info_of(7, 10.0))
    watch, clock = watched(fake)
    watch.poll()
    clock.now += 1
    fake.answers |= {"ready": 503, "server_info": info_of(7, 11.0, False)}
    got = watch.poll()
    assert got.state == "not ready" and got.parts[0].state == "restarts"
    clock.now += 1
    fake.answers |= {"ready": "", "server_info": info_of(8, 12.0)}
    assert watch.poll().engine_restarts == 1
    clock.now += 1
    fake.answers |= {"ready": 0}
    got = watch.poll()
    assert got.state == "down" and got.running is None
    assert "down: does not answer: gone" in line(got)
    clock.now += 1
    fake.answers |= {"ready": "", "server_info": info_of(9, 0.5)}
    got = watch.poll()
    assert (got.state, got.engine_restarts, got.server_restarts) == ("ready", 1, 1)
    assert got.is_first  # what it counts begins again
    told = " ".join(got.events)
    order = ["not ready", "engine of replica 0", "down: does not", "server was restarted"]
    places = [told.index(text) for text in order]
    assert places == sorted(places)


def test_the_engine_is_asked_seldom() -> None:
    fake = Fake(ready="", metrics=VLLM % 1, server_info=info_of(7, 10.0))
    watch, clock = watched(fake)
    for _ in range(11):
        watch.poll()
        clock.now += 1
    assert fake.asked.count("server_info") == 3 and fake.asked.count("metrics") == 11


def test_gateways_and_their_workers() -> None:
    good, bad = Worker("http://a:1"), Worker("http://b:2")
    good.state, bad.state, good.num_inflight = State.READY, State.UNHEALTHY, 3
    engine = Metrics(LABELS, Buckets()).exposition({"num_running_reqs": 2}).decode()
    fake = Fake(
        ready="",
        metrics=RouterMetrics([good, bad]).exposition(),
        engine_metrics=joined({"http://a:1": engine, "http://b:2": engine}),
        server_info=json.dumps({"served_model_name": "m", "uptime_s": 1.0, "replicas": [{}]}),
    )
    got = watched(fake)[0].poll()
    assert (got.kind, got.running, got.model, got.uptime_s) == ("gateway", 4, "m", None)
    assert [(p.name, p.state, p.running) for p in got.parts] == [
        ("http://a:1", "ready", 3),
        ("http://b:2", "unhealthy", 0),
    ]
    assert ("workers", "http://a:1: ready, 3 running") in rows(got)
    fake.answers["engine_metrics"] = 500
    assert watched(fake)[0].poll().running == 3


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"ready": 0}, "does not answer"),
        ({"metrics": 401}, "--api-key"),
        ({}, "is this a model server"),
        ({"metrics": "<html>"}, "not Prometheus"),
    ],
)
def test_what_is_no_server_is_told(answers: dict[str, Any], says: str) -> None:
    got = watched(Fake(**answers))[0].poll()
    assert got.state == "down" and says in got.reason


def test_texts_of_servers_do_not_move_the_cursor() -> None:
    assert clean("a\x1b[31m\r\nb\u202e") == "a?[31m??b?"
    assert clean("x" * 9, 4) == "xxxx..."
    assert graph([0, 1, 2, 4], 3) == "▂▄█" and graph([0.0], 9) == graph([], 3) == ""
    assert rows(Snapshot("http://x", reason="gone"))[0][1] == "http://x  down: gone"


def test_a_worker_pool_of_a_thousand_fits_the_page() -> None:
    workers = [Worker(f"http://w{i}:1") for i in range(1000)]
    got = watched(Fake(ready="", metrics=RouterMetrics(workers).exposition()))[0].poll()
    assert len(rows(got)) < 24 and rows(got)[-1][1] == "and 988 more"


def test_the_page_fits_80_columns_and_24_lines() -> None:
    rich = pytest.importorskip("rich.console", reason="rich is of the extra chat")
    text = pytest.importorskip("rich.text").Text
    workers = [
        Worker(f"http://a-rather-long-name-of-a-worker-{i}.example:30000") for i in range(40)
    ]
    snapshot = watched(Fake(ready="", metrics=RouterMetrics(workers).exposition()))[0].poll()
    found = [replace(snapshot, url=f"http://{'x' * 90}:{i}") for i in range(9)]
    for width, height in ((80, 24), (40, 10)):
        console = rich.Console(width=width, height=height, file=io.StringIO())
        page = top._page(text, width, height, found, 3, [1.0, 2.0] * 99, True)
        lines = [str(one) for one in page.renderables]
        with console.capture() as shown:
            console.print(page)
        assert len(shown.get().splitlines()) == len(lines) == height  # none was folded
        assert lines[3].startswith("> http") and lines[-1].endswith("HELD")


def test_a_server_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.terminal.watch.WAIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as sock:  # takes connections, never answers
        got = Watch(Api(f"http://127.0.0.1:{sock.getsockname()[1]}")).poll()
    assert got.state == "down" and "timed out" in got.reason


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest_asyncio.fixture
async def served(toy_folder: Path) -> AsyncIterator[tuple[ScriptedServer, str]]:
    script = {"first": "The one."}
    async with (
        scripted_server(toy_folder, script, enable_metrics=True) as server,
        listening(server) as port,
    ):
        yield server, f"http://127.0.0.1:{port}"


async def test_a_real_server(served: tuple[ScriptedServer, str], capsys: Any) -> None:
    server, url = served
    body = {"messages": [{"role": "user", "content": "the first"}], "model": "tiny"}
    assert (await server.post("/v1/chat/completions", **body)).status_code == 200
    assert await asyncio.to_thread(top.main, ["--url", url, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["state"], got["model"], got["waiting"]) == ("ready", "tiny", 0)
    assert 0 < got["kv_total_tokens"] <= 4096 * 4 and got["latency"]["ttft"]["p50"] > 0
    assert await asyncio.to_thread(top.main, ["--url", url, "--url", "127.0.0.1:1"]) == 1
    shown = capsys.readouterr().out
    assert "tiny at http://127.0.0.1" in shown and "127.0.0.1:1  down: does not answer" in shown


async def test_a_server_without_metrics(toy_folder: Path, capsys: Any) -> None:
    async with scripted_server(toy_folder, {}) as server, listening(server) as port:
        url = f"http://127.0.0.1:{port}"
        assert await asyncio.to_thread(top.main, ["--url", url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "0 running, 0 waiting" in shown and "start it with --enable-metrics" in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--url", "ftp://x"], "use a URL such as"),
        (["--url", "http://x:99999"], "use a URL such as"),
        (["--interval", "0"], "--interval must be"),
        (["--interval", "soon"], "--interval"),
    ],
)
def test_wrong_options(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        top.main(argv)


def play(url: str, home: Path, kind: str, keys: str) -> int:
    terminal = Terminal(url, home, kind, "top")
    try:
        terminal.until("running" if kind == "xterm" else "run 0, wait 0")
        if kind == "xterm":
            terminal.type(" ")
            terminal.until("HELD")
        terminal.type(keys)
    finally:
        status = terminal.end()
    return status


@pytest.mark.parametrize(("kind", "keys"), [("xterm", "q"), ("xterm", "\x03"), ("dumb", "q")])
async def test_the_screen(
    served: tuple[ScriptedServer, str], tmp_path: Path, kind: str, keys: str
) -> None:
    if kind == "xterm":
        pytest.importorskip("rich", reason="rich is of the extra chat")
    assert await asyncio.to_thread(play, served[1], tmp_path, kind, keys) == 0
