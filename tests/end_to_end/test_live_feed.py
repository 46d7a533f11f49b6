"""The live feed of a real server: kill -9 of the engine, the tree, the end."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.end_to_end.server import RunningServer

LIMIT_S = 120.0


class Watch:
    """A viewer in a thread that keeps what it is told."""

    def __init__(self, url: str, topics: str) -> None:
        self.events: list[tuple[str, Any]] = []
        self.is_over = threading.Event()
        self._url, self._params = f"{url}/live/events", {"topics": topics}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        name = ""
        with (
            contextlib.suppress(httpx.HTTPError),  # the server may be killed
            httpx.Client(timeout=LIMIT_S) as client,
            client.stream("GET", self._url, params=self._params) as response,
        ):
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                name = value if field == "event" else name
                if field == "data":
                    self.events.append((name, json.loads(value)))
        self.is_over.set()

    def all(self, topic: str) -> list[Any]:
        return [data for name, data in list(self.events) if name == topic]

    def row(self, rid: str) -> dict[str, Any]:
        """The last state of a request."""
        found = [row for rows in self.all("requests") for row in rows["rows"] if row["rid"] == rid]
        return found[-1] if found else {"spans": []}

    def steps(self) -> list[int]:
        return [number for event in self.all("steps") for number in event["index"]]

    def until(self, is_true: Any) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not is_true():
            assert time.monotonic() < deadline_s, self.events[-5:]
            time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    if not (ASSETS / DEFAULT_MODEL / "config.json").is_file():
        pytest.skip("the bundled model is not here")
    flags = "--num-continuous-decode-steps", "1"  # steps are counted
    with RunningServer("--max-total-tokens", "8192", "--ui-show-text", *flags) as made:
        yield made


def test_a_killed_engine_and_what_goes_on(server: RunningServer) -> None:
    watch = Watch(server.url, "head,requests,steps,deaths,log")
    answer: list[httpx.Response] = []

    def ask() -> None:
        sampling = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
        body = {"text": "Once", "rid": "held", "sampling_params": sampling, "stream": True}
        answer.append(server.post("/generate", **body))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    watch.until(lambda: watch.row("held").get("out", 0) > 3 and watch.steps())
    server.engine().send_signal(signal.SIGKILL)
    watch.until(lambda: watch.all("deaths"))
    last = watch.steps()[-1]
    asking.join(LIMIT_S)
    assert answer and answer[0].status_code == 200
    watch.until(lambda: watch.row("held").get("finish") and watch.all("deaths")[-1]["went_on"])
    row, death = watch.row("held"), watch.all("deaths")[-1]
    assert row["out"] == 400 and row["finish"] == "length"
    phases = [span[0] for span in row["spans"]]
    dead = phases.index("engine_dead")
    assert phases[:2] == ["queue", "prefill"] and phases[dead - 1] == "decode"
    assert phases[dead + 1] == "prefill" and phases[-1] == "decode"
    assert sum(span[3] for span in row["spans"] if span[0] == "decode") == 400
    assert death["why"] == "the engine: signal SIGKILL" and death["held"] == 1
    ((name, seconds),) = death["went_on"]
    assert name == row["id"] and seconds > 0
    # the new engine goes on in the ring of the one that died
    watch.until(lambda: watch.steps()[-1] > last + 10)
    numbers = watch.steps()
    assert numbers == sorted(set(numbers))
    assert watch.all("head")[-1]["deaths"] == 1
    lines = [line for event in watch.all("log") for line in event["lines"]]
    assert {line[2] for line in lines} == {"server", "engine"}
    steps = server.client.get("/live/request/held").json()["steps"]["0"]
    assert len(steps) >= 390


def test_the_tree_and_the_pages_are_those_of_the_engine(server: RunningServer) -> None:
    prompt = "A list of words: " + "one two three " * 30
    for _ in range(2):
        assert server.post("/generate", text=prompt, sampling_params={"max_new_tokens": 2})
    watch = Watch(server.url, "head,tree")
    # pages come with the engine's next report
    watch.until(
        lambda: watch.all("tree") and watch.all("head")[-1:] and watch.all("head")[-1]["pages"]
    )
    tree, size = watch.all("tree")[0], watch.all("head")[-1]["pages"]["size"]
    found = server.client.get("/live/tree", params={"text": prompt}).json()
    nodes = {node[0]: node for node in tree["nodes"]}
    assert found["tokens"] > 0 and all(serial in nodes for serial in found["path"])
    assert "".join(nodes[serial][7] for serial in found["path"]).count("one two three") > 5

    def is_settled() -> bool:
        """A heartbeat after the last request: its figures are those of an idle engine."""
        head = watch.all("head")[-1]
        return bool(head["running"] == 0 and head["pages"]["running"] == 0)

    watch.until(is_settled)
    pages, info = watch.all("head")[-1]["pages"], server.info()
    assert pages["total"] * size == info["max_total_num_tokens"]
    used = pages["total"] - pages["free"] - pages["cached_free"]
    assert used * size == info["num_used_tokens"] == 0
    # tails fill their pages in part
    cached = pages["cached_free"] + pages["cached_locked"]
    assert 0 < tree["total_tokens"] <= cached * size


def test_viewers_do_not_keep_the_server(server: RunningServer) -> None:
    watch = Watch(server.url, "head")
    watch.until(lambda: watch.all("head"))
    began_s = time.monotonic()
    assert server.terminate() == 0
    # --drain-timeout is 30 s
    assert time.monotonic() - began_s < 15 and watch.is_over.wait(5)
