"""Models that decode without graphs are exactly those whose steps read values from the device. The
simulated device refuses such reads during capture, as CUDA does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.decoder_configs import DECODER_CONFIGS
from tests.fakes.device import SimulatedDevice, SimulatedGraph
from tests.fakes.tiny_checkpoint import ARCHITECTURES, TINY

pytest.importorskip("triton")

from radixlm.config.parser import parse
from radixlm.cuda_graphs.graphs import NO_GRAPHS, GraphSizes
from radixlm.engine import gpu
from radixlm.engine.assemble import assemble
from radixlm.engine.model_info import resolved
from radixlm.executor.runner import Runner
from radixlm.wire.channel import MemoryChannel

READS = ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero")


class StrictDevice(SimulatedDevice):
    """Refuses synchronisations during capture."""

    def capture(self, work: Callable[[], None]) -> SimulatedGraph:
        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

        with pytest.MonkeyPatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, refuse)
            return super().capture(work)


def opened(folder: Path, arch: str, *more: str) -> tuple[Any, Runner, list[str]]:
    """Configuration and runner of a model with random weights on the Triton backend, and why it has
    no graphs."""
    config = {
        **TINY,
        **ARCHITECTURES.get(arch, {}),
        **DECODER_CONFIGS.get(arch, {}),
        "num_hidden_layers": 2,
    }
    config |= {"architectures": [arch], "model_type": MODEL_TYPES[arch]}
    known = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(known))
    flags = ["--model-path", str(folder), "--device", "cpu", "--skip-tokenizer-init"]
    flags += ["--load-format", "dummy", "--attention-backend", "triton", "--dtype", "float32"]
    flags += [
        "--max-total-tokens",
        "64",
        "--cpu-threads",
        "1",
        "--max-running-requests",
        "2",
        *more,
    ]
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        made: list[Any] = []
        patch.setattr(
            "radixlm.engine.load_engine._graph_sizes",
            lambda config, info, *parts: made.append((config, *parts)) or NO_GRAPHS,
        )
        config_, info = resolved(*parse(flags, prog="test"))
        replica = assemble(config_, info, MemoryChannel.pair()[1])
        found.append(gpu.why_no_graphs(*made[0]))
    runner = replica.scheduler.executor
    assert isinstance(runner, Runner)
    return replica, runner, found


MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GptOssForCausalLM": "gpt_oss",
}


@pytest.mark.parametrize("arch", MODEL_TYPES)
def test_models_without_graphs_are_known_in_advance(
    arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica, runner, (why,) = opened(tmp_path, arch)
    runner.device = StrictDevice(eagerness=1.0)
    with caplog.at_level(logging.INFO, "radixlm"):
        gpu.record_graphs(runner, GraphSizes((1, 2), (8,)), pads=True)
    was_recorded = runner.recorded.plain.decodes.size_for(1) == 1
    assert was_recorded == (runner.recorded.plain.prompts.size_for(5) == 8)
    assert was_recorded == (why == ""), why
    if not was_recorded:  # the start continues and logs it once
        (line,) = [r.message for r in caplog.records if "could not be recorded" in r.message]
        assert "steps run without them" in line
    del replica


def test_compiled_steps_are_captured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler has done its work before the recording, which asks the device for nothing."""
    monkeypatch.setattr("radixlm.models.compiled.BACKEND", "eager")
    replica, runner, _ = opened(tmp_path, "LlamaForCausalLM", "--enable-torch-compile")
    made = runner.model.num_graphs  # type: ignore[attr-defined]
    runner.device = StrictDevice(eagerness=1.0)
    with caplog.at_level(logging.WARNING, "radixlm"):
        gpu.record_graphs(runner, GraphSizes((1, 2), (8,)), pads=True)
    graphs = runner.recorded.plain.decodes
    assert graphs.size_for(1) == 1 and graphs.size_for(2) == 2, caplog.text
    assert runner.model.num_graphs == made == 2  # type: ignore[attr-defined]
    del replica
