"""Rewritten schemas accept exactly the same objects as the originals."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.grammar.spec import GrammarSpec, check_size, read_json
from radixlm.text.property_names import without_property_names

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
def test_undecidable_schemas_stay_unchanged(schema: Any) -> None:
    assert without_property_names(schema) == schema


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("json_schema", json.dumps({str(i): 1 for i in range(2049)})), "2049 entries"),
        (GrammarSpec("json_schema", "[" + "1," * (1 << 16) + "1]"), "a list with 65537"),
        (GrammarSpec("json_schema", "[" * 101 + "]" * 101), "100 deep"),
        (GrammarSpec("ebnf", "a ::= b\n" * 1025), "1024 rules"),
        (GrammarSpec("regex", "a" * 70_000), "70000 characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_size_is_limited_before_compilation(spec: GrammarSpec, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_size(spec)
        read_json(spec)
