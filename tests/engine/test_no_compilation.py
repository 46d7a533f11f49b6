"""No request waits for a compiler: every kernel variant that a GPU needs while it serves is
compiled at the start. Triton compiles a kernel again for each type, each constant, and integers
that are 1 or multiples of 16; tests/fakes/launches.py distinguishes them the same way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixlm.cuda_graphs.dummy_run import counts_up_to
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny

pytest.importorskip("triton")

SHAPE = {"num_hidden_layers": 1, "vocab_size": 384, "max_position_embeddings": 1200}
LIMITS = {"max_total_tokens": 4096, "max_running_requests": 18, "chunked_prefill_size": 256}
# different tiles or paths for few and many tokens, with and without experts
CASES = [
    ("Qwen3ForCausalLM", {"quantization": "fp8"}),
    ("GptOssForCausalLM", {"mem_fraction_static": 0.5}),
    ("Qwen3ForCausalLM", {"disable_cuda_graph": True, "lora_paths": []}),  # with an adapter
    ("DeepseekV2ForCausalLM", {}),
    ("Gemma3ForCausalLM", {}),
]
PROGRAM = """
import json, sys
from types import SimpleNamespace
from tests.fakes import cuda, launches
cuda.install()
launches.install()
import torch
import radixlm

card = SimpleNamespace(name="card", major=9, minor=0, multi_processor_count=132)
torch.cuda.get_device_properties = lambda device=None: card
cuda.rerun_graphs()
greedy = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
drawn = greedy | {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1}
held = drawn | {"presence_penalty": 0.5, "logit_bias": {"5": 1.0}}
options = json.loads(sys.argv[1])
has_adapter = "lora_paths" in options
with radixlm.Engine(device="cuda", log_level="error", **options) as engine:
    def ask(phase, lengths, params=greedy, **more):
        launches.enter(phase)
        prompts = [[n % 300 + 3] * length for n, length in enumerate(lengths)]
        adapters = ["a" if has_adapter and n % 3 != 1 else None for n in range(len(prompts))]
        engine.generate(input_ids=prompts, sampling_params=params, lora_path=adapters, **more)

    ask("one", [1])
    ask("ragged", [1, 17, 100, 33])
    ask("behind a prefix", [900, 850])
    ask("equal", [64, 64])
    ask("as many as run", [9] * 18)
    ask("drawn", [3, 4], drawn)
    for count in (1, 3, 16):
        ask(f"held back, {count}", [3] * count, held)
    for top in (0, 1, 15):
        ask(f"{top} likely", [5], drawn, return_logprob=True, top_logprobs_num=top)
    ask("log-probabilities of the prompt", [40], drawn, return_logprob=True, logprob_start_len=0)
print("@" + json.dumps([len(launches.MET), launches.late()]))
"""


@pytest.mark.parametrize(("arch", "more"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_serving_kernel_is_compiled_at_the_start(
    arch: str, more: dict[str, Any], tmp_path: Path
) -> None:
    folder = cached_tiny(arch, **SHAPE)
    if "lora_paths" in more:
        more = more | {"lora_paths": [f"a={write_adapter(folder, tmp_path)}"]}
    options = {"model_path": str(folder), "skip_tokenizer_init": True, **LIMITS, **more}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(options)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=280, check=False,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("@")]
    assert lines, run.stderr[-3000:]
    num_met, late = json.loads(lines[0][1:])
    assert num_met > 10
    assert late == []


@pytest.mark.parametrize("most", [1, 2, 20, 256, 8192])
def test_every_interval_of_a_table_is_tried(most: int) -> None:
    """Between a bound and its double there is a number that is tried."""
    counts = counts_up_to(most)
    assert counts[0] == 1 and counts[-1] == most
    assert all(any(low < count <= 2 * low for count in counts) for low in range(1, most // 2))
