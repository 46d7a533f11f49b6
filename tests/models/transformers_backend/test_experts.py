"""Experts of Hugging Face models on our kernels: the same results, or left unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixlm.base.errors import CheckpointError
from radixlm.kernels.dispatch import bind
from radixlm.models.transformers_backend.experts import replace_experts

tf = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS = {
    "two tables": lambda: tf.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=5),
    "another activation": lambda: tf.Qwen3MoeConfig(
        **SIZES, num_experts=5, moe_intermediate_size=48, hidden_act="gelu"
    ),
    "woven, turned and clamped": lambda: tf.GptOssConfig(
        **SIZES, intermediate_size=48, num_local_experts=5, head_dim=8
    ),
}


def experts(config: Any) -> torch.nn.Module:
    """Experts of the first layer, with weights that have an effect."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).float().eval()
    found = next(one for name, one in model.named_modules() if name.endswith(".experts"))
    with torch.no_grad():
        for weight in found.parameters():
            weight.normal_(0, 0.2)
    return found.requires_grad_(False)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_the_same_numbers(name: str, size: float) -> None:
    theirs = experts(CONFIGS[name]())
    ours = replace_experts(theirs, bind("cpu"))
    assert ours is not None
    rows = torch.randn(7, 32) * size
    ids = torch.rand(7, 5).argsort(-1)[:, :2]
    weights = torch.rand(7, 2)
    wanted = theirs(rows, ids, weights)
    torch.testing.assert_close(ours(rows, ids, weights), wanted, rtol=1e-4, atol=1e-4 * size)


def test_another_limit_is_another_kind() -> None:
    config = CONFIGS["woven, turned and clamped"]()
    config.swiglu_limit = 3.0
    assert replace_experts(experts(config), bind("cpu")) is None


def test_other_modules_are_left_unchanged() -> None:
    assert replace_experts(torch.nn.Linear(4, 4), bind("cpu")) is None


def test_an_expert_out_of_range_is_named() -> None:
    ours = replace_experts(experts(CONFIGS["two tables"]()), bind("cpu"))
    assert ours is not None
    with pytest.raises(CheckpointError, match="expert"):
        ours(torch.randn(1, 32), torch.tensor([[0, 5]]), torch.ones(1, 2))
