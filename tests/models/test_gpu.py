"""Every architecture on an NVIDIA GPU, in float32, against the same model on the processor."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny
from tests.models.test_decoder import prompts, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equals_the_processor(arch: str) -> None:
    folder = cached_tiny(arch)
    here, there = load_model(folder), load_model(folder, device=torch.device("cuda"))
    ids = prompts(here.decoder.vocab)
    want, got = PagedRunner(here).prefill(ids, 2), PagedRunner(there).prefill(ids, 2)
    for sequence in ids:
        assert relative_error(got[sequence].cpu(), want[sequence]) < 1e-4
