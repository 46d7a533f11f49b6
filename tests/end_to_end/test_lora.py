"""Adapters of a server whose engine dies: streams go on, loads are known to the next engine."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny

ARCH = "Qwen3ForCausalLM"
IDS = [[5 + (seed * 11 + i * 7) % 300 for i in range(20 + seed)] for seed in range(3)]
NEW = 80
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    root, base = tmp_path_factory.mktemp("adapters"), cached_tiny(ARCH)
    for i in range(2):
        write_adapter(base, root / f"a{i}", 3 + 2 * i, seed=i)
    flags = ("--max-engine-restarts", "20", "--lora-paths", f"a0={root / 'a0'}")
    with RunningServer(*flags, model=str(base)) as running:
        body = {"lora_name": "a1", "lora_path": str(root / "a1")}
        assert running.post("/load_lora_adapter", **body).status_code == 200
        tensors = (root / "a1" / "adapter_model.safetensors").read_bytes()
        answer = running.post(
            "/load_lora_adapter_from_tensors", lora_name="sent",
            config_dict=json.loads((root / "a1" / "adapter_config.json").read_text()),
            serialized_named_tensors=base64.b64encode(tensors).decode(),
        )  # fmt: skip
        assert answer.json()["loaded_adapters"]["sent"] == "tensors"
        yield running, root


def body(prompt: int) -> dict[str, Any]:
    adapter = (None, "a0", "a1")[prompt]
    return {"input_ids": IDS[prompt], "sampling_params": GREEDY, "lora_path": adapter}


def test_streams_go_on_after_a_kill(server: tuple[RunningServer, Path]) -> None:
    running, _ = server
    wanted = [running.post("/generate", **body(i)).json()["output_ids"] for i in range(3)]
    assert len({str(tokens) for tokens in wanted}) == 3
    running.post("/slow_down", forward_sleep_time=0.2)
    found: dict[int, Any] = {}

    def call(index: int) -> None:
        found[index] = running.post("/generate", **body(index)).json()

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    running.wait_for(lambda: running.info().get("num_running_reqs", 0) == 3)
    running.engine().send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert [found[i]["output_ids"] for i in range(3)] == wanted
    sent = running.post("/generate", **{**body(2), "lora_path": "sent"}).json()
    assert sent["output_ids"] == wanted[2]  # read again from where intake has put it
    assert running.post("/unload_lora_adapter", lora_name="a1").json()[
        "loaded_adapters"
    ].keys() == {"a0", "sent"}


def test_files_that_change_while_the_engine_is_dead(server: tuple[RunningServer, Path]) -> None:
    running, root = server
    folder = root / "moving"
    shutil.copytree(root / "a1", folder)
    load = {"lora_name": "m", "lora_path": str(folder)}
    assert running.post("/load_lora_adapter", **load).status_code == 200
    one = {**body(0), "lora_path": "m"}
    before = running.post("/generate", **one).json()["output_ids"]
    shutil.copytree(root / "a0", folder, dirs_exist_ok=True)
    running.engine().send_signal(signal.SIGKILL)
    running.wait_for(lambda: running.client.get("/ready").status_code != 200)
    running.wait_ready()
    after = running.post("/generate", **one).json()["output_ids"]
    assert (
        after
        == running.post(
            "/generate",
            **one,
        ).json()["output_ids"]
        != before
    )
    assert after == running.post("/generate", **{**one, "lora_path": "a0"}).json()["output_ids"]
