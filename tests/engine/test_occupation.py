"""Memory that is released and resumed, together with other features: tokens stay the same."""

from __future__ import annotations

import asyncio
import random
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import radixlm
from radixlm.base.errors import InvalidRequest
from radixlm.cuda_graphs.graphs import GraphSizes
from radixlm.engine import gpu
from radixlm.engine import load_engine as assembly
from radixlm.executor.interfaces import Graphs
from radixlm.weight_updates.registry import WeightsUpdate
from tests.fakes.device import SimulatedDevice
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny

PROMPTS = [[5, 9, 12, 40, 7, 7, 81], [3, 200, 17], [60 + i for i in range(40)]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
SMALL = {
    "enable_memory_saver": True,
    "max_total_tokens": 1024,
    "cpu_threads": 1,
    "random_seed": 1,
    "log_level": "error",
}
ORDERS: list[tuple[list[str], list[list[str] | None]]] = [
    (["kv_cache"], [None]),
    (["weights"], [["weights"]]),
    (["weights", "kv_cache", "cuda_graph"], [["weights"], ["kv_cache"], ["graphs"]]),
    (["weights", "kv_cache"], [["kv_cache"], ["weights"]]),
]


def tokens(engine: radixlm.Engine, **fields: Any) -> list[Any]:
    answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, **fields)
    return [one["output_ids"] for one in answers]


def check_orders(engine: radixlm.Engine, seed: int = 0, **fields: Any) -> None:
    """Release and resume in several orders; requests come before, between and after."""
    draw, wanted = random.Random(seed), tokens(engine, **fields)
    for released, resumed in ORDERS:
        if draw.random() < 0.5:
            assert tokens(engine, **fields) == wanted
        engine.release_memory_occupation(released)
        held = engine.submit({"input_ids": PROMPTS, "sampling_params": GREEDY, **fields})
        for tags in resumed:
            assert not held.done()
            engine.resume_memory_occupation(tags)
        assert [one["output_ids"] for one in held.result(60)] == wanted
    info = engine.get_server_info()["internal_states"][0]
    assert info["num_breaches"] == 0


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3", "NGRAM"])
def test_with_a_drafter(algorithm: str) -> None:
    with radixlm.Engine(**SMALL, speculative_algorithm=algorithm) as engine:
        check_orders(engine)


def test_with_adapters_and_tiers(tmp_path: Path) -> None:
    base = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2)
    adapter = str(write_adapter(base, tmp_path / "a"))
    more = {"enable_hierarchical_cache": True, "hicache_size": "1", "page_size": 16}
    with radixlm.Engine(model_path=str(base), lora_paths=[f"a={adapter}"], **more, **SMALL) as one:
        check_orders(one, lora_path=["a", None, "a"])
        wanted = tokens(one, lora_path="a")
        one.release_memory_occupation(["weights"])
        with pytest.raises(InvalidRequest, match="the weights are released"):
            one.load_lora_adapter("b", adapter)
        one.resume_memory_occupation()
        one.load_lora_adapter("b", adapter)
        assert tokens(one, lora_path="b") == wanted


def test_with_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    base = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2)
    with thread_engine(monkeypatch, model_path=str(base), tp_size=2, **SMALL) as engine:
        check_orders(engine)


@pytest.mark.parametrize(
    "stages", [([None], [None]), ([["kv_cache"], ["weights"]], [["weights"], ["kv_cache"]])]
)
def test_the_kit_of_the_reference(stages: tuple[list[Any], list[Any]]) -> None:
    """SGLang's test_release_memory_occupation: release in one or two stages, resume the weights,
    update them from tensors, resume the KV cache."""
    old, new = (cached_tiny("Qwen3ForCausalLM", seed=seed, num_hidden_layers=2) for seed in (0, 1))
    with radixlm.Engine(model_path=str(new), **SMALL) as fresh:
        wanted = tokens(fresh)
    with radixlm.Engine(model_path=str(old), **SMALL) as engine:
        assert tokens(engine) != wanted
        released, resumed = stages
        for tags in released:
            engine.release_memory_occupation(tags=tags)
        engine.resume_memory_occupation(tags=resumed[0])
        engine.update_weights_from_tensor(list(load_file(new / "model.safetensors").items()))
        for tags in resumed[1:]:
            engine.resume_memory_occupation(tags=tags)
        assert tokens(engine) == wanted


def test_recurrent_states_and_windows() -> None:
    for arch in ("Qwen3NextForCausalLM", "Gemma3ForCausalLM"):
        base = cached_tiny(arch)
        with radixlm.Engine(model_path=str(base), **SMALL) as engine:
            check_orders(engine)


def test_a_checkpoint_that_is_gone_leaves_the_weights_released(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2), tmp_path / "model")
    file, aside = folder / "model.safetensors", tmp_path / "aside"
    with radixlm.Engine(model_path=str(folder), **SMALL) as engine:
        wanted = tokens(engine)
        engine.release_memory_occupation()
        held = engine.submit({"input_ids": PROMPTS, "sampling_params": GREEDY})
        file.rename(aside)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="the weights stay released: "):
                engine.resume_memory_occupation()
        aside.rename(file)
        assert not held.done()
        engine.resume_memory_occupation()
        assert [one["output_ids"] for one in held.result(60)] == wanted


def test_nothing_comes_between_while_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another resume waits for the same reading; a release and an update are refused."""
    base, gate, fill = cached_tiny("Qwen3ForCausalLM"), threading.Event(), assembly.fill
    readings = []

    def slow(*args: Any) -> Any:
        readings.append(args)
        assert gate.wait(60)
        return fill(*args)

    with radixlm.Engine(model_path=str(base), **SMALL) as engine:
        wanted = tokens(engine)
        engine.release_memory_occupation()
        monkeypatch.setattr(assembly, "fill", slow)
        intake = engine._engine.intake

        async def meanwhile() -> None:
            resumes = [intake.occupation.resume(["weights"]), intake.occupation.resume()]
            both = asyncio.gather(*resumes)
            await asyncio.sleep(0)
            outcome = await intake.weights.update(WeightsUpdate(str(base)))
            assert "released weights are being read" in outcome.message
            with pytest.raises(InvalidRequest, match="weights are being read; try again"):
                await intake.occupation.release(["weights"])
            gate.set()
            await both

        engine._wait(meanwhile())
        assert len(readings) == 1 and tokens(engine) == wanted
        assert intake.occupation.released == ()


def test_an_update_of_released_weights_under_a_drafter() -> None:
    with radixlm.Engine(**SMALL, speculative_algorithm="EAGLE3") as engine:
        wanted = tokens(engine)
        engine.release_memory_occupation(["weights"])
        folder = engine.get_server_info()["model_path"]
        assert engine.update_weights_from_disk(folder)[0]
        engine.resume_memory_occupation()
        assert tokens(engine) == wanted


def test_what_keeps_its_weights_says_so() -> None:
    with radixlm.Engine(**SMALL, model_impl="transformers") as engine:
        wanted = tokens(engine)
        with pytest.raises(InvalidRequest, match="runs by transformers; 'kv_cache' can be"):
            engine.release_memory_occupation()
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation()
        assert tokens(engine) == wanted


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_on_a_device_storages_are_freed_and_graphs_recorded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A simulated one, which does its work as late as it may."""
    base = str(cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2))
    device, recorded = SimulatedDevice(1, eagerness=0.3), list[Any]()

    def record(runner: Any, sizes: GraphSizes, pads: bool) -> None:
        gpu.record_graphs(runner, sizes, pads)
        recorded.append(runner.recorded.plain.decodes)

    monkeypatch.setattr(assembly, "open_device", lambda config, rank: device)
    for module in ("limits", "parts"):
        monkeypatch.setattr(f"radixlm.engine.{module}.overlap_depth", lambda config, info: 1)
    monkeypatch.setattr(assembly, "_graph_sizes", lambda *args: GraphSizes((1, 4), (8,)))
    monkeypatch.setattr("radixlm.engine.assemble.record_graphs", record)
    options = SMALL | {"max_total_tokens": 256, "max_running_requests": 4}
    options["num_continuous_decode_steps"] = 1  # as on every device that may be late
    with radixlm.Engine(model_path=base, attention_backend="triton", **options) as engine:
        wanted = tokens(engine)
        runner = engine._engine._serving.scheduler.executor  # type: ignore[attr-defined]
        storages = [t.untyped_storage() for pool in runner.attn.pools for t in pool.tensors]
        engine.release_memory_occupation()
        assert type(runner.recorded) is Graphs
        assert not any(storage.nbytes() for storage in storages)
        engine.resume_memory_occupation(["weights"])
        assert len(recorded) == 1
        engine.resume_memory_occupation()
        assert len(recorded) == 2
        assert runner.recorded.plain.decodes is recorded[1]
        assert tokens(engine) == wanted
