"""Random configs of the later architectures through the paged path equal Hugging Face."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.fakes.later_configs import LATER
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny, make_tiny, reference_model
from tests.models import later_fuzz
from tests.models.test_decoder import relative_error

from radixlm.arch.cost import num_parameters
from radixlm.arch.hf import describe
from radixlm.arch.names import is_ignorable

# has weights that nothing reads; stores one bias a head for all its channels
PLACE_HOLDERS = {"LongcatFlashForCausalLM", "BeamForCausalLM"}


def _check(architecture: str, seed: int, folder: Path) -> None:
    rng = random.Random(f"{architecture}{seed}")
    changes = later_fuzz.draw(architecture, rng)
    make_tiny(architecture, folder, seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 380, (rng.choice([12, 40]),), generator=generator).tolist()
    with torch.inference_mode():
        theirs = reference_model(folder)(torch.tensor([ids])).logits[0].float()
    runner = PagedRunner(load_model(folder), page_size=rng.choice([3, 4, 16]))
    ours = runner.prefill({0: ids}, num_chunks=rng.choice([1, 3]))[0]
    assert relative_error(ours, theirs) < 1e-4, changes


@pytest.mark.parametrize("architecture", later_fuzz.FLAGS)
def test_a_random_config_equals_hugging_face(architecture: str, tmp_path: Path) -> None:
    _check(architecture, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", later_fuzz.FLAGS)
def test_many_random_configs_equal_hugging_face(architecture: str, tmp_path: Path) -> None:
    for seed in range(100, 115):
        _check(architecture, seed, tmp_path / str(seed))


@pytest.mark.parametrize("architecture", sorted(set(LATER) - PLACE_HOLDERS))
def test_the_record_knows_the_number_of_parameters(architecture: str) -> None:
    folder = cached_tiny(architecture)
    theirs = reference_model(folder)
    buffers = ("correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
    buffers += ("balancing_biases",)
    held = [*theirs.named_parameters(), *theirs.named_buffers()]
    decoder = describe(folder)  # towers beside it are no part of it
    wanted = sum(
        t.numel()
        for n, t in held
        if (isinstance(t, torch.nn.Parameter) or n.endswith(buffers))
        and not is_ignorable(n, decoder)
    )
    assert num_parameters(decoder) == wanted
