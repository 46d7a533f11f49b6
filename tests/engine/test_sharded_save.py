"""Engine.save_sharded_model writes what --load-format sharded_state reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixlm import Engine
from radixlm.base.errors import InvalidRequest
from tests.fakes.tiny_checkpoint import cached_tiny

PROMPT = list(range(5, 25))
SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


def _answer(engine: Engine) -> Any:
    found = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING, return_logprob=True)
    return found["output_ids"], found["meta_info"]["output_token_logprobs"]


def _engine(path: Path, **options: Any) -> Engine:
    return Engine(model_path=str(path), device="cpu", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_an_engine_of_saved_files_answers_the_same(arch: str, tmp_path: Path) -> None:
    with _engine(cached_tiny(arch)) as engine:
        expected = _answer(engine)
        engine.save_sharded_model(str(tmp_path), max_size=20_000)
        assert _answer(engine) == expected
    assert len(list(tmp_path.glob("model-rank-0-part-*.safetensors"))) > 1
    assert not (tmp_path / "model.safetensors").exists() and (tmp_path / "config.json").exists()
    with _engine(tmp_path, load_format="sharded_state") as engine:
        assert _answer(engine) == expected
    if arch == "Qwen3ForCausalLM":
        with _engine(tmp_path, load_format="sharded_state", tp_size=2) as engine:
            assert _answer(engine) == expected


def test_weights_that_came_later_are_saved(tmp_path: Path) -> None:
    first, second = (cached_tiny("Qwen3ForCausalLM", seed) for seed in (0, 1))
    with _engine(first) as engine:
        assert engine.update_weights_from_disk(str(second))[0]
        engine.save_sharded_model(str(tmp_path))
        expected = _answer(engine)
    with _engine(tmp_path, load_format="sharded_state") as engine:
        assert _answer(engine) == expected


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with _engine(cached_tiny("Qwen3ForCausalLM")) as engine:
        for problem, arguments in (
            ("pattern", {"path": str(tmp_path), "pattern": "model.safetensors"}),
            ("max_size", {"path": str(tmp_path), "max_size": 0.5}),
            ("path", {"path": str(file)}),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                engine.save_sharded_model(**arguments)
        assert engine.generate(input_ids=PROMPT, sampling_params=SAMPLING)["output_ids"]
    vision = {"model_path": "radix-tiny-vl", "device": "cpu"}
    with Engine(**vision) as engine, pytest.raises(InvalidRequest, match="an encoder beside it"):
        engine.save_sharded_model(str(tmp_path))
    with _engine(cached_tiny("Qwen3ForCausalLM"), load_format="dummy") as engine:
        with pytest.raises(InvalidRequest, match="no named tensors"):
            engine.save_sharded_model(str(tmp_path))
