"""A real Prometheus scrapes a real server and gateway, and evaluates the queries of dashboards.

SGLANG_DASHBOARD names the JSON file of SGLang's published dashboard, to evaluate that very file;
without it the queries of its eight panels are made here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.deploy import panels
from tests.router.processes import Process, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
SERVER = [
    *("serve", "--host=127.0.0.1", "--cpu-threads=1", "--max-total-tokens=4096"),
    "--log-level=warning",
    *("--enable-metrics", "--collect-tokens-histogram", "--enable-hierarchical-cache"),
    *("--hicache-size=1", "--speculative-algorithm=NGRAM", "--lora-paths"),
    f"upper={panels.ROOT / 'zoo' / 'models' / 'radix-tiny-lora-upper'}",
]
SCRAPES = 8
EMPTY = {
    "Transfers between servers": "of prefill and decode servers",
    "Queues of pairs": "of prefill and decode servers",
    "Streams that went on elsewhere, retries": "no worker died",
}
"""Panels of ours without data here, and why."""


def reference_queries() -> list[tuple[str, str]]:
    """Those of SGLang's dashboard: two times as percentiles, mean and heatmap, and four gauges."""
    if path := os.environ.get("SGLANG_DASHBOARD"):
        return list(panels.queries(panels.load(Path(path))))
    found = []
    for title, name in (("End-to-End Request Latency", "e2e_request_latency"),
                        ("Time-To-First-Token Latency", "time_to_first_token")):  # fmt: skip
        rate = f"rate(sglang:{name}_seconds_{{}}[$__rate_interval])"
        for part in (0.99, 0.9, 0.5):
            bucket = rate.format("bucket")
            found.append((title, f"histogram_quantile({part}, sum by (le) ({bucket}))"))
        found.append((title, f"avg({rate.format('sum')} / {rate.format('count')})"))
        bucket = f'sglang:{name}_seconds_bucket{{model_name=~"$model_name"}}'
        heatmap = f"sum(increase({bucket}[$__rate_interval])) by (le)"
        found.append((f"{title} heatmap", heatmap))
    gauges = ("num_running_reqs", "gen_throughput", "cache_hit_rate", "num_queue_reqs")
    return found + [(name, f"sglang:{name}") for name in gauges]


def _until(what: str, limit_s: float, is_done: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, psutil.Error):
            if found := is_done():
                return found
        time.sleep(0.2)
    raise TimeoutError(what)


class Stack:
    """A server, a gateway before it, and a Prometheus that scrapes both each second."""

    def __init__(self, folder: Path) -> None:
        self.processes = contextlib.ExitStack()
        server, gateway, exporter, self.port = (free_port() for _ in range(4))
        run = [sys.executable, "-m", "radixlm"]
        self.server = self._start([*run, *SERVER, f"--port={server}"], server)
        worker = f"--worker-urls=http://127.0.0.1:{server}"
        gateway_options = [f"--port={gateway}", f"--prometheus-port={exporter}", worker,
                           "--host=127.0.0.1", "--max-concurrent-requests=2"]  # fmt: skip
        self.gateway = self._start([*run, "router", *gateway_options], gateway)
        self.is_over = threading.Event()
        targets = {"radixlm": server, "radixlm-gateway": exporter}
        self._prometheus(folder, targets)

    def _start(self, command: list[str], port: int) -> Process:
        made = Process(command, f"http://127.0.0.1:{port}", limit_s=120)
        self.processes.callback(made.end)
        return made

    def _prometheus(self, folder: Path, targets: dict[str, int]) -> None:
        made = yaml.safe_load((panels.ROOT / "deploy/prometheus/prometheus.yml").read_text())
        made["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        shutil.copy(panels.ROOT / "deploy/prometheus/rules.yml", folder)
        for job in made["scrape_configs"]:
            job.pop("dns_sd_configs", None)
            job["static_configs"] = [{"targets": [f"127.0.0.1:{targets[job['job_name']]}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(made))
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{self.port}",
        }
        command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
        with (folder / "log").open("wb") as log:
            popen = subprocess.Popen(command, stdout=log, stderr=log)
        self.processes.callback(popen.wait, 20)
        self.processes.callback(popen.kill)
        _until("Prometheus", 30, lambda: self.query("vector(1)"))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now; those that are no number are left out."""
        arguments = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{arguments}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
        return [one for one in found if one["value"][1] != "NaN"]

    def load(self) -> None:
        """Ask by the gateway until it is over: chats, streams, adapters, grammars, faults."""
        kinds: list[dict[str, Any]] = [
            {"stream": True},
            {"model": "upper"},
            {"stream": True, "response_format": {"type": "json_object"}},
            {"temperature": -1.0},
        ]
        number = 0
        while not self.is_over.is_set():
            number += 1
            question = f"What is {number % 9} + {number % 7}? " + "Think well. " * 40
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24}
            body |= {"temperature": 0} | kinds[number % len(kinds)]
            data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
            url = f"{self.gateway.url}/v1/chat/completions"
            request = urllib.request.Request(url, data, headers)
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=60).read()

    def kill_engine(self) -> None:
        """SIGKILL; until another one serves."""
        engine = max(psutil.Process(self.server.popen.pid).children(recursive=True),
                     key=lambda one: one.memory_info().rss)  # fmt: skip
        engine.send_signal(signal.SIGKILL)
        _until("a death", 30, lambda: self.query("radixlm:engine_deaths_total > 0"))
        _until("a new engine", 60, lambda: self.query("radixlm:engines_ready > 0"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("prometheus"))
    clients = [threading.Thread(target=made.load, daemon=True) for _ in range(3)]
    try:
        for client in clients:
            client.start()
        _until("load", 60, lambda: made.query("sglang:num_requests_total > 3"))
        made.kill_engine()
        before = made.query("sglang:num_requests_total")[0]["value"][1]
        _until("answers of the new engine", 60,
               lambda: made.query(f"sglang:num_requests_total > {before} + {SCRAPES}"))  # fmt: skip
        yield made
    finally:
        made.is_over.set()
        made.processes.close()
        for client in clients:
            client.join(60)


def _empty(stack: Stack, found: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Queries without data, by panel. Asked for a while, since a scrape may just be missing."""
    left: dict[str, list[str]] = {}
    for title, expression in found:
        try:
            _until(expression, 3, lambda expr=expression: stack.query(panels.filled(expr)))
        except TimeoutError:
            left.setdefault(title, []).append(expression)
    return left


def test_the_references_dashboard_has_data_in_every_panel(stack: Stack) -> None:
    found = reference_queries()
    assert len(found) >= 14
    assert _empty(stack, found) == {}


def test_our_dashboard_has_data_in_every_panel_whose_feature_is_on(stack: Stack) -> None:
    found = list(panels.queries(panels.load()))
    empty = _empty(stack, found)
    titles = {title for title in empty
              if len(empty[title]) == sum(one == title for one, _ in found)}  # fmt: skip
    assert titles == set(EMPTY), {title: empty[title] for title in titles ^ set(EMPTY)}
    print({title: empty[title] for title in set(empty) - titles})


def test_rules_are_evaluated(stack: Stack) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.port}/api/v1/rules") as answer:
        rules = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
    assert len(rules) == 15
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert recorded and all(stack.query(name) for name in recorded)
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert firing <= {"RadixLMRequestsAborted"}
