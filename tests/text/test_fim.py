"""Fill-in-the-middle prompts by name and by file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes.toy_tokenizer import save, words

from radixlm.base.errors import ConfigError
from radixlm.text.fim import FIM_TEMPLATES, detect_fim, load_fim_template
from radixlm.text.tokenizer import load_tokenizer


def test_built_in_names() -> None:
    expected = {
        "deepseek_coder": "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
        "star_coder": "<fim_prefix>a<fim_suffix>b<fim_middle>",
        "qwen_coder": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    }
    for name, prompt in expected.items():
        assert load_fim_template(name).render("a", "b") == prompt
        assert load_fim_template(name).render("a", "") == "a"
        assert load_fim_template(name).render("a", None) == "a"


def test_a_file(tmp_path: Path) -> None:
    given = {"name": "x", "fim_begin_token": "B", "fim_middle_token": "M", "fim_end_token": "E"}
    file = tmp_path / "fim.json"
    for position, prompt in (("MIDDLE", "BaMbE"), ("END", "BaEbM")):
        file.write_text(json.dumps({**given, "fim_position": position}))
        assert load_fim_template(str(file)).render("a", "b") == prompt
    for bad in ("{", "[]", json.dumps(given), json.dumps({**given, "fim_position": "LEFT"})):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="completion-template"):
            load_fim_template(str(file))
    with pytest.raises(ConfigError, match="completion-template"):
        load_fim_template("nothing")


def test_a_template_is_found_by_its_tokens(tmp_path: Path) -> None:
    backend, found = words(), []
    for tokens in ([], ["<fim_prefix>", "<fim_suffix>"], ["<fim_middle>"]):
        backend.add_special_tokens(tokens)
        found.append(detect_fim(load_tokenizer(save(backend, tmp_path))))
    assert found == [None, None, FIM_TEMPLATES["star_coder"]]
