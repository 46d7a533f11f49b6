"""A server that takes its weights from another one, with real processes: the same answers, and the
seed goes on serving."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

KEY = "seed-key"
FLAGS = ("--admin-api-key", KEY, "--max-total-tokens", "4096", "--skip-tokenizer-init")
WIDE = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 2048}


@pytest.fixture(scope="module")
def seed() -> Iterator[RunningServer]:
    with RunningServer(*FLAGS, model=str(cached_tiny("Qwen3ForCausalLM", **WIDE))) as running:
        yield running


def body(num_tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    return {"input_ids": [5, 9, 77, 31, 4, 60], "sampling_params": sampling, **more}


@pytest.mark.timeout(300)
def test_a_new_server_takes_the_weights_of_a_running_one(
    seed: RunningServer, tmp_path: Path
) -> None:
    wanted = seed.post("/generate", **body(100)).json()["output_ids"]
    streams: list[list[int]] = []
    is_over = threading.Event()

    def stream() -> None:
        """Streams one after the other, until the other server answers."""
        while not is_over.is_set():
            last: dict[str, Any] = {}
            with seed.client.stream("POST", "/generate", json=body(100, stream=True)) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        last = json.loads(line[6:])
            streams.append(last["output_ids"])

    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    port = seed.url.rpartition(":")[2]
    flags = ("--load-format", "remote_instance")
    flags += ("--remote-instance-weight-loader-seed-instance-ip", "127.0.0.1")
    flags += ("--remote-instance-weight-loader-seed-instance-service-port", port)
    environment = {"RADIXLM_WEIGHTS_KEY": KEY, "RADIXLM_REMOTE_CACHE": str(tmp_path)}
    try:
        with RunningServer(*FLAGS, *flags, environment=environment) as server:
            assert server.post("/generate", **body(100)).json()["output_ids"] == wanted
            # a restarted engine reads the same files of the seed again
            server.engine().kill()
            server.wait_for(lambda: not server.engines() or server.client.get("/ready").is_error)
            server.wait_ready()
            assert server.post("/generate", **body(100)).json()["output_ids"] == wanted
    finally:
        is_over.set()
        thread.join(60)
    assert streams
    assert all(tokens == wanted for tokens in streams)
    assert not list(tmp_path.rglob("*.safetensors"))
