"""Values that Hugging Face takes and no record can say: refused by the name of their key."""

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
