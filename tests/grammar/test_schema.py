"""Rewritten schemas must accept exactly what the given ones do."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from radixlm.grammar.schema import without_property_names

OBJECTS: list[Any] = [{}, {"a": 1}, {"ab": "x"}, {"abc": 1, "a": 2}, {"x": {"abc": 1}}, {"a\nb": 1}]


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"maxLength": 2}},
        {"propertyNames": {"minLength": 2, "type": "string"}},
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        {"propertyNames": {"enum": ["a", "ab"]}},
        {"propertyNames": {"const": "a"}, "additionalProperties": False},
        {"additionalProperties": {"propertyNames": {"maxLength": 1}}},
        {"anyOf": [{"propertyNames": {"maxLength": 1}}, {"required": ["abc"]}]},
    ],
)
def test_same_objects_pass(schema: dict[str, Any]) -> None:
    made = without_property_names(schema)
    assert "propertyNames" not in str(made)
    before, after = (jsonschema.Draft202012Validator(s) for s in (schema, made))
    verdicts = [before.is_valid(value) for value in OBJECTS]
    assert verdicts == [after.is_valid(value) for value in OBJECTS]
    assert len(set(verdicts)) == 2


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"propertyNames": {"type": "string"}}},
        {"enum": [{"propertyNames": {"maxLength": 2}}]},
        {"propertyNames": {"not": {"const": "a"}}},
        {"propertyNames": {"maxLength": 2, "pattern": "a"}},
        {"propertyNames": {"maxLength": 2}, "patternProperties": {"a": {}}},
        True,
    ],
)
def test_what_cannot_be_told_stays(schema: Any) -> None:
    assert without_property_names(schema) == schema
