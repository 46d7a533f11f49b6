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
LONG = 3000  # tokens: more than a chunk of a prompt
# of so many: layers x (K, V) x heads x channels x bytes
HELD = LONG * 2 * 2 * 8 * 128 * 4
# of each layer: attention 4 x 1024 x 1024, mlp 3 x 1024 x 1024
WEIGHTS = 2 * 7 * 1024 * 1024 * 4
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
    server.post("/generate", **body(0, LONG, 2))
    again = server.post("/generate", **body(0, LONG, 2)).json()
    assert again["meta_info"]["cached_tokens"] > LONG - 100
    before = resident(server)
    call(server, "release", "kv_cache")
    assert before - resident(server) >= 0.95 * HELD
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
def test_weights_and_kv_cache_are_given_back(server: RunningServer) -> None:
    """In the order of reinforcement learning, too: the weights come back before the KV cache."""
    wanted = [server.post("/generate", **body(i)).json()["output_ids"] for i in range(3)]
    weights = int(server.client.get("/get_server_info").json()["engine"]["weight_bytes"])
    for orders in ([()], [("weights",), ("kv_cache", "cuda_graph")]):
        server.post("/generate", **body(0, LONG, 2))
        before = resident(server)
        call(server, "release")
        assert before - resident(server) >= 0.95 * (weights + HELD)
        for tags in orders:
            assert server.client.get("/ready").status_code == 503
            call(server, "resume", *tags)
        found = [server.post("/generate", **body(i)).json() for i in range(3)]
        assert [one["output_ids"] for one in found] == wanted
        assert found[0]["meta_info"]["cached_tokens"] == 0  # an empty cache


@pytest.mark.timeout(300)
def test_each_tag_gives_back_its_own_memory(server: RunningServer) -> None:
    """What steps have left on the heap goes with the first release, so that the fall at the second
    is of its tag alone."""
    weights = int(server.client.get("/get_server_info").json()["engine"]["weight_bytes"])
    own, kv = ("weights", weights), ("kv_cache", HELD)
    for (first, _), (second, size), length in [(own, kv, LONG), (kv, own, 64)]:
        server.post("/generate", **body(0, length, 2))  # the step program's memory grows with it
        call(server, "release", first)
        before = resident(server)
        call(server, "release", second)
        assert 0.95 * size <= before - resident(server) <= 1.5 * size  # whole pages of 2 MiB
        call(server, "resume")


@pytest.mark.timeout(300)
def test_prefixes_outlive_a_release_of_the_weights(server: RunningServer) -> None:
    wanted = server.post("/generate", **body(5)).json()
    before = resident(server)
    call(server, "release", "weights")
    assert before - resident(server) > 0.9 * WEIGHTS
    call(server, "resume", "weights")
    found = server.post("/generate", **body(5)).json()
    assert found["output_ids"] == wanted["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 63


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


def is_sleeping(server: RunningServer) -> bool:
    return bool(server.client.get("/is_sleeping").json()["is_sleeping"])


@pytest.mark.timeout(300)
def test_sleep_and_wake_up(server: RunningServer) -> None:
    """vLLM's routes; what happens to a request that runs, by mode."""
    wanted = server.post("/generate", **body(1, 64, 200)).json()["output_ids"]
    for query, reason, end in [
        ("level=1&mode=keep", "length", wanted),
        ("level=1&mode=wait", "length", wanted),
        ("level=0", "length", wanted),
        ("", "abort", None),
    ]:
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda found=found: found.append(
                server.post("/generate", **body(1, 64, 200)).json()
            ),
            daemon=True,
        )
        thread.start()
        server.wait_for(lambda: server.info()["num_running_reqs"] == 1)
        answer = server.client.post(f"/sleep?{query}")
        assert (answer.status_code, answer.content) == (200, b"")
        assert is_sleeping(server)
        if "level=0" not in query:
            assert server.client.post("/wake_up?tags=kv_cache&tags=cuda_graph").status_code == 200
            assert is_sleeping(server)  # without weights
        assert server.client.post("/wake_up").status_code == 200
        assert not is_sleeping(server)
        thread.join(60)
        assert found[0]["meta_info"]["finish_reason"]["type"] == reason
        assert end is None or found[0]["output_ids"] == end
    for query in ("level=3", "mode=nap", "level=x"):
        assert server.client.post(f"/sleep?{query}").status_code == 400


@pytest.mark.timeout(300)
def test_after_level_2_the_weights_wait_for_an_update(server: RunningServer) -> None:
    wanted = server.post("/generate", **body(2)).json()["output_ids"]
    server.client.post("/sleep?level=2")
    server.client.post("/wake_up?tags=weights")
    assert server.client.get("/get_server_info").json()["released_memory"][0] == "weights"
    server.client.post("/wake_up")
    assert server.client.get("/get_server_info").json()["released_memory"] == ["weights"]
    ready = server.client.get("/ready")
    assert ready.status_code == 503
    assert "an update of the weights brings them back" in ready.text
    assert is_sleeping(server)
    call(server, "resume", "weights")  # or the old ones do
    assert not is_sleeping(server)
    assert server.post("/generate", **body(2)).json()["output_ids"] == wanted


@pytest.mark.timeout(300)
def test_weights_may_be_updated_while_they_are_released(server: RunningServer) -> None:
    """As reinforcement learning does; in each state the answers are those of a plain update."""
    own, other = (str(cached_tiny("Qwen3ForCausalLM", seed=seed, **WIDE)) for seed in (0, 1))
    first = server.post("/generate", **body(2)).json()["output_ids"]

    def update(path: str) -> None:
        answer = server.post("/update_weights_from_disk", model_path=path).json()
        assert answer["success"], answer

    update(other)
    wanted = server.post("/generate", **body(2)).json()["output_ids"]
    assert wanted != first
    for tags in (("kv_cache",), ("weights",), ()):
        update(own)
        assert server.post("/generate", **body(2)).json()["output_ids"] == first
        call(server, "release", *tags)
        update(other)
        assert server.client.get("/ready").status_code == 503
        call(server, "resume")
        assert server.post("/generate", **body(2)).json()["output_ids"] == wanted
        call(server, "release")  # what comes back is what was served, not the checkpoint
        call(server, "resume")
        assert server.post("/generate", **body(2)).json()["output_ids"] == wanted
    server.client.post("/sleep?level=2")
    update(own)
    server.client.post("/wake_up?tags=kv_cache&tags=cuda_graph")
    assert not is_sleeping(server)
    assert server.post("/generate", **body(2)).json()["output_ids"] == first


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [("--tp-size", "2"), ("--warm-restart",)])
def test_memory_of_all_processes_falls(flags: tuple[str, ...]) -> None:
    """Of two ranks; and of pools in memory that the server keeps."""
    model = str(cached_tiny("Qwen3ForCausalLM", **WIDE))
    with RunningServer(*FLAGS, *flags, model=model) as several:
        weights = int(several.client.get("/get_server_info").json()["engine"]["weight_bytes"])
        weights *= len(several.engines())  # of each rank
        wanted = several.post("/generate", **body(1)).json()["output_ids"]
        several.post("/generate", **body(0, LONG, 2))
        before = resident(several)
        call(several, "release")
        assert before - resident(several) >= 0.95 * (weights + HELD)
        several.engine().kill()
        several.wait_for(lambda: several.info().get("num_steps") == 0)
        call(several, "resume")
        again = several.post("/generate", **body(1)).json()
        assert (again["output_ids"], again["meta_info"]["cached_tokens"]) == (wanted, 0)


def test_without_the_flag_nothing_is_released() -> None:
    with RunningServer("--max-total-tokens", "512") as plain:
        answer = plain.post("/release_memory_occupation")
        assert answer.status_code == 400
        assert "--enable-memory-saver" in answer.json()["error"]["message"]
        assert plain.client.post("/sleep").status_code == 400
        assert not is_sleeping(plain)
        assert plain.client.get("/ready").status_code == 200
