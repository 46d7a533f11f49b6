"""docs/parsers.md is generated from the parsers and is current."""

from pathlib import Path

from scripts.pages.parsers import render

from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tools import registry as tools

PAGE = Path(__file__).parents[3] / "docs" / "parsers.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render()


def test_every_name_has_a_row() -> None:
    page = render()
    assert all(f"| `{name}` |" in page for name in (*tools.NAMES, *reasoning.NAMES))
