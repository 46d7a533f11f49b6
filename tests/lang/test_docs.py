"""The programs of the frontend's pages run as they are written."""

import re
from pathlib import Path
from typing import Any

import pytest

import radixlm as sgl

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.S)


def test_the_first_program_runs() -> None:
    names: dict[str, Any] = {}
    exec(blocks("frontend.md")[0], names)
    assert all(state["answer"] and state["alive"] in ("yes", "no") for state in names["states"])


def test_the_ten_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    found = blocks("frontend-tutorial.md")
    try:
        for block in found:
            exec(block, names)
    finally:
        sgl.set_default_backend(None)
        if "engine" in names:
            names["engine"].shutdown()
    shown = capsys.readouterr().out
    assert len(found) == 11 and "42" in shown.splitlines()[0]
    assert names["ticket"].kind in ("bug", "idea") and names["ticket"].priority in (1, 2, 3)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 9
    assert len(names["states"]) == 8 and names["trace"]["cached_tokens"] > 0
    assert (tmp_path / "trace.html").stat().st_size > 1000
