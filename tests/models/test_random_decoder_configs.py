"""Random configs of decoders through the paged path equal Hugging Face."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import make_tiny, reference_model
from tests.models import random_decoder_configs
from tests.models.test_decoder import relative_error


def _check(architecture: str, seed: int, folder: Path) -> None:
    rng = random.Random(f"{architecture}{seed}")
    changes = random_decoder_configs.draw(architecture, rng)
    make_tiny(architecture, folder, seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 380, (rng.choice([12, 40]),), generator=generator).tolist()
    with torch.inference_mode():
        theirs = reference_model(folder)(torch.tensor([ids])).logits[0].float()
    runner = PagedRunner(load_model(folder), page_size=rng.choice([3, 4, 16]))
    ours = runner.prefill({0: ids}, num_chunks=rng.choice([1, 3]))[0]
    assert relative_error(ours, theirs) < 1e-4, changes


@pytest.mark.parametrize("architecture", random_decoder_configs.FLAGS)
def test_a_random_config_equals_hugging_face(architecture: str, tmp_path: Path) -> None:
    _check(architecture, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", random_decoder_configs.FLAGS)
def test_many_random_configs_equal_hugging_face(architecture: str, tmp_path: Path) -> None:
    for seed in range(100, 115):
        _check(architecture, seed, tmp_path / str(seed))
