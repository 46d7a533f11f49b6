"""The real server for operators and clients: faults, signals, invalid requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from radixlm.entrypoints.cli import main
from radixlm.entrypoints.profile import read
from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    with RunningServer(model=model) as running:
        yield running


def _body(seed: int, new: int = 40, **params: Any) -> dict[str, Any]:
    rng = random.Random(seed)
    ids = [rng.randrange(3, 250) for _ in range(rng.randint(1, 60))]
    sampling = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True, **params}
    return {"input_ids": ids, "sampling_params": sampling}


def _is_idle(server: RunningServer) -> bool:
    info = server.info()
    return info["num_running_reqs"] == 0 and info["num_waiting_reqs"] == 0


def _until_idle(server: RunningServer, timeout_s: float = 60.0) -> dict[str, Any]:
    deadline_s = time.monotonic() + timeout_s
    while not _is_idle(server):
        assert time.monotonic() < deadline_s, server.info()
        time.sleep(0.02)
    return server.info()


def test_stream_is_cumulative_and_equals_the_whole(server: RunningServer) -> None:
    body = _body(1)
    whole = server.post("/generate", **body).json()
    texts = []
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line[6:])["text"] for line in lines[:-1]]
    assert texts[-1] == whole["text"]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_greedy_alone_equals_greedy_among_64(server: RunningServer) -> None:
    alone = server.post("/generate", **_body(7)).json()["output_ids"]

    async def crowd() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:
            calls = [client.post("/generate", json=_body(s)) for s in [7, *range(100, 163)]]
            return [r.json()["output_ids"] for r in await asyncio.gather(*calls)]

    assert asyncio.run(crowd())[0] == alone


NONSENSE: list[tuple[str, bytes, dict[str, str]]] = [
    ("/generate", b"\xff\xfe garbage", {}),
    ("/generate", b"[1, 2]", {}),
    ("/generate", b'{"text": 5}', {}),
    ("/generate", b'{"input_ids": [999999]}', {}),
    ("/generate", b'{"input_ids": [1.5]}', {}),
    ("/generate", b'{"text": "a", "sampling_params": {"temperature": "hot"}}', {}),
    ("/generate", b'{"text": "a", "sampling_params": {"temperature": NaN}}', {}),
    ("/generate", b'{"text": "a", "sampling_params": {"max_new_tokens": -1}}', {}),
    ("/generate", b'{"input_ids": ' + json.dumps([5] * 400).encode() + b"}", {}),
    ("/v1/chat/completions", b'{"messages": []}', {}),
    ("/v1/chat/completions", b'{"model": "no such model", "messages": [{"role": "user"}]}', {}),
    ("/v1/chat/completions", b"x" * 10_000_000, {}),
    ("/v1/completions", b'{"prompt": "a", "logprobs": 100000}', {}),
    ("/v1/completions", b'{"prompt": "a", "priority": 0.5}', {}),
]
# harmless without the field, which the answer names as ignored
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "a", "nonsense": 1}, "nonsense"),
    ("/v1/completions", {"prompt": "a", "frobnicate": True}, "frobnicate"),
]


def test_nonsense_gets_4xx_and_leaks_nothing(server: RunningServer) -> None:
    before = _until_idle(server)
    rng = random.Random(5)

    async def fire() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:

            async def one(i: int) -> int:
                if rng.random() < 0.5:
                    if i % 8 == 0:
                        path, body, name = IGNORED[i // 8 % len(IGNORED)]
                        answer = await client.post(path, json=body)
                        assert answer.status_code == 200, answer.text
                        assert answer.headers["X-RadixLM-Ignored"] == name
                        return 0
                    path, content, headers = NONSENSE[i % len(NONSENSE)]
                    headers = {"Content-Type": "application/json", **headers}
                    answer = await client.post(path, content=content, headers=headers)
                    assert 400 <= answer.status_code < 500, (path, content[:80], answer.text)
                    assert answer.json()["error"]["message"]
                    return 0
                answer = await client.post("/generate", json=_body(i, new=rng.randint(1, 12)))
                assert answer.status_code == 200, answer.text
                return 1

            return await asyncio.gather(*(one(i) for i in range(200)))

    assert 40 < sum(asyncio.run(fire())) < 160
    after = _until_idle(server)
    server.post("/flush_cache")
    assert server.info()["num_used_tokens"] == 0
    assert after["num_breaches"] == before["num_breaches"] == 0


def test_client_that_leaves_frees_its_slot(server: RunningServer) -> None:
    body = {**_body(3, new=190), "stream": True}
    body["input_ids"] = body["input_ids"][:10]
    server.post("/slow_down", forward_sleep_time=0.5)
    try:
        with server.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # kept, because a dropped generator closes its stream
            next(lines)
            assert server.info()["num_running_reqs"] == 1
        left_s = time.monotonic()
        _until_idle(server)
        assert time.monotonic() - left_s < 45  # 190 steps of 0.5 s would take 95 s
    finally:
        server.post("/slow_down", forward_sleep_time=0)


def test_abort_by_id(server: RunningServer) -> None:
    server.post("/slow_down", forward_sleep_time=0.05)
    body = {**_body(4, new=150), "rid": "mine", "stream": True}
    body["input_ids"] = body["input_ids"][:10]
    try:
        with server.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.post("/abort_request", rid="mine").json()["num_aborted"] == 1
            events = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    finally:
        server.post("/slow_down", forward_sleep_time=0)


def test_weights_by_name(server: RunningServer) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    with safe_open(cached_tiny("Qwen3ForCausalLM") / "model.safetensors", "pt") as file:
        want = file.get_tensor(name)[:3].float().tolist()
    found = server.client.get("/get_weights_by_name", params={"name": name, "truncate_size": 3})
    assert found.json() == want
    missing = server.post("/get_weights_by_name", name="x")
    assert missing.status_code == 400 and "'x'" in missing.text
    assert server.info()["num_running_reqs"] == 0


def test_a_profile_of_a_running_server(server: RunningServer, tmp_path: Path) -> None:
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            server.post("/generate", **_body(1, new=8))

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    try:
        folder = ["--output-dir", str(tmp_path), "--num-steps", "2", "--timeout", "60"]
        assert main(["profile", "--url", server.url, *folder, "--profile-by-stage"]) == 0
    finally:
        done.set()
        asker.join(60)
    (made,) = tmp_path.iterdir()
    kinds = {path.name.partition("-TP-0")[2] for path in made.glob("*-TP-0*")}
    assert kinds == {"-EXTEND.trace.json.gz", "-DECODE.trace.json.gz"}
    steps = read(made / "steps.trace.json.gz")["traceEvents"]
    assert any(event["name"].startswith("step ") for event in steps)
    assert len(read(made / "merged.trace.json.gz")["traceEvents"]) > len(steps)


def test_engine_killed_in_mid_stream_is_not_noticed() -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    bodies = [
        _body(s, new=120, **({} if s % 2 else {"temperature": 1.0, "sampling_seed": s}))
        for s in range(12)
    ]
    with RunningServer("--max-engine-restarts", "10", model=model) as server:
        want = [server.post("/generate", **body).json()["output_ids"] for body in bodies]
        server.post("/slow_down", forward_sleep_time=0.1)

        async def crowd() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:

                async def kill() -> None:
                    for next_sleep_s in (0.1, 0.0):  # nobody waits behind the second death
                        await server.until_running(len(bodies))
                        victim = server.engine()
                        victim.kill()
                        async with asyncio.timeout(300):
                            while not [e for e in server.engines() if e.pid != victim.pid]:
                                await asyncio.sleep(0.05)
                            while (await client.get("/ready")).status_code != 200:
                                await asyncio.sleep(0.05)
                        await client.post("/slow_down", json={"forward_sleep_time": next_sleep_s})

                killer = asyncio.create_task(kill())
                calls = [client.post("/generate", json=body) for body in bodies]
                answers = await asyncio.gather(*calls)
                await killer
                return [a.json()["output_ids"] for a in answers]

        assert asyncio.run(crowd()) == want
        assert _until_idle(server)["num_breaches"] == 0
        assert server.terminate() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_drains_and_exits_0(signum: int) -> None:
    if signal.getsignal(signum) == signal.SIG_IGN:
        pytest.skip("these tests were started by nohup")
    model = str(cached_tiny("Qwen3ForCausalLM"))
    with RunningServer(model=model) as server:
        server.post("/slow_down", forward_sleep_time=0.02)
        body = {**_body(9, new=60), "stream": True}
        with server.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signum)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2][6:])
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert server.process.wait(120) == 0


def test_a_second_signal_tells_what_runs_and_exits_0() -> None:
    with RunningServer(model=str(cached_tiny("Qwen3ForCausalLM"))) as server:
        server.post("/slow_down", forward_sleep_time=0.5)
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(server.post, "/generate", **_body(9, new=100))
            body = {**_body(9, new=100), "stream": True}
            with server.client.stream("POST", "/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.wait_for(lambda: server.info()["num_running_reqs"] == 2)
                server.process.send_signal(signal.SIGTERM)
                server.wait_for(lambda: any("draining, 2 requests" in line for line in server.log))
                server.process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            end = json.loads(rest[-2][6:])["meta_info"]["finish_reason"]
            assert (end["status_code"], end["message"]) == (503, "the server shut down")
            answer = whole.result()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == "the server shut down"
        assert server.process.wait(120) == 0


def test_a_port_in_use_and_the_collector(server: RunningServer) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "radixlm", "serve", "--port", port]
    model = str(cached_tiny("Qwen3ForCausalLM"))
    done = subprocess.run(
        [*command, "--model-path", model], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 2, done.stderr
    assert f"--port {port}" in done.stderr and "--port 0" in done.stderr
    body = _body(3)
    before = server.post("/generate", **body).json()["output_ids"]
    assert server.client.post("/freeze_gc").status_code == 200
    assert server.post("/generate", **body).json()["output_ids"] == before


def test_bad_options_and_checkpoints_exit_2(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    cases = {
        ("--model-path", str(tmp_path)): "NoSuchForCausalLM",
        ("--model-path", "/nowhere"): "--model-path",
        ("--page-sise", "4"): "--page-size",
        ("--tp", "64"): "--tp-size: 64 ranks cannot share",
    }
    for args, word in cases.items():
        command = [sys.executable, "-m", "radixlm", "serve", "--port", "0", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 2, (args, done.stderr)
        assert word in done.stderr, done.stderr
