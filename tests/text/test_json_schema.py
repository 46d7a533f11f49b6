"""Closed schemas forbid undeclared properties, and nothing that the original schema requires or
names."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.text.json_schema import close_objects, standard_types

INTEGER = {"type": "integer"}
A: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER}}
B: dict[str, Any] = {"type": "object", "properties": {"b": INTEGER}}
NODE: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "n": {"$ref": "#/$defs/N"}}}


def accepts(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, {"a": 1}, {"a": 1, "b": 1}),
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, {"xa": 1}, {"a": 1}),
        ({"properties": {"o": A}}, {"o": {"a": 1}}, {"o": {"b": 1}}),
        ({"type": "array", "items": A}, [{"a": 1}], [{"b": 1}]),
        ({"additionalProperties": A}, {"x": {"a": 1}}, {"x": {"b": 1}}),
        ({"anyOf": [A, {"type": "null"}]}, {"a": 1}, {"b": 1}),
        ({"allOf": [A], "title": "T"}, {"a": 1}, {"b": 1}),
        ({"$ref": "#/$defs/N", "$defs": {"N": NODE}}, {"n": {"a": 1}}, {"n": {"b": 1}}),
        ({**A, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]}, {"a": 1}, {"a": 1, "b": 1}),
        ({**A, "if": {"required": ["a"]}, "then": {}}, {"a": 1}, {"b": 1}),
        ({"prefixItems": [INTEGER, A]}, [1, {"a": 1}], [1, {"a": 1}, 2]),
        ({"prefixItems": [A], "items": INTEGER}, [{"a": 1}, 2], [{"b": 1}]),
        ({"properties": {"properties": A}}, {"properties": {"a": 1}}, {"properties": {"b": 1}}),
    ],
)
def test_undeclared_properties_are_forbidden(schema: Any, good: Any, bad: Any) -> None:
    assert accepts(schema, bad)
    made = close_objects(schema)
    assert accepts(made, good) and not accepts(made, bad)
    assert close_objects(made) == made


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"b": 1}),
        ({**A, "additionalProperties": True}, {"b": 1}),
        ({**A, "additionalProperties": {"type": "string"}}, {"b": "x"}),
        ({**A, "unevaluatedProperties": True}, {"b": 1}),
        ({**A, "propertyNames": {"maxLength": 1}}, {"b": 1}),
        ({**A, "required": ["a", "b"]}, {"a": 1, "b": 1}),
        ({"allOf": [A, B]}, {"a": 1, "b": 1}),
        ({**A, "allOf": [B]}, {"a": 1, "b": 1}),
        ({**A, "anyOf": [B, {}]}, {"a": 1, "b": 1}),
        ({**A, "$ref": "#/$defs/B", "$defs": {"B": B}}, {"a": 1, "b": 1}),
        ({"allOf": [{"$ref": "#/$defs/B"}, A], "$defs": {"B": B}}, {"a": 1, "b": 1}),
        (
            {
                "allOf": [{"$ref": "#/$defs/C"}, A],
                "$defs": {"B": B, "C": {"$ref": "#/$defs/B"}},
            },
            {"a": 1, "b": 1},
        ),
        ({**A, "dependentSchemas": {"a": B}}, {"a": 1, "b": 1}),
        ({**A, "if": {"required": ["a"]}, "then": B}, {"a": 1, "b": 1}),
        ({"not": A, "type": "object"}, {"a": "x"}),
        ({"prefixItems": [INTEGER], "minItems": 2}, [1, 2]),
        ({"prefixItems": [INTEGER], "items": INTEGER}, [1, 2]),
        ({"enum": [{"properties": {"a": 1}}]}, {"properties": {"a": 1}}),
        ({"const": {"properties": {}}}, {"properties": {}}),
        (True, 3),
        ({"properties": {"a~/b": {"allOf": [{"$ref": "#/properties/a~0~1b/x"}, A], "x": B}}}, 3),
    ],
)
def test_what_the_schema_names_or_demands_stays_allowed(schema: Any, value: Any) -> None:
    assert accepts(schema, value)
    assert accepts(close_objects(schema), value)


LEAVES = st.sampled_from([INTEGER, {"type": "null"}, True, {"$ref": "#/$defs/N"}, {"items": 3}, []])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(
        st.sampled_from(["properties", "anyOf", "allOf", "$ref", "items", "prefixItems", "not"]),
        st.one_of(
            inner,
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            st.just("#/properties/a"),
        ),
        max_size=3,
    ),
    max_leaves=12,
)


@given(SCHEMAS)
def test_nonsense_does_no_harm(schema: Any) -> None:
    """Any client value comes back with at most added keys, and a second pass changes nothing."""
    before = repr(schema)
    made = close_objects(schema)
    assert repr(schema) == before
    assert close_objects(made) == made
    if isinstance(schema, dict):
        assert schema.keys() <= made.keys()


def test_large_schemas_take_linear_time() -> None:
    many = {f"p{i}": {"type": "int32", "enum": [i]} for i in range(30_000)}
    listed = {"anyOf": [{"type": "str"} for _ in range(30_000)]}
    # each definition opens the one before it
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}, A]} for i in range(2_000)}
    start = time.thread_time()
    assert standard_types({"properties": many})["properties"]["p7"]["type"] == "integer"
    assert standard_types(listed)["anyOf"][-1] == {"type": "string"}
    assert close_objects({"properties": many})["additionalProperties"] is False
    assert close_objects({"$defs": chain, "$ref": "#/$defs/d1999"})["$defs"] == chain
    assert time.thread_time() - start < 4


def test_types_have_the_names_of_the_standard() -> None:
    """As SGLang rewrites the schemas of tools that databases and ORMs write."""
    schema = {
        "type": "dict",
        "properties": {
            "type": {"type": "varchar(9)"},
            "many": {
                "type": "list[str]",
                "items": {"anyOf": [{"type": "int32"}, {"type": "FLOAT"}]},
            },
            "maybe": {"type": ["bool", "boolean", "null"]},
        },
    }
    assert standard_types(schema) == {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "many": {
                "type": "array",
                "items": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
            },
            "maybe": {"type": ["boolean", "null"]},
        },
    }
    assert standard_types(True) is True


@pytest.mark.parametrize("name", ["unknown", "internal", "list_price", "", 5])
def test_a_name_that_is_no_type_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="is none of string, boolean"):
        standard_types({"properties": {"a": {"type": [name]}}})
