"""Checkpoints whose tensors are named as transformers has them in memory
(``save_original_format=False``) and not as the model is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny, reference_model
from tests.models.test_decoder import relative_error

QUICK = {
    *("AriaTextForCausalLM", "Ernie4_5_MoeForCausalLM", "GPTNeoXForCausalLM"),
    *("LongcatFlashForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM"),
}


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_names_of_the_modules_are_read(architecture: str, tmp_path: Path) -> None:
    model = reference_model(cached_tiny(architecture))
    ids = list(range(5, 25))
    model.save_pretrained(tmp_path, save_original_format=False)  # RWKV's forward scales weights
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].float()
    ours = PagedRunner(load_model(tmp_path), final_len=len(ids)).prefill({0: ids})[0]
    assert relative_error(ours, wanted) < 1e-4
