"""docs/api.md is generated from the routes and is current."""

from __future__ import annotations

from pathlib import Path

from scripts.pages.api import render

from radixlm.entrypoints.http.openapi.document import MODELS
from radixlm.entrypoints.request_model import table_fields
from radixlm.wire.fields import FIELDS
from radixlm.wire.sampling_params import SAMPLING_FIELDS

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run scripts/docs"


def test_every_field_that_is_refused_or_ignored_exists() -> None:
    for model in MODELS.values():
        named = {name for name, field in table_fields(model.api).items() if field.state != "works"}
        assert named <= set(model.model_fields), model


def test_a_name_of_an_api_means_one_field() -> None:
    names = [pair for field in (*SAMPLING_FIELDS, *FIELDS) for pair in field.names.items()]
    assert len(names) == len(set(names))
