"""The name of an architecture or a kind of model stands in tables that describe it, and nowhere in
code that runs: what differs is a field of a record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import radixlm
from radixlm.arch.registry import ARCHITECTURES

SOURCE = Path(radixlm.__file__).parent
# tables of defaults, descriptions, and what their prompts and answers look like
ALLOWED = ("arch/families/", "arch/registry.py", "models/custom/", "text/")
NAME = re.compile(r"\b[A-Z][A-Za-z0-9_]*For(?:CausalLM|ConditionalGeneration|\w*Classification)\b")
ASKED = re.compile(r"(?:model_type|architectures?(?:\[0\])?)\s*(?:==|!=|\bin\b)\s*[\"'(\[{]")


def _files() -> list[Path]:
    files = sorted(SOURCE.rglob("*.py"))
    return [f for f in files if not f.relative_to(SOURCE).as_posix().startswith(ALLOWED)]


@pytest.mark.parametrize("pattern", [NAME, ASKED], ids=["named", "asked for"])
def test_no_code_knows_an_architecture(pattern: re.Pattern[str]) -> None:
    found = [
        f"{file.relative_to(SOURCE)}: {match[0]}"
        for file in _files()
        for match in pattern.finditer(file.read_text())
        if not match[0].startswith("AutoModel")  # a class of transformers that takes any
    ]
    assert found == []


def test_the_patterns_see_what_they_are_for() -> None:
    named = [name for name in ARCHITECTURES if NAME.fullmatch(name)]
    assert len(named) > 200
    assert ASKED.search('if config.model_type == "llama":')
    assert ASKED.search('c.architecture in ("A", "B")')
    assert len(_files()) > 100
