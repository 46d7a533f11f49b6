"""MiniMax: decays of lightning attention are exact, also where a checkpoint has them rounded."""

from __future__ import annotations

from typing import Any

import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny, reference_model
from tests.models.test_decoder import relative_error
from torch import Tensor


def _logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def _make_decays_anew(model: Any) -> None:
    """The buffers of each layer as the class makes them, in float32."""
    layers = [one for one in model.modules() if hasattr(one, "decay_factors")]
    assert layers
    for layer in layers:
        layer.slope_rate = layer.get_slope_rate()
        made = layer.decay_factors(layer.slope_rate)
        layer.query_decay, layer.key_decay, layer.diagonal_decay = made


def test_decays_of_a_16_bit_checkpoint_are_exact() -> None:
    folder = cached_tiny("MiniMaxForCausalLM", dtype=torch.bfloat16)
    ids = torch.randint(3, 380, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    ours = PagedRunner(load_model(folder), page_size=16).prefill({0: ids})[0]
    model = reference_model(folder)
    assert relative_error(ours, _logits(model, ids)) > 1e-4  # it reads the rounded ones
    _make_decays_anew(model)
    assert relative_error(ours, _logits(model, ids)) < 1e-5
