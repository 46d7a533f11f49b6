"""Any architecture with its config changed at random: as Hugging Face, or refused by the name of a
key. What Hugging Face itself cannot build or run is no case."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, TINY, make_tiny, reference_model
from tests.models import config_mutations, published_configs
from tests.models.test_decoder import relative_error

from radixlm.base.errors import CheckpointError

QUICK = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
BUILD_ERRORS = (
    *(ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError),
    ZeroDivisionError,  # its dynamic rope of two channels
)


Maker = Callable[[str, Path, int, random.Random], object]


def _changed(architecture: str, folder: Path, seed: int, rng: random.Random) -> None:
    make_tiny(architecture, folder, seed, **config_mutations.draw(architecture, rng))


def _published(architecture: str, folder: Path, seed: int, rng: random.Random) -> None:
    base = {**TINY, **ARCHITECTURES[architecture]}
    base = {key: value for key, value in base.items() if value is not None}
    make_tiny(architecture, folder, seed, **published_configs.draw(architecture, base, rng))
    path = folder / "config.json"
    path.write_text(json.dumps(published_configs.respelled(json.loads(path.read_text()), rng)))


def _theirs(
    make: Maker, architecture: str, folder: Path, seed: int, rng: random.Random
) -> tuple[list[int], torch.Tensor] | None:
    """A prompt and its logits; None where Hugging Face has no model of the drawn config."""
    length = rng.choice([12, 40])
    ids = torch.randint(3, 380, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    try:
        make(architecture, folder, seed, rng)
        with torch.inference_mode():
            logits = reference_model(folder)(torch.tensor([ids])).logits[0].float()
    except (*BUILD_ERRORS, AssertionError):
        return None
    except Exception as error:  # its strict configs have errors of a type of their own
        if "Strict" not in type(error).__name__:
            raise
        return None
    return (ids, logits) if bool(logits.isfinite().all()) else None


def _check(architecture: str, seed: int, folder: Path, make: Maker = _changed) -> bool:
    """Whether the drawn config was compared."""
    rng = random.Random(f"{architecture}{seed}")
    theirs = _theirs(make, architecture, folder, seed, rng)
    if theirs is None:
        return False
    ids, wanted = theirs
    try:
        model = load_model(folder)
    except CheckpointError as error:
        assert "config.json: '" in str(error), error  # names the key
        return False
    runner = PagedRunner(model, page_size=rng.choice([3, 4, 16]), final_len=len(ids))
    ours = runner.prefill({0: ids}, num_chunks=rng.choice([1, 3]))[0]
    assert relative_error(ours, wanted) < 1e-4, (folder / "config.json").read_text()
    return True


@pytest.mark.parametrize("architecture", QUICK)
def test_a_changed_config_is_as_hugging_face(architecture: str, tmp_path: Path) -> None:
    assert any(_check(architecture, seed, tmp_path / str(seed)) for seed in range(2))


# families that never had the older spelling warn of it, and read it
@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")
@pytest.mark.parametrize("architecture", [*QUICK, "GPTNeoXForCausalLM", "PhimoeForCausalLM"])
def test_a_published_spelling_is_as_hugging_face(architecture: str, tmp_path: Path) -> None:
    assert any(_check(architecture, seed, tmp_path / str(seed), _published) for seed in range(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_published_spellings_are_as_hugging_face(architecture: str, tmp_path: Path) -> None:
    for seed in range(10, 20):
        _check(architecture, seed, tmp_path / str(seed), _published)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_changed_configs_are_as_hugging_face(architecture: str, tmp_path: Path) -> None:
    for seed in range(10, 20):
        _check(architecture, seed, tmp_path / str(seed))
