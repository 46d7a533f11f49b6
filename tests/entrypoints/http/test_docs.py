"""docs/api.md is what the routes say."""

from __future__ import annotations

from pathlib import Path

from radixlm.entrypoints.http.openai.protocol import (
    IGNORED,
    UNBUILT,
    ChatRequest,
    CompletionRequest,
)
from radixlm.entrypoints.http.openapi.docs import render

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_is_current() -> None:
    again = "run `python -m radixlm.entrypoints.http.openapi.docs docs/api.md`"
    assert PAGE.read_text(encoding="utf-8") == render(), again


def test_every_field_that_is_refused_or_ignored_exists() -> None:
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert set(UNBUILT) <= fields and fields >= IGNORED and not IGNORED & set(UNBUILT)
