"""A whole engine on a simulated asynchronous device, with GPU attention in Triton's interpreter:
one step ahead, decode steps replayed as graphs over padded sizes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import radixlm
from radixlm.cuda_graphs.graphs import GraphSizes
from radixlm.engine import gpu
from radixlm.engine import load_engine as assembly
from radixlm.speculative.drafter import Proposal
from radixlm.speculative.lengths import DraftLength
from radixlm.speculative.ngram import NgramDrafter
from tests.fakes.device import SimulatedDevice
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

PROMPTS = [[5, 9, 12, 40, 7, 7, 81], [3, 200, 17], [60 + i for i in range(19)]]
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}'


def _answers(folder: object, is_quick: bool, **options: Any) -> list[Any]:
    with radixlm.Engine(
        model_path=str(folder),
        cpu_threads=1,
        random_seed=1,
        log_level="error",
        max_total_tokens=256,
        max_running_requests=4,
        chunked_prefill_size=16,
        num_continuous_decode_steps=1,  # as on every device that may be late
        **options,
    ) as engine:
        new = 3 if is_quick else 6
        greedy = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        seeded = {"temperature": 1.0, "top_p": 0.8, "sampling_seed": 4, "max_new_tokens": new}
        if is_quick:
            got = engine.generate(input_ids=PROMPTS[:2], sampling_params=[greedy, seeded])
            return [one["output_ids"] for one in got]
        json = {"temperature": 0.0, "max_new_tokens": 12, "json_schema": SCHEMA}
        first = engine.generate(input_ids=PROMPTS, sampling_params=greedy)
        again = engine.generate(input_ids=PROMPTS[:2], sampling_params=[seeded, json])
        return [got["output_ids"] for got in (*first, *again)]


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("Qwen3ForCausalLM", GraphSizes((3,), (10, 12))),
        pytest.param("Qwen3ForCausalLM", GraphSizes((1, 2, 4), (8, 16)), marks=pytest.mark.slow),
        pytest.param("Gemma3ForCausalLM", GraphSizes((1, 2, 4), (8, 16)), marks=pytest.mark.slow),
    ],
)
def test_an_engine_ahead_of_its_device_gives_the_same_tokens(
    architecture: str, sizes: GraphSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, is_quick = cached_tiny(architecture, num_hidden_layers=2), len(sizes.decodes) == 1
    want = _answers(folder, is_quick, attention_backend="torch_native")
    device, replayed = _late(monkeypatch, 1, sizes, "plain")
    assert _answers(folder, is_quick, attention_backend="triton") == want
    decodes, prompts = ({size for size, kind in replayed if kind == is_of} for is_of in (1, 0))
    assert decodes and set(sizes.decodes) >= decodes
    assert prompts and set(sizes.prompts) >= prompts
    assert device.most_waiting > 1


def test_graphs_of_drafted_rows_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """N-gram drafts are verified in graphs of two widths; the device does its work late."""
    folder = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2)
    wanted = _answers(folder, True, attention_backend="torch_native")
    device, replayed = SimulatedDevice(2, eagerness=0.3), list[tuple[int, int]]()

    def record(runner: Any, sizes: GraphSizes, pads: bool) -> None:
        gpu.record_graphs(runner, sizes, pads)
        plain = runner.recorded.plain
        for width, graphs in {1: plain.decodes, **plain.drafts}.items():
            _note_replays(graphs, width, replayed)

    monkeypatch.setattr(assembly, "open_device", lambda config, rank: device)
    monkeypatch.setattr(assembly, "_graph_sizes", lambda *args: GraphSizes((1, 4)))
    monkeypatch.setattr("radixlm.engine.assemble.record_graphs", record)
    monkeypatch.setattr(DraftLength, "room", lambda self, rows, tokens: self.max_drafts)
    monkeypatch.setattr(NgramDrafter, "propose", _propose)
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    assert _answers(folder, True, attention_backend="triton", **options) == wanted
    assert {width for _, width in replayed} > {1}


def _with_adapters(folders: list[Path], **options: Any) -> list[list[int]]:
    """Three adapters, of which two may meet; one of them comes later, in the place of another."""
    greedy = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    with radixlm.Engine(
        model_path=str(cached_tiny("Qwen3ForCausalLM", num_hidden_layers=1)), cpu_threads=1,
        random_seed=1, log_level="error", max_total_tokens=256, max_running_requests=4,
        chunked_prefill_size=16, max_loras_per_batch=2, num_continuous_decode_steps=1,
        lora_paths=[f"a{number}={folder}" for number, folder in enumerate(folders[:2])], **options,
    ) as engine:  # fmt: skip
        found = []
        for names in ([None, "a0", "a1"], ["a1", "a2", "a0"], ["a2", None, "a2"]):
            if names[1] == "a2":
                engine.load_lora_adapter("a2", str(folders[2]))
            got = engine.generate(input_ids=PROMPTS, sampling_params=greedy, lora_path=names)
            found += [one["output_ids"] for one in got]
            if names[0] == "a1":
                engine.unload_lora_adapter("a0")
    return found


def test_graphs_of_steps_with_adapters_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of decodes and parts of prompts; what is loaded later runs in the same graphs."""
    base = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=1)
    folders = [write_adapter(base, tmp_path / f"{r}", r, seed=r) for r in (3, 16, 20)]
    want = _with_adapters(folders, attention_backend="torch_native")
    _, replayed = _late(monkeypatch, 3, GraphSizes((3,), (16,), True), "adapted")
    kernels = [f"{op}=triton" for op in ("pack_adapter", "lora_rows", "lora_slots")]
    assert _with_adapters(folders, attention_backend="triton", kernel=kernels) == want
    assert {(3, 1), (16, 0)} == set(replayed)
    assert len({str(tokens) for tokens in want}) == len(want)  # every adapter has an effect


def _late(
    monkeypatch: pytest.MonkeyPatch, seed: int, sizes: GraphSizes, family: str
) -> tuple[SimulatedDevice, list[tuple[int, int]]]:
    """Engines run one step ahead of a late device; the graphs of a family that they replay: (size,
    1 for decodes or 0 for parts of prompts)."""
    device, replayed = SimulatedDevice(seed, eagerness=0.3), list[tuple[int, int]]()

    def record(runner: Any, sizes: GraphSizes, pads: bool) -> None:
        gpu.record_graphs(runner, sizes, pads)
        graphs = getattr(runner.recorded, family)
        _note_replays(graphs.decodes, 1, replayed)
        _note_replays(graphs.prompts, 0, replayed)

    monkeypatch.setattr(assembly, "open_device", lambda config, rank: device)
    for module in ("limits", "parts"):
        monkeypatch.setattr(f"radixlm.engine.{module}.overlap_depth", lambda config, info: 1)
    monkeypatch.setattr(assembly, "_graph_sizes", lambda *args: sizes)
    monkeypatch.setattr("radixlm.engine.assemble.record_graphs", record)
    return device, replayed


def _note_replays(graphs: Any, width: int, replayed: list[tuple[int, int]]) -> None:
    replay = graphs.replay
    graphs.replay = lambda size: (replayed.append((size, width)), replay(size))[1]


def _propose(drafter: Any, rid: str, max_tokens: int) -> Proposal:
    """Any tokens, another number of them each time, of which few are right."""
    count = (len(rid) + len(drafter.__dict__.setdefault("calls", []))) % (max_tokens + 1)
    drafter.calls.append(count)
    tokens = np.array([7, 81, 3, 5][:count], np.int32)
    return Proposal(tokens, np.full(len(tokens), 0.99, np.float32))
