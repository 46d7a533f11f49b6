"""Prefill and decode servers as processes: what comes through a pair is what one server gives, also
when engines are killed; and SGLang's own router drives them."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.quick import slow_unless

pytestmark = pytest.mark.timeout(300)
ARGS = ("--max-total-tokens", "8192", "--max-engine-restarts", "50", "--enable-metrics",
        "--completion-template", "qwen_coder")  # fmt: skip
WORDS = "the capital of France is Paris 17 and 25 quick brown fox list code dog".split()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Pair:
    """A prefill and a decode server."""

    def __init__(self, prefill: RunningServer, decode: RunningServer, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port
        self.pool = ThreadPoolExecutor(16)

    def post(self, path: str = "/generate", **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Both answers to a body with the fields that a router adds."""
        body |= {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": random.getrandbits(63),
        }
        servers = self.prefill, self.decode
        calls = [self.pool.submit(server.post, path, **body) for server in servers]
        answers = [call.result(120) for call in calls]
        for answer in answers:
            assert answer.status_code == 200, answer.text
        first, second = (answer.json() for answer in answers)
        return first, second

    def metric(self, name: str, least: float) -> float:
        """A figure of the decode server, which comes with its heartbeat, once it is high enough."""
        deadline_s = time.monotonic() + 20
        while True:
            text = self.decode.client.get("/metrics").text
            found = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
            value = float(found[0].rpartition(" ")[2]) if found else 0.0
            if value >= least or time.monotonic() > deadline_s:
                return value
            time.sleep(0.1)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with _new_pair() as made:
        yield made


@contextlib.contextmanager
def _new_pair() -> Iterator[Pair]:
    port = _free_port()
    mode = "--disaggregation-mode"
    with contextlib.ExitStack() as stack:
        found = "--disaggregation-bootstrap-port", str(port)
        prefill = stack.enter_context(RunningServer(*ARGS, mode, "prefill", *found))
        decode = stack.enter_context(RunningServer(*ARGS, mode, "decode"))
        made = Pair(prefill, decode, port)
        yield made
        made.pool.shutdown(wait=False, cancel_futures=True)
        for server in (prefill, decode):
            assert "Traceback" not in "".join(server.log)


def _prompt(seed: int, words: int = 150) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def test_decode_computes_a_page_of_the_prompt_and_all_of_the_answer(pair: Pair) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 12}
    for seed in range(4):
        text = _prompt(seed)
        asked: dict[str, Any] = {"text": text, "sampling_params": sampling}
        asked |= {"return_logprob": True, "logprob_start_len": 0}
        first, second = pair.post(**asked)
        # without the fields either server serves it whole
        whole = pair.prefill.post("/generate", **asked).json()
        assert second["text"] == whole["text"]
        meta, alone = second["meta_info"], whole["meta_info"]
        assert first["meta_info"]["completion_tokens"] == 1
        assert meta["prompt_tokens"] - meta["cached_tokens"] <= 16
        # as a router joins them
        merged = first["meta_info"]["input_token_logprobs"] + meta["input_token_logprobs"]
        assert merged == alone["input_token_logprobs"]
        assert meta["output_token_logprobs"] == alone["output_token_logprobs"]
    assert pair.metric("radixlm:kv_pulls_whole", 4) >= 4
    assert pair.metric("radixlm:kv_transfer_shm_bytes", 1) > 0


def test_drawn_requests_get_the_same_answers(pair: Pair) -> None:
    def draw(seed: int) -> dict[str, Any]:
        rng = random.Random(seed)
        sampling: dict[str, Any] = {
            "temperature": rng.choice([0, 0.9]),
            "max_new_tokens": rng.choice([1, 4, 10]),
            "sampling_seed": seed,
            "n": rng.choice([1, 1, 2]),
        }
        kind = rng.randrange(4)
        if kind == 0:
            sampling["regex"] = "[a-z]{3,9}"
        elif kind == 1:
            sampling["stop"] = [" the"]
        text = _prompt(seed % 7, rng.choice([1, 9, 40, 200]))
        return {"text": text, "sampling_params": sampling, "return_logprob": kind == 2}

    def facts(answer: Any) -> list[Any]:
        answers = answer if isinstance(answer, list) else [answer]
        return [(a["text"], a["meta_info"].get("output_token_logprobs")) for a in answers]

    bodies = [draw(seed) for seed in range(20)]
    with ThreadPoolExecutor(6) as threads:
        got = list(threads.map(lambda body: facts(pair.post(**body)[1]), bodies))
    want = [facts(pair.prefill.post("/generate", **body).json()) for body in bodies]
    assert got == want


def test_chat_and_lists_of_prompts(pair: Pair) -> None:
    messages = [{"role": "user", "content": _prompt(50)}]
    chat: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 8}
    _, second = pair.post("/v1/chat/completions", **chat)
    whole = pair.prefill.post("/v1/chat/completions", **chat).json()
    assert second["choices"] == whole["choices"]
    prompts = [_prompt(51), _prompt(52)]
    batch = {"prompt": prompts, "temperature": 0, "max_tokens": 6}
    fields = {
        "bootstrap_host": ["127.0.0.1"] * 2,
        "bootstrap_port": [pair.port] * 2,
        "bootstrap_room": [1, 2],
    }
    threads = [
        pair.pool.submit(server.post, "/v1/completions", **batch, **fields)
        for server in (pair.prefill, pair.decode)
    ]
    choices = threads[1].result(60).json()["choices"]
    assert threads[0].result(60).json()["usage"]["completion_tokens"] == 2
    assert choices == pair.prefill.post("/v1/completions", **batch).json()["choices"]


def _other_routes(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Bodies for the routes of llama.cpp, Ollama, Anthropic, and for Responses."""
    greedy = {"temperature": 0, "n_predict": 6, "ignore_eos": True}
    ollama = {"model": "m", "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    users = [[{"role": "user", "content": _prompt(seed + i)}] for i in range(2)]
    return [
        ("/completion", {"prompt": _prompt(seed + 2), **greedy}),
        ("/infill", {"input_prefix": _prompt(seed + 3), "input_suffix": " the", **greedy}),
        ("/api/chat", {"messages": users[0], **ollama}),
        ("/api/generate", {"prompt": _prompt(seed + 4), **ollama}),
        ("/v1/messages", {"messages": users[1], "model": "m", "max_tokens": 6, "temperature": 0}),
        ("/v1/responses", {"input": _prompt(seed + 5), "max_output_tokens": 6, "temperature": 0}),
    ]


def _count(answer: dict[str, Any]) -> int:
    """Tokens of an answer to one of ``_other_routes``."""
    counted = answer.get("usage", answer)
    names = ("tokens_predicted", "eval_count", "output_tokens")
    return next(int(counted[name]) for name in names if name in counted)


def test_other_routes_are_computed_in_pairs_too(pair: Pair) -> None:
    for path, body in _other_routes(60):
        first, second = pair.post(path, **body)
        whole = pair.prefill.post(path, **body).json()
        assert _count(first) == 1 and _count(second) > 1, path
        assert _told(second) == _told(whole), path
        if path == "/v1/responses":  # the decode server's is the answer
            both = ((pair.prefill, first), (pair.decode, second))
            kept = [one.client.get(f"{path}/{said['id']}").status_code for one, said in both]
            assert kept == [404, 200]


def test_warm_up_hosts_and_rooms_that_nobody_computes(pair: Pair) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 4}
    text = _prompt(60)
    want = pair.prefill.post("/generate", text=text, sampling_params=sampling).json()["text"]
    fields = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    warm = pair.decode.post("/generate", text=text, sampling_params=sampling, **fields)
    assert warm.json()["text"] == want
    text = _prompt(61)
    want = pair.prefill.post("/generate", text=text, sampling_params=sampling).json()["text"]
    pair.decode.client.post("/flush_cache")
    alone = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": 99}
    answer = pair.decode.post("/generate", text=text, sampling_params=sampling, **alone)
    assert answer.json()["text"] == want


@pytest.mark.parametrize(
    ("after_s", "victim"),
    slow_unless(
        lambda *case: case in ((0.1, "prefill"), (0.4, "decode")),
        itertools.product((0.0, 0.1, 0.4, 1.0), ("prefill", "decode")),
    ),
)
def test_a_killed_engine_changes_no_answer(pair: Pair, after_s: float, victim: str) -> None:
    """At the four times the requests wait for pages, are transferred, or decode."""
    seeds = [int(1000 * after_s) + 100 * len(victim) + i for i in range(6)]
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {"text": _prompt(seed, 300), "sampling_params": sampling} for seed in seeds
    ]
    server: RunningServer = getattr(pair, victim)
    engine, calls = server.engine(), list[Any]()

    def decode(body: dict[str, Any]) -> str:
        # the prefill server's answer is the router's affair, decode's the client's
        room = random.getrandbits(63)
        body = body | {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port}
        body["bootstrap_room"] = room
        calls.append(pair.pool.submit(pair.prefill.post, "/generate", **body))
        answer = pair.decode.post("/generate", **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["text"])

    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(decode, body) for body in bodies]
        time.sleep(after_s)
        engine.kill()
        got = [answer.result(150) for answer in answers]
    for call in calls:
        call.result(150)
    server.wait_ready()
    want = [pair.prefill.post("/generate", **body).json()["text"] for body in bodies]
    assert got == want


@pytest.mark.slow
@pytest.mark.parametrize("state", ["bootstrap", "transfer", "first token", "decode"])
def test_a_killed_prefill_server_changes_no_answer(state: str) -> None:
    """kill -9 of the whole server, and a request after it."""
    with _new_pair() as pair:
        sampling = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 40}
        body: dict[str, Any] = {"text": _prompt(9, 300), "sampling_params": sampling}
        want = pair.decode.post("/generate", **body).json()["text"]
        assert pair.decode.client.post("/flush_cache").status_code == 200
        victims = (pair.prefill.process, *pair.prefill.engines())

        def kill() -> None:
            for process in victims:
                process.kill()

        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port}
        asked = body | place | {"bootstrap_room": random.getrandbits(63), "stream": True}
        if state != "bootstrap":  # else no request comes to the prefill server
            pair.pool.submit(pair.prefill.post, "/generate", **asked)

        def read() -> list[Any]:
            events: list[Any] = []
            with pair.decode.client.stream("POST", "/generate", json=asked) as stream:
                for line in stream.iter_lines():
                    events += _events(line)
                    if len(events) == {"first token": 1, "decode": 10}.get(state):
                        kill()
            return events

        call = pair.pool.submit(read)
        if state in ("bootstrap", "transfer"):
            names = ("num_waiting_reqs", "num_running_reqs")
            pair.decode.wait_for(lambda: call.done() or any(map(pair.decode.info().get, names)), 60)
            kill()
        assert call.result(150)[-1]["text"] == want
        again = asked | {"bootstrap_room": random.getrandbits(63), "stream": False}
        assert pair.decode.post("/generate", **again).json()["text"] == want


@contextlib.contextmanager
def _router(pair: Pair, module: str, *flags: str) -> Iterator[str]:
    """Address of a router before the pair."""
    port = _free_port()
    command = [
        sys.executable, "-m", *module.split(), "--pd-disaggregation",
        "--prefill", pair.prefill.url, str(pair.port), "--decode", pair.decode.url,
        "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            assert process.poll() is None
            assert time.monotonic() < deadline_s, "the router did not start"
            threading.Event().wait(0.1)
        yield url
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def gateway(pair: Pair) -> Iterator[str]:
    with _router(pair, "radixlm router", "--prometheus-port", "-1") as url:
        yield url


@pytest.fixture(scope="module", params=["router", "mini_lb"])
def router(pair: Pair, request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of SGLang's router, or of its minimal balancer, before the pair."""
    if find_spec("sglang_router") is None:
        pytest.skip("pip install sglang-router==0.3.2")
    flags = ("--mini-lb",) if request.param == "mini_lb" else ()
    with _router(pair, "sglang_router.launch_router", *flags) as url:
        yield url


def test_a_foreign_router_drives_the_pair(pair: Pair, router: str) -> None:
    for seed in range(5):
        sampling = {"temperature": 0, "max_new_tokens": 6}
        body: dict[str, Any] = {"text": _prompt(70 + seed), "sampling_params": sampling}
        got = httpx.post(f"{router}/generate", json=body, timeout=60).json()
        want = pair.prefill.post("/generate", **body).json()
        assert got["text"] == want["text"]
        stream = httpx.post(f"{router}/generate", json=body | {"stream": True}, timeout=60).text
        assert f'"completion_tokens":{want["meta_info"]["completion_tokens"]}' in stream
        assert stream.rstrip().endswith("data: [DONE]")
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": _prompt(75)}], "n": 2}
    chat |= {"temperature": 0.8, "seed": 3, "max_tokens": 6}
    got = httpx.post(f"{router}/v1/chat/completions", json=chat, timeout=60).json()
    want = pair.prefill.post("/v1/chat/completions", **chat).json()
    assert _told(got) == _told(want)


def _told(answer: dict[str, Any]) -> Any:
    """What an answer says, without ids and times."""
    if "choices" in answer:
        return [(one.get("text"), one.get("message"), one["logprobs"]) for one in answer["choices"]]
    if "output" in answer:
        return [item["content"] for item in answer["output"]]
    if "meta_info" not in answer:  # llama.cpp's, Ollama's, Anthropic's
        names = ("content", "message", "response")
        return [_count(answer), *(answer[name] for name in names if name in answer)]
    meta = answer["meta_info"]
    names = ("input_token_logprobs", "output_token_logprobs", "completion_tokens", "finish_reason")
    return answer["text"], {name: meta.get(name) for name in names}


def _events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_the_gateway_gives_what_one_server_gives(pair: Pair, gateway: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 6}
    messages = [{"role": "user", "content": _prompt(80)}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": _prompt(81), "sampling_params": sampling}),
        ("/generate", {"text": _prompt(88), "sampling_params": sampling | {"beam_width": 3}}),
        ("/generate", {"text": _prompt(82), "sampling_params": sampling, "return_logprob": True,
                       "logprob_start_len": 0}),
        ("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 6, "n": 2,
                                  "logprobs": True}),
        ("/v1/completions", {"prompt": [_prompt(83), _prompt(84)], "temperature": 0,
                             "max_tokens": 6}),
    ]  # fmt: skip
    bodies += _other_routes(86)
    for path, body in bodies:
        got = httpx.post(f"{gateway}{path}", json=body, timeout=60)
        assert got.status_code == 200, got.text
        whole = pair.prefill.post(path, **body).json()
        assert _told(got.json()) == _told(whole), path


def test_the_gateway_streams_what_one_server_streams(pair: Pair, gateway: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 8}
    body: dict[str, Any] = {"text": _prompt(85), "sampling_params": sampling, "stream": True}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    got = httpx.post(f"{gateway}/generate", json=body, timeout=60).text
    want = pair.prefill.post("/generate", **body).text
    assert got.rstrip().endswith("data: [DONE]")
    assert _told(_events(got)[-1]) == _told(_events(want)[-1])
    assert "bootstrap_room" not in got


def test_a_stream_of_the_gateway_outlives_an_engine(pair: Pair, gateway: str) -> None:
    for seed, victim in ((90, pair.decode), (91, pair.prefill)):
        messages = [{"role": "user", "content": _prompt(seed, 300)}]
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 40}
        body |= {"ignore_eos": True}
        want = pair.prefill.post("/v1/chat/completions", **body).json()
        engine = victim.engine()
        call = pair.pool.submit(
            httpx.post, f"{gateway}/v1/chat/completions", json=body | {"stream": True}, timeout=120
        )
        engine.kill()
        events = _events(call.result(150).text)
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        assert text == want["choices"][0]["message"]["content"]
        victim.wait_ready()


def test_streams_of_the_gateway_outlive_a_decode_server(pair: Pair) -> None:
    """kill -9 of a whole server, amid drawn tokens: the other decode server says the same."""
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": _prompt(seed)}], "temperature": 0.8,
         "seed": seed, "max_tokens": 150, "ignore_eos": True, "logprobs": True, "stream": True}
        for seed in range(4)
    ]  # fmt: skip

    def told(text: str) -> tuple[str, list[Any]]:
        choices = [event["choices"][0] for event in _events(text) if event["choices"]]
        tokens = [one for c in choices if c["logprobs"] for one in c["logprobs"]["content"]]
        return "".join(c["delta"].get("content") or "" for c in choices), tokens

    want = [told(pair.prefill.post("/v1/chat/completions", **body).text) for body in bodies]
    with RunningServer(*ARGS, "--disaggregation-mode", "decode") as second:
        flags = ("--prometheus-port", "-1", "--policy", "round_robin", "--decode", second.url)
        with _router(pair, "radixlm router", *flags) as url:
            ready = f"{url}/readiness"
            second.wait_for(lambda: httpx.get(ready).json().get("healthy_workers") == 3, 60)
            calls = [
                pair.pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=120)
                for body in bodies
            ]
            second.wait_for(lambda: second.info().get("num_running_reqs", 0) > 0, 60)
            engines = second.engines()
            for process in (second.process, *engines):
                process.kill()
            assert [told(call.result(150).text) for call in calls] == want
            counted = httpx.get(f"{url}/metrics").text
            assert 'radix_router_streams_moved_total{result="resumed"}' in counted
