"""Ranks on GPUs, without a GPU: their code runs on a CPU (tests/fakes/cuda.py), one step ahead and
with graphs; the ranks are threads, and NCCL is a group of these. Tokens and log-probabilities are
those of one rank of a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import radixlm
from tests.fakes.tiny_checkpoint import cached_tiny

pytest.importorskip("triton")

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1, "presence_penalty": 0.5}
CALLS = (
    {"sampling_params": GREEDY},
    {"sampling_params": SAMPLED, "return_logprob": True, "logprob_start_len": 0},
)
SMALL = {"max_total_tokens": 128, "max_running_requests": 2, "chunked_prefill_size": 16}
PROGRAM = """
import json, sys
from tests.fakes import cuda
cuda.install()
import torch
torch.cuda.device_count = lambda: 4
import pytest
from radixlm.distributed.device_groups import NcclGroup
from radixlm.engine import gpu
from tests.fakes.device_comm import HostComm
from tests.fakes.thread_replica import thread_engine

cuda.rerun_graphs()
gpu.NcclComm = HostComm
NcclGroup._is_elsewhere = lambda self, x: False  # the host is the device
options, prompts, calls = json.loads(sys.argv[1])
with thread_engine(pytest.MonkeyPatch(), device="cuda", log_level="error", **options) as engine:
    made = [engine.generate(input_ids=prompts, **more) for more in calls]
    runner = engine._engine._serving.scheduler.executor.runner
    group = getattr(runner.model, "_model", runner.model).context.ranks.tp
    facts = [list(runner.recorded.plain.decodes.sizes), type(group).__name__]
    assert not engine._engine.errors
print("@" + json.dumps([made, facts]))
"""


def _tokens(answers: list[dict[str, Any]]) -> list[Any]:
    return [one["output_ids"] for one in answers]


def _logprobs(answers: list[dict[str, Any]]) -> list[float]:
    lists = ("input_token_logprobs", "output_token_logprobs")
    return [pair[0] for one in answers for name in lists for pair in one["meta_info"][name]
            if pair[0] is not None]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "flags", "graphs", "group"),
    [
        ("Qwen3MoeForCausalLM", {"tp_size": 2}, [1, 2], "NcclGroup"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("Qwen3ForCausalLM", {"tp_size": 2, "gpu_id_step": 0}, [], "StagedGroup"),
                ("Qwen3ForCausalLM", {"pp_size": 2}, [], "SoloGroup"),
                ("Qwen3ForCausalLM", {"tp_size": 2, "pp_size": 2}, [], "NcclGroup"),
                ("Qwen3MoeForCausalLM", {"tp_size": 2, "ep_size": 2}, [1, 2], "NcclGroup"),
                (
                    "Qwen3ForCausalLM",
                    {"tp_size": 2, "enable_dp_attention": True, "dp_size": 2},
                    [],
                    "NcclGroup",
                ),
                (
                    "Qwen3ForCausalLM",
                    {"tp_size": 2, "speculative_algorithm": "NGRAM"},
                    [1, 2],
                    "NcclGroup",
                ),
                ("DeepseekV3ForCausalLM", {"tp_size": 2}, [1, 2], "NcclGroup"),
                ("Gemma3ForCausalLM", {"tp_size": 2}, [1, 2], "NcclGroup"),
                ("Qwen3NextForCausalLM", {"tp_size": 2}, [], "NcclGroup"),
            )
        ),
    ],
)
def test_ranks_on_gpus_give_the_tokens_of_one_on_a_cpu(
    architecture: str, flags: dict[str, Any], graphs: list[int], group: str
) -> None:
    is_quick = architecture == "Qwen3MoeForCausalLM" and len(flags) == 1
    shape = {"num_hidden_layers": 1, "vocab_size": 384} if is_quick else {}
    folder = str(cached_tiny(architecture, **shape))
    options = {"model_path": folder, "skip_tokenizer_init": True, **SMALL}
    with radixlm.Engine(device="cpu", cpu_threads=1, log_level="error", **options) as engine:
        wanted = [engine.generate(input_ids=PROMPTS, **call) for call in CALLS]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM,
         json.dumps([options | flags, PROMPTS, CALLS])],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=280, check=False,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("@")]
    assert lines, run.stderr[-3000:]
    made, facts = json.loads(lines[0][1:])
    assert list(map(_tokens, made)) == list(map(_tokens, wanted))
    assert _logprobs(made[1]) == pytest.approx(_logprobs(wanted[1]), abs=1e-4)
    assert facts == [graphs, group]
