"""docs/server-arguments.md is generated from the options and is current."""

from __future__ import annotations

from pathlib import Path

from scripts.pages.server_arguments import render

from radixlm.config.option import options

PAGE = Path(__file__).parents[2] / "docs" / "server-arguments.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run scripts/docs"


def test_every_flag_and_alias_has_a_row() -> None:
    page = render()
    for option in options().values():
        assert f"| `{option.dashed}`" in page
        for alias in option.flag.aliases:
            assert f"<br>`{alias}`" in page
