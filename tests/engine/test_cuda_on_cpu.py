"""The GPU code paths on a CPU (tests/fakes/cuda.py): device, trial, graphs, overlap, sampling.
Tokens equal those of the CPU, and no step waits for the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import radixlm
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny

pytest.importorskip("triton")

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1, "presence_penalty": 0.5}
SMALL = {"max_total_tokens": 128, "max_running_requests": 2, "chunked_prefill_size": 16}
PROGRAM = """
import json, sys
from tests.fakes import cuda
cuda.install()
import radixlm
from radixlm.executor.runner import Runner

asked = json.loads(sys.argv[1])
cuda.rerun_graphs()
for name in ("forward", "sample"):
    def watched(self, *args, plain=getattr(Runner, name)):
        with cuda.watch():
            return plain(self, *args)
    setattr(Runner, name, watched)
with radixlm.Engine(device="cuda", log_level="error", **asked["options"]) as engine:
    cuda.WAITS.clear()
    made = [
        [one["output_ids"] for one in engine.generate(input_ids=asked["prompts"], **more)]
        for more in asked["calls"]
    ]
    runner = engine._engine._serving.scheduler.executor
    recorded = runner.recorded.plain, runner.recorded.adapted
    facts = [type(runner.device).__name__, *(one.decodes.sizes for one in recorded)]
print("@" + json.dumps([made, facts, dict(cuda.WAITS)]))
"""


def test_the_code_of_a_gpu_gives_the_tokens_of_a_cpu_without_a_wait(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "vocab_size": 384, "max_position_embeddings": 64}
    folder = cached_tiny("Qwen3ForCausalLM", **shape)
    options: dict[str, Any] = {
        "model_path": str(folder), "skip_tokenizer_init": True, **SMALL,
        "lora_paths": [f"a={write_adapter(folder, tmp_path)}"],
    }  # fmt: skip
    calls = [
        {"sampling_params": GREEDY, "lora_path": ["a", None]},
        {"sampling_params": SAMPLED, "return_logprob": [False, True]},
    ]
    with radixlm.Engine(device="cpu", cpu_threads=1, log_level="error", **options) as engine:
        made = engine.generate(input_ids=PROMPTS, **calls[0])
    given = json.dumps({"options": options, "prompts": PROMPTS, "calls": calls})
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, given],
        capture_output=True, text=True, cwd=root, timeout=280, check=False,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("@")]
    assert lines, run.stderr[-3000:]
    (greedy, sampled), facts, waits = json.loads(lines[0][1:])
    assert greedy == [one["output_ids"] for one in made]
    assert [len(one) for one in sampled] == [4, 4]
    assert facts == ["CudaDevice", [1, 2], [1, 2]]
    assert not waits, waits
