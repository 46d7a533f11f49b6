"""Weights that change while an engine serves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixlm import Engine
from radixlm.weight_updates.registry import WeightsOutcome, WeightsUpdate
from tests.fakes.perturbed import noisy, perturbed
from tests.fakes.tiny_checkpoint import cached_tiny

OPTIONS: dict[str, Any] = {
    "cpu_threads": 1,
    "max_total_tokens": 2048,
    "context_length": 128,
    "log_level": "error",
    "skip_tokenizer_init": True,
}
PROMPTS = [[5, 9, 77, 31, 4, 60, 12, 7], [5, 9, 77, 31, 200, 3]]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def answers(engine: Engine) -> Any:
    """Tokens and log-probabilities."""
    found = engine.generate(
        input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
    )
    keys = ("input_token_logprobs", "output_token_logprobs")
    return [(one["output_ids"], [one["meta_info"][key] for key in keys]) for one in found]


def fresh(folder: Path, **options: Any) -> Any:
    """The answers of an engine that starts with ``folder``."""
    with Engine(model_path=str(folder), **OPTIONS, **options) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def base() -> Path:
    return cached_tiny("Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[Engine]:
    with Engine(model_path=str(base), **OPTIONS) as engine:
        yield engine


ARCHITECTURES = [
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Mamba2ForCausalLM",
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_those_of_a_fresh_engine(architecture: str, tmp_path: Path) -> None:
    old = cached_tiny(architecture)
    new = perturbed(old, tmp_path / "new")
    with Engine(model_path=str(old), **OPTIONS) as engine:
        before = answers(engine)
        assert engine.update_weights_from_disk(str(new), weight_version="2")[0]
        after = answers(engine)
        assert (
            engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["meta_info"][
                "weight_version"
            ]
            == "2"
        )
        assert engine.update_weights_from_disk(str(old))[0]
        assert answers(engine) == before
    assert after == fresh(new) != before


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _edited(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def _other_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))


UP = "model.layers.2.mlp.up_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncated, "truncated"),
    "missing": (_edited(lambda t: t.pop(UP)), "missing from model.safetensors"),
    "unknown": (_edited(lambda t: t.update(more=torch.ones(2))), "not part of the model"),
    "shape": (_edited(lambda t: t.update({UP: torch.ones(8, 64)})), "the checkpoint has [104, 64]"),
    "dtype": (_edited(lambda t: t.update({UP: t[UP].to(torch.int8)})), "int8"),
    "nan": (_edited(lambda t: t[UP].view(-1)[3:4].fill_(torch.nan)), "NaN"),
    "other model": (_other_model, "describes another model"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_bad_checkpoint_leaves_the_old_weights(
    case: str, engine: Engine, base: Path, tmp_path: Path
) -> None:
    damage, words = DAMAGE[case]
    before = answers(engine)
    damage(perturbed(base, tmp_path / "new"))
    is_ok, message, num_paused = engine.update_weights_from_disk(str(tmp_path / "new"))
    assert not is_ok and num_paused == 0
    assert words in message and "have not changed" in message
    assert answers(engine) == before


def _partial(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> WeightsUpdate:
    target.mkdir()
    save_file(tensors, target / "part.safetensors")
    return WeightsUpdate(str(target), is_partial=True)


def _update(engine: Engine, update: WeightsUpdate) -> WeightsOutcome:
    return engine._wait(engine._engine.intake.weights.update(update))


@pytest.mark.parametrize("is_fused", [False, True])
def test_some_tensors_of_fused_layers(is_fused: bool, base: Path, tmp_path: Path) -> None:
    """First up and q of one layer; then q again and v, or both as qkv_proj; then they go on from a
    restart of all that intake holds."""
    q, k, v = (f"model.layers.1.self_attn.{one}_proj.weight" for one in "qkv")
    old = load_file(base / "model.safetensors")
    first = {name: noisy(old[name], 1) for name in (UP, q)}
    second = {name: noisy(old[name], 2) for name in (q, k, v)}
    with Engine(model_path=str(base), **OPTIONS) as engine:
        weights = engine._engine.intake.weights
        assert _update(engine, _partial(base, tmp_path / "a", first)).is_ok
        one = answers(engine)
        sent = second
        if is_fused:
            name = q.replace("q_proj", "qkv_proj")
            sent = {name: torch.cat([second[n] for n in (q, k, v)])}
        if is_fused:  # q alone was sent before: one of the two spellings at a time
            outcome = _update(engine, _partial(base, tmp_path / "b", sent))
            assert not outcome.is_ok and "both there" in outcome.message
            assert answers(engine) == one
            assert engine.update_weights_from_disk(str(base))[0]
            assert _update(engine, _partial(base, tmp_path / "c", {UP: first[UP]})).is_ok
        assert _update(engine, _partial(base, tmp_path / "d", sent)).is_ok
        two = answers(engine)
        assert engine.get_weights_by_name(k, 1) == second[k][:1].tolist()
        assert weights.source is not None and len(weights.source.deltas) == 1
    assert not (tmp_path / "a").exists() and not (tmp_path / "d").exists()
    new = perturbed(base, tmp_path / "whole", change=lambda name: False)
    for tensors, found in ((first, one), (first | second, two)):
        save_file(old | tensors, new / "model.safetensors")
        assert fresh(new) == found
    assert one != two


def test_a_bad_part_leaves_the_old_weights(engine: Engine, base: Path, tmp_path: Path) -> None:
    before = answers(engine)
    bad = {"unknown": {"model.x": torch.ones(2)}, "other rows": {UP: torch.ones(8, 64)}}
    words = {"unknown": "not part of the model", "other rows": "[104, 64]"}
    for case, tensors in bad.items():
        outcome = _update(engine, _partial(base, tmp_path / case.split()[0], tensors))
        assert not outcome.is_ok and words[case] in outcome.message
    assert answers(engine) == before


def test_parts_over_random_weights(base: Path, tmp_path: Path) -> None:
    """As trainers do: the server starts with random weights and gets all tensors in parts."""
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors, key=lambda name: "_proj" in name)  # fused layers come together
    with Engine(model_path=str(base), **OPTIONS, load_format="dummy") as engine:
        before = answers(engine)
        some = {name: tensors[name] for name in names if "q_proj" in name}
        outcome = _update(engine, _partial(base, tmp_path / "q", some))
        assert not outcome.is_ok and "dummy has no values" in outcome.message
        bad = _partial(base, tmp_path / "bad", {"model.x": torch.ones(2)})
        assert not _update(engine, bad).is_ok and answers(engine) == before
        for part, own in enumerate((names[:5], names[5:])):
            update = _partial(base, tmp_path / str(part), {name: tensors[name] for name in own})
            assert _update(engine, update).is_ok
        after = answers(engine)
        assert engine.update_weights_from_disk(str(base))[0]
        assert answers(engine) == after
    assert after == fresh(base)
