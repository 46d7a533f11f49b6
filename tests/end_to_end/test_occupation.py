"""/release_memory_occupation with real processes: resident memory falls, answers stay the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

# 16 KiB of KV a token and 60 MiB of weights
WIDE = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_attention_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "max_position_embeddings": 8192,
}
FLAGS = ("--enable-memory-saver", "--max-total-tokens", "8192")


def body(seed: int, length: int = 64, num_tokens: int = 8) -> dict[str, Any]:
    draw = random.Random(seed)
    ids = [draw.randrange(5, 245) for _ in range(length)]
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    return {"input_ids": ids, "sampling_params": sampling}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(*FLAGS, model=str(cached_tiny("Qwen3ForCausalLM", **WIDE))) as running:
        yield running


def resident(server: RunningServer) -> int:
    return sum(int(engine.memory_info().rss) for engine in server.engines())


def call(server: RunningServer, verb: str, *tags: str) -> None:
    answer = server.post(f"/{verb}_memory_occupation", **({"tags": tags} if tags else {}))
    assert (answer.status_code, answer.json()) == (200, None), answer.text


@pytest.mark.timeout(300)
def test_the_kv_cache_is_given_back_and_answers_stay(server: RunningServer) -> None:
    wanted = [server.post("/generate", **body(i)).json()["output_ids"] for i in range(3)]
    server.post("/generate", **body(0, 6000, 2))
    held = 6000 * 2 * 2 * 8 * 128 * 4  # tokens x layers x (K, V) x heads x channels x bytes
    assert server.post("/generate", **body(0, 6000, 2)).json()["meta_info"]["cached_tokens"] > 5900
    before = resident(server)
    call(server, "release", "kv_cache")
    assert before - resident(server) >= 0.95 * held > 90e6
    assert server.client.get("/health").json() == {"status": "released", "released": ["kv_cache"]}
    assert server.client.get("/health_generate").status_code == 200
    assert server.client.get("/ready").status_code == 503
    facts = server.client.get("/get_server_info").json()
    assert facts["released_memory"] == ["kv_cache"]
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(server.post("/generate", **body(0)).json()), daemon=True
    )
    thread.start()
    server.wait_for(lambda: server.info()["num_waiting_reqs"] == 1)  # it is held
    call(server, "release", "kv_cache")  # again: nothing happens
    assert not found
    call(server, "resume")
    thread.join(60)
    assert found[0]["output_ids"] == wanted[0]
    assert [server.post("/generate", **body(i)).json()["output_ids"] for i in range(3)] == wanted
    assert server.client.get("/ready").status_code == 200
    assert server.info()["num_breaches"] == 0


@pytest.mark.timeout(300)
def test_a_release_is_refused_while_requests_run(server: RunningServer) -> None:
    thread = threading.Thread(
        target=lambda: server.post("/generate", **body(1, 64, 2000)), daemon=True
    )
    thread.start()
    server.wait_for(lambda: server.info()["num_running_reqs"] == 1)
    refused = server.client.get("/release_memory_occupation?tags=kv_cache")
    assert refused.status_code == 400
    assert "1 requests run and 0 wait" in refused.json()["error"]["message"]
    server.post("/pause_generation", mode="in_place")
    refused = server.client.get("/release_memory_occupation?tags=kv_cache")
    assert "keep their KV" in refused.json()["error"]["message"]
    server.post("/pause_generation", mode="retract")
    call(server, "release", "kv_cache")
    server.post("/continue_generation")
    assert server.info()["num_running_reqs"] == 0
    call(server, "resume", "kv_cache")
    server.post("/abort_request", abort_all=True)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.timeout(300)
def test_an_engine_that_comes_after_a_kill_releases_again(server: RunningServer) -> None:
    wanted = server.post("/generate", **body(2)).json()["output_ids"]
    call(server, "release")
    engine = server.engine()
    engine.kill()
    engine.wait(30)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(server.post("/generate", **body(2)).json()), daemon=True
    )
    thread.start()
    server.wait_for(lambda: server.info().get("num_waiting_reqs") == 1)
    assert server.client.get("/get_server_info").json()["released_memory"]
    assert not found
    call(server, "resume")
    thread.join(60)
    assert found[0]["output_ids"] == wanted


def test_unknown_tags_are_refused(server: RunningServer) -> None:
    for verb in ("release", "resume"):
        answer = server.post(f"/{verb}_memory_occupation", tags=["kv"])
        assert answer.status_code == 400
        assert "'kv' is none of weights, kv_cache, cuda_graph" in answer.text
