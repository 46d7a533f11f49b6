"""Tensor dumps of a real engine: against another run, against transformers, and injected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import radixlm
from radixlm.base.errors import ConfigError
from radixlm.engine.dumped_prompts import prompts_of
from radixlm.entrypoints.cli import main
from tests.fakes.tiny_checkpoint import cached_tiny

IDS = [5, 6, 7, 8, 9]


def _run(folder: Path | None, num_tokens: int = 3, **options: object) -> list[int]:
    model = str(cached_tiny("LlamaForCausalLM"))
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    if folder is not None:
        options["debug_tensor_dump_output_folder"] = str(folder)
    with radixlm.Engine(
        model_path=model, cpu_threads=1, log_level="error", max_total_tokens=256, **options
    ) as engine:
        found: list[int] = engine.generate(input_ids=IDS, sampling_params=params)["output_ids"]
    return found


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("dump")
    return folder, _run(folder)


def test_a_dump_holds_each_step_and_changes_nothing(dumped: tuple[Path, list[int]]) -> None:
    folder, ids = dumped
    assert ids == _run(None)  # by the C++ program, where it is built
    steps = [load_file(path) for path in sorted((folder / "TP0").iterdir())]
    assert [step["token_ids"].tolist() for step in steps] == [IDS, ids[:1], ids[1:2]]
    assert [step["positions"].tolist() for step in steps] == [[0, 1, 2, 3, 4], [5], [6]]
    assert [int(step["logits"].argmax()) for step in steps] == ids
    first = steps[0]
    joined = first["embed"] + first["layers.0.attention"] + first["layers.0.mlp"]
    torch.testing.assert_close(first["layers.0"], joined)


def test_transformers_computes_the_same(
    dumped: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    model = str(cached_tiny("LlamaForCausalLM"))
    args = ["compare-dumps", str(dumped[0]), "--hf", model, "--tolerance"]
    assert main([*args, "1e-4", "--all"]) == 0
    text = capsys.readouterr().out
    # prompts only: what decodes has its tokens in other steps
    assert "1 steps compared, 2 have no counterpart" in text and "no difference above" in text
    names = [line.split()[1] for line in text.splitlines() if line.startswith("step-")]
    layers = [f"layers.{n}{part}" for n in range(3) for part in (".attention", ".mlp", "")]
    assert names == ["embed", *layers, "norm", "logits"]
    assert main([*args, "0"]) == 1


def test_the_first_difference_is_named(
    dumped: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(dumped[0], tmp_path / "b")
    assert main(["compare-dumps", str(dumped[0]), str(tmp_path / "b")]) == 0
    assert "3 steps compared, 0 have no" in capsys.readouterr().out
    path = tmp_path / "b" / "TP0" / "step-000001.safetensors"
    step = load_file(path)
    step["layers.1.mlp"][0, 3] += 2.0
    step["logits"][0, 0] += 50.0
    save_file(step, path)
    assert main(["compare-dumps", str(dumped[0]), str(tmp_path / "b")]) == 1
    text = capsys.readouterr().out
    assert "first difference: step-000001 layers.1.mlp" in text and "max abs 2.000e+00" in text
    path.unlink()
    assert main(["compare-dumps", str(dumped[0]), str(tmp_path / "b")]) == 0
    assert "2 steps compared, 1 have no counterpart" in capsys.readouterr().out


def test_inputs_of_layers_are_injected(dumped: tuple[Path, list[int]], tmp_path: Path) -> None:
    given = load_file(dumped[0] / "TP0" / "step-000000.safetensors")
    given["layers.0"] *= 2.0
    save_file(given, tmp_path / "given.safetensors")
    options = {"debug_tensor_dump_input_file": str(tmp_path / "given.safetensors")}
    _run(tmp_path, 2, debug_tensor_dump_inject=True, debug_tensor_dump_prefill_only=True, **options)
    (path,) = (tmp_path / "TP0").iterdir()  # none of the step that decodes
    got = load_file(path)
    assert torch.equal(got["layers.0.mlp"], given["layers.0.mlp"])
    assert torch.equal(got["layers.0"] * 2.0, given["layers.0"])  # is computed, and not used
    branches = got["layers.1.attention"] + got["layers.1.mlp"]
    torch.testing.assert_close(got["layers.1"], given["layers.0"] + branches)
    assert torch.equal(got["layers.2.attention"], given["layers.2.attention"])


def test_prompts_and_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    for text, rows in (("[1, 2]", [[1, 2]]), ("[[1, 2], [3]]", [[1, 2], [3]])):
        path.write_text(text)
        assert prompts_of(path) == rows
    for text in ("[1.5]", "[]", "{", "3", "[[[1]]]", "[[1], []]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--debug-tensor-dump-input-file"):
            prompts_of(path)
    assert main(["compare-dumps", str(tmp_path), str(tmp_path)]) == 2
    assert main(["compare-dumps", str(tmp_path)]) == 2
    with pytest.raises(ConfigError, match="is no dump"):
        _run(tmp_path, debug_tensor_dump_inject=True, debug_tensor_dump_input_file=str(path))
