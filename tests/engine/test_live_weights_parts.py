"""What hangs on a model's weights when they change: adapters, drafters, quantized layers, ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixlm import Engine
from radixlm.engine import load_engine
from radixlm.weight_updates.registry import WeightsUpdate
from radixlm.wire.weights import WeightsSource
from tests.engine.test_draft_models import (
    DEEPSEEK,
    QWEN_NEXT,
    rounds,  # noqa: F401 (a fixture)
    with_layers,
)
from tests.engine.test_live_weights import GREEDY, OPTIONS, PROMPTS, answers, fresh
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.perturbed import noisy, perturbed
from tests.fakes.tiny_checkpoint import cached_tiny

ADAPTERS = ["dora", "plain"]


def adapted(engine: Engine) -> Any:
    found = engine.generate(
        input_ids=[PROMPTS[0], PROMPTS[1], PROMPTS[0]],
        lora_path=[*ADAPTERS, None],
        sampling_params=GREEDY,
        return_logprob=True,
    )
    return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in found]


def test_adapters_are_made_for_the_new_weights(tmp_path: Path) -> None:
    """DoRA's gains hang on the rows of the base weights."""
    old = cached_tiny("Qwen3ForCausalLM")
    new = perturbed(old, tmp_path / "new")
    folders = [
        write_adapter(old, tmp_path / name, 3, size=0.1, seed=seed, use_dora=name == "dora")
        for seed, name in enumerate(ADAPTERS)
    ]
    paths = [f"{name}={folder}" for name, folder in zip(ADAPTERS, folders, strict=True)]
    options = {**OPTIONS, "enable_lora": True, "lora_paths": paths}
    found = []
    for folder in (old, new):
        with Engine(model_path=str(folder), **options) as engine:
            found.append(adapted(engine))
    with Engine(model_path=str(old), **options) as engine:
        digests = engine._engine.intake.adapters
        for folder, wanted in ((new, found[1]), (old, found[0])):
            assert engine.update_weights_from_disk(str(folder))[0]
            assert adapted(engine) == wanted
        before = digests._by_name["dora"].digest
        assert engine.update_weights_from_disk(str(new))[0]
        assert digests._by_name["dora"].digest != before
    assert found[0] != found[1]


@pytest.mark.parametrize("case", [DEEPSEEK, QWEN_NEXT], ids=lambda case: case[0])
def test_prediction_layers_come_with_their_model(
    case: tuple[str, str, str, dict[str, str]],
    tmp_path: Path,
    rounds: list[tuple[int, int]],  # noqa: F811
) -> None:
    """Answers and counts of accepted drafts are those of a fresh engine."""
    architecture, before, at, names = case
    old = Path(with_layers(architecture, tmp_path / "old", before, at, **names))
    new = perturbed(old, tmp_path / "new")
    options = {**OPTIONS, "speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    options["enable_memory_saver"] = True

    def counted(engine: Engine) -> Any:
        rounds.clear()
        found = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        return [one["output_ids"] for one in found], sorted(rounds)

    with Engine(model_path=str(new), **options) as engine:
        wanted = counted(engine)
    with Engine(model_path=str(old), **options) as engine:
        assert counted(engine) != wanted
        assert engine.update_weights_from_disk(str(new))[0]
        assert counted(engine) == wanted
        runner = engine._engine._serving.scheduler.executor  # type: ignore[attr-defined]
        new_join = runner.end.drafter.net.draft.join.packed.unpack()
        engine.release_memory_occupation(["weights"])
        engine.resume_memory_occupation()
        assert torch.equal(runner.end.drafter.net.draft.join.packed.unpack(), new_join)
        assert counted(engine) == wanted
        assert wanted[1]


@pytest.mark.parametrize(
    "options", [{"torchao_config": "int8wo"}, {"quantization": "fp8"}], ids=str
)
def test_new_weights_are_quantized_too(options: dict[str, Any], tmp_path: Path) -> None:
    old = cached_tiny("Qwen3ForCausalLM")
    new = perturbed(old, tmp_path / "new")
    with Engine(model_path=str(old), **OPTIONS, **options) as engine:
        before = answers(engine)
        assert engine.update_weights_from_disk(str(new))[0]
        after = answers(engine)
    assert before != after == fresh(new, **options)


def test_ranks_and_replicas_change_together(tmp_path: Path) -> None:
    """All of them, or none: one rank cannot read its part of a bad checkpoint."""
    old = cached_tiny("Qwen3ForCausalLM")
    new = perturbed(old, tmp_path / "new")
    bad = perturbed(old, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name][:, -1] = torch.nan  # of the last rank's part
    save_file(tensors, bad / "model.safetensors")
    part = tmp_path / "part"
    part.mkdir()
    save_file({name: noisy(load_file(new / "model.safetensors")[name], 5)}, part / "x.safetensors")
    options = {"tp_size": 2, "dp_size": 2}
    with Engine(model_path=str(old), **OPTIONS, **options) as engine:
        before = answers(engine)
        is_ok, message, _ = engine.update_weights_from_disk(str(bad))
        assert not is_ok and "NaN" in message
        assert answers(engine) == before
        assert engine.update_weights_from_disk(str(new))[0]
        after = answers(engine)
        update = WeightsUpdate(str(part), is_partial=True)
        assert engine._wait(engine._engine.intake.weights.update(update)).is_ok
        assert answers(engine) != after
    assert after == fresh(new, **options) != before


def test_an_engine_that_starts_takes_the_encoder_of_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the text model, which comes from there."""
    info = SimpleNamespace(is_multimodal=True)
    config = cast(Any, SimpleNamespace(media=SimpleNamespace(enable_multimodal=None)))
    monkeypatch.setattr(load_engine, "load", lambda name: lambda info, device: info.folder)
    monkeypatch.setattr(load_engine, "replace", lambda info, folder: SimpleNamespace(folder=folder))
    source = WeightsSource("/new", "auto")
    found: Any = load_engine._media(config, cast(Any, info), torch.device("cpu"), source)
    assert found == Path("/new")


def test_models_that_cannot_be_updated_are_named(tmp_path: Path) -> None:
    old = cached_tiny("Qwen3ForCausalLM")
    with Engine(model_path=str(old), **OPTIONS, model_impl="transformers") as engine:
        is_ok, message, _ = engine.update_weights_from_disk(str(perturbed(old, tmp_path / "new")))
    assert not is_ok and "runs by transformers" in message
