"""--custom-weight-loader: a function of the operator's turns what a trainer sends into tensors of
the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from radixlm import Engine
from tests.engine.test_live_weights import GREEDY, OPTIONS, PROMPTS
from tests.fakes.perturbed import perturbed
from tests.fakes.tiny_checkpoint import cached_tiny

SOURCE = """
def unhalve(named_tensors):
    for name, tensor in named_tensors:
        yield name.removeprefix("trainer."), tensor * 2

def fail(named_tensors):
    raise ValueError("not this time")

def nothing(named_tensors):
    return []
"""
LOADERS = ("own_loaders.unhalve", "own_loaders.fail", "own_loaders.nothing", "own_loaders.gone")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("loaders")
    (folder / "own_loaders.py").write_text(SOURCE)
    base = cached_tiny("Qwen3ForCausalLM")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PYTHONPATH", str(folder))
        with Engine(model_path=str(base), custom_weight_loader=LOADERS, **OPTIONS) as made:
            yield made


def answers(engine: Engine) -> list[Any]:
    return [one["output_ids"] for one in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def send(engine: Engine, tensors: dict[str, Tensor], load_format: str) -> tuple[bool, str]:
    found: tuple[bool, str] = engine.update_weights_from_tensor(tensors, load_format)
    return found


def test_a_loader_makes_tensors_of_the_checkpoint(engine: Engine, tmp_path: Path) -> None:
    base = cached_tiny("Qwen3ForCausalLM")
    new = load_file(perturbed(base, tmp_path / "new") / "model.safetensors")
    before = answers(engine)
    is_ok, message = send(
        engine, {f"trainer.{n}": t / 2 for n, t in new.items()}, "own_loaders.unhalve"
    )
    assert is_ok, message
    after = answers(engine)
    with Engine(model_path=str(tmp_path / "new"), **OPTIONS) as fresh:
        assert after == answers(fresh) != before


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("own_loaders.fail", "own_loaders.fail: ValueError: not this time"),
        ("own_loaders.nothing", "expected pairs of a name and a tensor, got none"),
        ("own_loaders.gone", "AttributeError"),
        ("os.system", "load_format: 'os.system' is none of null"),
    ],
)
def test_what_goes_wrong_is_said_and_the_old_weights_stay(
    engine: Engine, loader: str, message: str
) -> None:
    before = answers(engine)
    is_ok, found = send(engine, {"model.norm.weight": torch.ones(64)}, loader)
    assert (is_ok, message in found) == (False, True), found
    assert answers(engine) == before
