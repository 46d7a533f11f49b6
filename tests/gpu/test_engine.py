"""Whole engines on a GPU: the same tokens with and without graphs and overlap, numbers near
float32, and memory that is used but not exhausted."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import radixlm
from radixlm.base.errors import EngineError
from tests.fakes.tiny_checkpoint import cached_tiny, make_tiny, reference_model, write_tokenizer

ARCHITECTURES = ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"]
# kernels take heads of 64 channels and more
SHAPE = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
NO_GRAPHS, NO_OVERLAP = {"disable_cuda_graph": True}, {"disable_overlap_schedule": True}
# a start takes some ten seconds, so few options meet every architecture
CASES: list[tuple[str, dict[str, Any]]] = [
    *((architecture, NO_GRAPHS | NO_OVERLAP) for architecture in ARCHITECTURES),
    ("Qwen3ForCausalLM", NO_GRAPHS),
    ("Qwen3ForCausalLM", NO_OVERLAP),
    ("Qwen3ForCausalLM", {"cuda_graph_bs": (1, 7, 32)}),
    ("Qwen3ForCausalLM", {"disable_cuda_graph_padding": True}),
    ("Gemma3ForCausalLM", {"chunked_prefill_size": 64}),
    ("Gemma3ForCausalLM", {"attention_backend": "torch_native"}),
]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _engine(folder: object, **options: Any) -> radixlm.Engine:
    options = {"max_total_tokens": 16384, "max_running_requests": 32, **options}
    return radixlm.Engine(
        model_path=str(folder), device="cuda", random_seed=1, log_level="error", **options
    )


def _prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(rng.randint(1, 300))] for _ in range(count)]


SCORED = random.Random(2).choices(range(3, 250), k=400)


def _answers(architecture: str, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of 24 greedy requests, and the log-probabilities of one prompt."""
    greedy = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    with _engine(cached_tiny(architecture, **SHAPE), **options) as engine:
        answers = engine.generate(input_ids=_prompts(1, 24), sampling_params=greedy)
        scored = engine.generate(
            input_ids=SCORED,
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
    found = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"]]
    return [one["output_ids"] for one in answers], torch.tensor(found[1:])


undisturbed = cache(_answers)


@pytest.mark.parametrize(
    ("architecture", "options"),
    CASES,
    ids=lambda case: case if isinstance(case, str) else " ".join(case),
)
def test_graphs_and_overlap_change_no_token(architecture: str, options: dict[str, Any]) -> None:
    assert _answers(architecture, **options)[0] == undisturbed(architecture)[0]


def _reference(architecture: str, dtype: torch.dtype) -> torch.Tensor:
    """The log-probabilities of the same prompt by Hugging Face, on the processor."""
    model = reference_model(cached_tiny(architecture, **SHAPE)).to(dtype)
    with torch.no_grad():
        logits = model(torch.tensor([SCORED])).logits[0].float()
    return torch.log_softmax(logits, -1)[range(len(SCORED) - 1), SCORED[1:]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_numbers_are_near_those_of_hugging_face(architecture: str) -> None:
    """In float32, as the checkpoint is, and in bfloat16 as near to float32 as Hugging Face is."""
    want = _reference(architecture, torch.float32)
    assert float((undisturbed(architecture)[1] - want).norm() / want.norm()) < 1e-4
    _, found = _answers(architecture, dtype="bfloat16")
    theirs = _reference(architecture, torch.bfloat16)
    assert float((found - want).norm()) < 1.5 * float((theirs - want).norm())


def test_grammars_and_seeds_are_the_same_with_overlap() -> None:
    folder = cached_tiny("Qwen3ForCausalLM", **SHAPE)
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 22]}}})
    params = [
        {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 20, "json_schema": schema},
        {"temperature": 0.9, "sampling_seed": 4, "max_new_tokens": 20, "top_p": 0.9},
        {"temperature": 0.9, "sampling_seed": 5, "max_new_tokens": 20, "frequency_penalty": 1.0},
    ]
    answers = []
    for is_off in (False, True):
        with _engine(folder, disable_overlap_schedule=is_off) as engine:
            got = engine.generate(input_ids=_prompts(3, 3), sampling_params=params)
            answers.append([one["output_ids"] for one in got])
    assert answers[0] == answers[1]


def test_rows_of_nan_fail_if_detection_is_on(tmp_path: Path) -> None:
    folder = make_tiny("LlamaForCausalLM", tmp_path, **SHAPE)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # infinities of both signs add up in the output layer
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    params = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    with _engine(folder, enable_nan_detection=True) as engine:
        with pytest.raises(EngineError, match="not finite"):
            engine.generate(input_ids=[1, 2], sampling_params=params)
    with _engine(folder) as engine:
        assert len(engine.generate(input_ids=[1, 2], sampling_params=params)["output_ids"]) == 2


def test_memory_is_used_and_does_not_run_out(tmp_path: Path) -> None:
    """An 8B shape with random weights: less than 5 % of the card stays free, and a minute of random
    load succeeds."""
    if torch.cuda.mem_get_info()[1] < 40 << 30:
        pytest.skip("a card with less than 40 GiB")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    write_tokenizer(tmp_path)
    with _engine(tmp_path, load_format="dummy", max_total_tokens=None) as engine:
        free, total = torch.cuda.mem_get_info()
        assert free / total < 0.05
        rng, until_s = random.Random(5), time.monotonic() + 60
        while time.monotonic() < until_s:
            prompts = [
                [rng.randrange(3, 100_000) for _ in range(rng.choice((5, 400, 9000)))]
                for _ in range(rng.randint(1, 64))
            ]
            lengths = [{"max_new_tokens": rng.randint(1, 200), "ignore_eos": True} for _ in prompts]
            got = engine.generate(input_ids=prompts, sampling_params=lengths)
            assert all(one["meta_info"]["finish_reason"]["type"] == "length" for one in got)
