"""Names of architectures and model types stand in registries and tables only. Code that runs reads
a field of a record instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import radixlm
from radixlm.arch.registry import ARCHITECTURES

SOURCE = Path(radixlm.__file__).parent
# tables of defaults and descriptions, and formats of prompts and answers
ALLOWED = (
    "arch/families/",
    "arch/registry.py",
    "arch/media/registry.py",
    "arch/media/config_json.py",
    "models/custom/",
    "text/",
)
NAME = re.compile(r"\b[A-Z][A-Za-z0-9_]*For(?:CausalLM|ConditionalGeneration|\w*Classification)\b")
ASKED = re.compile(r"(?:model_type|architectures?(?:\[0\])?)\s*(?:==|!=|\bin\b)\s*[\"'(\[{]")


def _files() -> list[Path]:
    files = sorted(SOURCE.rglob("*.py"))
    return [f for f in files if not f.relative_to(SOURCE).as_posix().startswith(ALLOWED)]


@pytest.mark.parametrize("pattern", [NAME, ASKED], ids=["named", "asked for"])
def test_no_code_tests_an_architecture(pattern: re.Pattern[str]) -> None:
    found = [
        f"{file.relative_to(SOURCE)}: {match[0]}"
        for file in _files()
        for match in pattern.finditer(file.read_text())
        if not match[0].startswith("AutoModel")  # a transformers class for any model
    ]
    assert found == []


def test_the_patterns_find_their_targets() -> None:
    named = [name for name in ARCHITECTURES if NAME.fullmatch(name)]
    assert len(named) > 200
    assert ASKED.search('if config.model_type == "llama":')
    assert ASKED.search('c.architecture in ("A", "B")')
    assert len(_files()) > 100
