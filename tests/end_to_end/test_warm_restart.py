"""--warm-restart: an engine that takes the place of a killed one has its prefix cache."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixlm.engine.model_info import ASSETS, ZOO
from tests.end_to_end.server import RunningServer
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny

FLAGS = ("--warm-restart", "--max-engine-restarts", "100", "--max-total-tokens", "8192")


def body(seed: int, num_tokens: int = 8, length: int = 200) -> dict[str, Any]:
    draw = random.Random(seed)
    ids = [draw.randrange(5, 245) for _ in range(length)]
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0},
    }


@pytest.fixture(
    scope="module",
    params=["Qwen3ForCausalLM", pytest.param("Gemma3ForCausalLM", marks=pytest.mark.slow)],
)
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with RunningServer(*FLAGS, model=str(cached_tiny(request.param))) as running:
        yield running


def kill(server: RunningServer, signum: int = signal.SIGKILL, rank: int = 0) -> None:
    engine = server.engines()[rank]
    engine.send_signal(signum)
    engine.wait(30)
    server.wait_ready()


def found_tokens(server: RunningServer) -> int:
    """As the log of the last start says."""
    return [int(n) for n in re.findall(r"(\d+) cached tokens were found", "".join(server.log))][-1]


def wait_kept(server: RunningServer) -> None:
    """Until every cached page has its checksum: a thread of low priority computes them."""
    server.wait_for(lambda: server.info()["memory_usage"]["kvcache_pending_pages"] == 0)


@pytest.mark.timeout(300)
def test_prompts_hit_after_a_kill(server: RunningServer) -> None:
    wanted = [server.post("/generate", **body(seed)).json() for seed in range(12)]
    for _ in range(2):
        wait_kept(server)
        kill(server)
        for seed, first in enumerate(wanted):
            again = server.post("/generate", **body(seed)).json()
            assert again["output_ids"] == first["output_ids"]
            assert again["meta_info"]["cached_tokens"] >= 192
    assert found_tokens(server) >= 12 * 192


@pytest.mark.timeout(300)
def test_streams_go_on_whatever_is_being_done(server: RunningServer) -> None:
    """Kills while prompts are computed and while tokens are."""
    bodies = [body(100 + i, 50, 160) for i in range(6)]
    wanted = [server.post("/generate", **one).json()["output_ids"] for one in bodies]
    server.post("/flush_cache")
    draw = random.Random(2)
    for _ in range(4):
        found: dict[int, list[int]] = {}

        def ask(index: int, found: dict[int, list[int]] = found) -> None:
            found[index] = server.post("/generate", **bodies[index]).json()["output_ids"]

        threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        threads[0].join(draw.uniform(0.0, 0.3))
        kill(server)
        for thread in threads:
            thread.join(60)
        assert [found.get(i) for i in range(len(bodies))] == wanted


@pytest.mark.timeout(300)
def test_a_process_that_broke_down_is_not_trusted(server: RunningServer) -> None:
    server.post("/generate", **body(1))
    kill(server, signal.SIGSEGV)
    assert server.post("/generate", **body(1)).json()["meta_info"]["cached_tokens"] == 0


@pytest.mark.timeout(300)
def test_damaged_memory_is_a_miss(server: RunningServer) -> None:
    wanted = [server.post("/generate", **body(seed)).json()["output_ids"] for seed in range(8)]
    draw = random.Random(3)
    for _ in range(3):
        engine = server.engine()
        engine.send_signal(signal.SIGSTOP)
        folder = Path(f"/proc/{server.process.pid}/fd")
        kept = next(p for p in folder.iterdir() if "radixlm-kv" in os.readlink(p))
        with kept.open("r+b") as file:
            size = file.seek(0, 2)
            for _ in range(2000):
                at = draw.randrange(2 << 20, size)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))
        kill(server)
        for seed, ids in enumerate(wanted):
            assert server.post("/generate", **body(seed)).json()["output_ids"] == ids


FEATURES = {
    "draft model": ("--speculative-algorithm", "STANDALONE", "radix-tiny-draft"),
    "eagle3": ("--speculative-algorithm", "EAGLE3", "radix-tiny-eagle3"),
    "states": (),
    "tiers": ("--enable-hierarchical-cache", "--hicache-ratio", "1"),
    "adapter": ("--lora-paths", "one"),
    "ranks": ("--tp-size", "2"),
    "stages": ("--pp-size", "2"),
    "attention groups": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
}
RANKS = ("ranks", "stages", "attention groups")
SLOW = ("stages", "attention groups")  # tests/engine/test_kept.py has their quick form


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "feature", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in FEATURES]
)
def test_prompts_hit_beside_another_feature(feature: str, tmp_path: Path) -> None:
    """What hit before a kill hits after it, with the same tokens."""
    flags = list(FEATURES[feature])
    arch = "Qwen3NextForCausalLM" if feature == "states" else "Qwen3ForCausalLM"
    model, adapter = cached_tiny(arch), None
    if "--speculative-algorithm" in flags:
        model, draft = ASSETS / "radix-tiny", ZOO / flags.pop()
        if not (model / "config.json").is_file() or not (draft / "config.json").is_file():
            pytest.skip("the bundled model or its drafts are not built")
        flags += ["--speculative-draft-model-path", str(draft), "--speculative-num-steps", "3"]
    elif feature == "adapter":
        adapter = "one"
        flags[-1] = f"one={write_adapter(model, tmp_path / 'one', 3, seed=1)}"

    def ask(server: RunningServer) -> list[tuple[list[int], int]]:
        answers = [
            server.post("/generate", **body(seed, 24), lora_path=adapter).json()
            for seed in range(4)
        ]
        return [(one["output_ids"], one["meta_info"]["cached_tokens"]) for one in answers]

    with RunningServer(*FLAGS, *flags, model=str(model)) as server:
        ask(server)
        before = ask(server)
        assert min(cached for _, cached in before) >= 128
        for rank in (0, -1) if feature in RANKS else (0,):
            wait_kept(server)
            kill(server, rank=rank)
            after = ask(server)
            assert [ids for ids, _ in after] == [ids for ids, _ in before]
            hits = [(a[1], b[1]) for a, b in zip(after, before, strict=True)]
            assert all(now >= then for now, then in hits), (hits, server.log[-60:])
