"""Shortened calls within a Hugging Face model give the same results as the original ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.models.transformers_backend.calls import kernel_rope, remove_overhead

tf = pytest.importorskip("transformers")
needs_kernel = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

CONFIG = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
QK = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)


def angles(in_pairs: bool, num: int = 16) -> tuple[Tensor, Tensor]:
    half = torch.randn(1, 6, num // 2)
    both = half.repeat_interleave(2, -1) if in_pairs else torch.cat((half, half), -1)
    return both.cos(), both.sin()


@needs_kernel
@pytest.mark.parametrize(("family", "in_pairs"), [("llama", False), ("cohere", True)])
def test_usual_ropes_are_recognised_by_their_results(family: str, in_pairs: bool) -> None:
    module = getattr(tf.models, family)
    theirs = getattr(module, f"modeling_{family}").apply_rotary_pos_emb
    turn = kernel_rope(theirs)
    assert turn is not None
    cos, sin = angles(in_pairs)
    before = [x.clone() for x in QK]
    for got, want in zip(turn(*QK, cos, sin), theirs(*QK, cos, sin), strict=True):
        torch.testing.assert_close(got, want)
    assert all(torch.equal(x, y) for x, y in zip(QK, before, strict=True))


@needs_kernel
def test_unsupported_inputs_use_the_original_function() -> None:
    theirs = tf.models.llama.modeling_llama.apply_rotary_pos_emb
    turn = kernel_rope(theirs)
    assert turn is not None
    cos, sin = torch.randn(1, 6, 16), torch.randn(1, 6, 16)  # no two channels with one angle
    odd = QK[0].transpose(1, 2), QK[1].transpose(1, 2), *angles(False), 2  # heads after tokens
    for args in ((*QK, cos, sin), odd):
        for got, want in zip(turn(*args), theirs(*args), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@needs_kernel
def test_another_rope_is_not_taken_for_the_usual_one() -> None:
    def doubled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = tf.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        return 2 * q, k

    assert kernel_rope(doubled) is None
    assert kernel_rope(lambda x: x) is None
    assert kernel_rope(None) is None


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPTNeoX"])
def test_a_model_gives_the_same_logits(family: str) -> None:
    config = getattr(tf, f"{family}Config")(**CONFIG)
    config._attn_implementation = "eager"
    model = getattr(tf, f"{family}ForCausalLM")(config).eval()
    ids = torch.arange(3, 24)[None]
    heard: list[Any] = []
    layer = model.base_model.layers[1]
    layer.register_forward_hook(lambda *_: heard.append(layer))  # still called
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        eager = sys.modules[type(model).__module__].eager_attention_forward
        remove_overhead(model, bind("cpu"), eager)
        got = model(ids, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert heard == [layer, layer]
    assert isinstance(layer, torch.nn.Module)
    assert model.base_model.layers[-1] is layer
    assert list(model.base_model.layers[:2]) == list(model.base_model.layers)
