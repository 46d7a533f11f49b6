"""What the limits take from a model's description."""

from __future__ import annotations

from typing import Any

import pytest

from radixlm.arch.hf import describe
from radixlm.config.parallel import ParallelConfig
from radixlm.config.schedule import ScheduleConfig
from radixlm.config.server_config import ServerConfig
from radixlm.engine.limits import _target_itl_s, attention_length

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32000,
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        # (q, k, v and o: 6.29M numbers; gate, up and down: 9.44M) / (2 products with 16 x 128)
        ({}, 3840),
        ({"num_hidden_layers": 1}, 3840),
        ({"intermediate_size": 6144}, 6144),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 14}, 7680),
    ],
)
def test_the_context_that_costs_as_much_as_the_weights(
    changes: dict[str, Any], length: float
) -> None:
    assert attention_length(describe({**QWEN3_06B, **changes})) == length


def test_a_token_passes_all_stages_within_the_time_between_two() -> None:
    schedule = ScheduleConfig(target_itl_ms=60.0)
    for stages in (1, 3):
        config = ServerConfig(parallel=ParallelConfig(pp_size=stages), schedule=schedule)
        assert _target_itl_s(config) == pytest.approx(0.06 / stages)
