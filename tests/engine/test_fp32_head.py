"""--enable-fp32-lm-head: the head is float32, and so are its products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixlm.base.errors import ConfigError
from tests.engine.test_packed_weights import start
from tests.fakes.tiny_checkpoint import cached_tiny

ARCHITECTURES = {True: "Qwen3ForCausalLM", False: "LlamaForCausalLM"}


@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_products_of_float32(tied: bool, quantization: str | None) -> None:
    folder = cached_tiny(ARCHITECTURES[tied], 0, torch.bfloat16, tie_word_embeddings=tied)
    options: dict[str, Any] = {"quantization": quantization, "disable_packed_cache": True}
    model: Any = start(folder, None, enable_fp32_lm_head=True, **options)[0]
    plain: Any = start(folder, None, **options | {"quantization": None})[0]
    weight_VD = plain.whole_head.unpack()
    assert weight_VD.dtype == torch.bfloat16
    assert model.whole_head.unpack().equal(weight_VD.float())
    hidden_RD = torch.randn(3, model.decoder.dim)
    expected_RV = hidden_RD @ weight_VD.float().T
    assert torch.allclose(model.logits(hidden_RD), expected_RV, atol=1e-5, rtol=1e-5)


def test_a_transformers_model_refuses_it_by_name() -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    with pytest.raises(ConfigError, match="--enable-fp32-lm-head: Qwen3ForCausalLM runs by"):
        start(folder, None, enable_fp32_lm_head=True, model_impl="transformers")
