"""The generated page of architectures is up to date."""

from __future__ import annotations

from pathlib import Path

from radixlm.arch.docs import page


def test_page_is_current() -> None:
    committed = Path(__file__).parents[2] / "docs" / "models.md"
    assert committed.read_text() == page(), "run scripts/docs"
