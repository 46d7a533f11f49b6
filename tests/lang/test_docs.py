"""The first program of docs/frontend.md runs as it is written."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "frontend.md"


def test_the_first_program_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[0]
    names: dict[str, object] = {}
    exec(code, names)
    states = names["states"]
    assert isinstance(states, list)
    assert all(state["answer"] and state["alive"] in ("yes", "no") for state in states)
