"""Weights that are dropped and loaded again: the logits are the same, and nothing stays between."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.paged_runner import CPU, PagedRunner
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from radixlm.kernels.dispatch import bind
from radixlm.layers.module import Module, noting_contents
from radixlm.models.build import build_model
from radixlm.weights.load import load_weights
from radixlm.weights.size import stored_bytes

IDS = list(range(5, 45))


def logits(runner: PagedRunner, sequence: int) -> torch.Tensor:
    first = runner.step({sequence: IDS})[sequence]
    return torch.cat((first, runner.step({sequence: [7]})[sequence]))


# all architectures have passed; these have layers of most kinds
CHOSEN = (
    "Qwen3ForCausalLM Gemma3ForCausalLM GptOssForCausalLM DeepseekV3ForCausalLM "
    "DeepseekV4ForCausalLM Qwen3NextForCausalLM Mamba2ForCausalLM RwkvForCausalLM "
    "Gemma3nForCausalLM GPT2LMHeadModel"
).split()


@pytest.mark.parametrize("arch", [arch for arch in CHOSEN if arch in ARCHITECTURES])
def test_a_model_that_is_loaded_again_answers_as_before(arch: str) -> None:
    folder = cached_tiny(arch)
    model = build_model(describe(folder), CPU, torch.float32, bind("cpu", {}))
    with noting_contents(model):
        load_weights(model, folder, device=CPU, progress=False)
    runner, full = PagedRunner(model, "cpu", 16), stored_bytes(model)
    wanted = logits(runner, 0)
    for sequence in (1, 2):
        assert model.contents is not None
        model.contents.drop()
        ropes = stored_bytes(model.ropes)  # grow as they are used
        assert stored_bytes(model) - ropes < 0.02 * full
        load_weights(model, folder, device=CPU, progress=False)
        assert torch.equal(logits(runner, sequence), wanted)


def test_a_load_that_fails_can_be_tried_again() -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    model = build_model(describe(folder), CPU, torch.float32, bind("cpu", {}))
    with noting_contents(model):
        load_weights(model, folder, device=CPU, progress=False)
    runner = PagedRunner(model, "cpu", 16)
    wanted = logits(runner, 0)
    assert isinstance(model, Module) and model.contents is not None
    model.contents.drop()
    other = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2)
    with pytest.raises(CheckpointError):
        load_weights(model, other, device=CPU, progress=False)
    model.contents.drop()
    load_weights(model, folder, device=CPU, progress=False)
    assert torch.equal(logits(runner, 1), wanted)
