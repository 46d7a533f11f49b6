"""Values that Hugging Face supports and our records cannot express are refused by their key."""

from __future__ import annotations

from typing import Any

import pytest

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "moe_norm_min": ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.3}),
    "kv_lora_rank": ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}),
    "hidden_size_per_layer_input": ("Gemma3nForCausalLM", {"hidden_size_per_layer_input": 0}),
    "num_experts": ("HunYuanMoEV1ForCausalLM", {"num_experts": [4, 8]}),
    "num_experts_per_tok": ("HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": [1, 2]}),
}


@pytest.mark.parametrize("key", CASES)
def test_the_key_is_named(key: str) -> None:
    architecture, settings = CASES[key]
    with pytest.raises(CheckpointError, match=f"config.json: '{key}'"):
        describe({"architectures": [architecture], **SHAPE, **settings})


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("PhimoeForCausalLM", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("DbrxForCausalLM", {"ffn_config": {"moe_num_experts": 2, "moe_top_k": 3}}),
    ],
)
def test_more_experts_a_token_than_experts(architecture: str, settings: dict[str, Any]) -> None:
    """A sparse mixer picks two, whatever the config says."""
    shape = {**SHAPE, "num_key_value_heads": 2, "attn_config": {}}
    settings.get("ffn_config", {}).setdefault("ffn_hidden_size", 32)
    with pytest.raises(CheckpointError, match=r"a token takes ., there are only . experts"):
        describe({"architectures": [architecture], **shape, **settings})


def test_identity_experts_count_too() -> None:
    shape = {**SHAPE, "n_routed_experts": 3, "zero_expert_num": 4}
    common = {"architectures": ["LongcatFlashForCausalLM"], **shape}
    sides = [block.deferred_moe for block in describe({**common, "moe_topk": 7}).blocks]
    assert {side.top_k for side in sides if side is not None} == {7}
    with pytest.raises(CheckpointError, match="'num_experts_per_tok' exceeds 'num_experts'"):
        describe({**common, "moe_topk": 8})
