"""docs/server-arguments.md is generated from the options and is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixlm.config.docs import main, render
from radixlm.config.option import options

PAGE = Path(__file__).parents[2] / "docs" / "server-arguments.md"


def test_the_page_is_current() -> None:
    again = "run `python -m radixlm.config.docs docs/server-arguments.md`"
    assert PAGE.read_text(encoding="utf-8") == render(), again


def test_every_flag_and_alias_has_a_row() -> None:
    page = render()
    for option in options().values():
        assert f"| `{option.dashed}`" in page
        for alias in option.flag.aliases:
            assert f"<br>`{alias}`" in page


def test_it_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out == render()
    main([str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == render()
