"""The generated page of architectures is up to date."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.pages.models import render

from tests.fakes.tiny_checkpoint import ARCHITECTURES

DOCS = Path(__file__).parents[2] / "docs"


def test_every_decoder_has_a_small_measured_error() -> None:
    measured = json.loads((DOCS / "parity.json").read_text())
    assert set(measured) == set(ARCHITECTURES), "run scripts/parity"
    assert max(measured.values()) < 1e-4


def test_page_is_current() -> None:
    assert (DOCS / "models.md").read_text() == render(), "run scripts/docs"
