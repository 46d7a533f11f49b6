"""Untyped text becomes JSON of the schema's type, or stays a string."""

import json
from typing import Any

import pytest

from radixlm.text.tools.base import ToolSpec
from radixlm.text.tools.schema import convert, parameter_types

CASES: list[tuple[str, Any, Any]] = [
    ("12", {"type": "string"}, "12"),
    ("null", {"type": "string"}, "null"),
    (" a ", {"type": "string"}, " a "),
    ("12", {"type": "integer"}, 12),
    (" -7 ", {"type": "integer"}, -7),
    ("3.0", {"type": "integer"}, 3),
    ("007", {"type": "integer"}, 7),
    ("3.5", {"type": "integer"}, "3.5"),
    ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ("3.5", {"type": "number"}, 3.5),
    ("3", {"type": "number"}, 3),
    (".5", {"type": "number"}, 0.5),
    ("1e999", {"type": "number"}, "1e999"),
    ("nan", {"type": "number"}, "nan"),
    ("True", {"type": "boolean"}, True),
    ("yes", {"type": "boolean"}, "yes"),
    ("None", {"type": ["integer", "null"]}, None),
    ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
    ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
    ("{'a': True}", {"type": "object"}, {"a": True}),
    ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
    ("[1, 2]", {"type": "array"}, [1, 2]),
    ("(1, 2)", {"type": "array"}, [1, 2]),
    ("[1, 2]", {"type": "object"}, "[1, 2]"),
    (r"[{\"a\": \"say \\\"b\\\"\"}]", {"type": "array"}, [{"a": 'say "b"'}]),
    ("[" * 5000, {"type": "array"}, "[" * 5000),
    ("{1, 2}", {"type": "object"}, "{1, 2}"),
    ("12", {"$ref": "#/$defs/whole"}, 12),
    ("12", {"$ref": "#/$defs/loop"}, 12),
    ("12", {"enum": ["12", "13"]}, "12"),
    ("12", {"enum": [12, 13]}, 12),
    ("12", {"const": "12"}, "12"),
    ("12", {"type": "STR"}, "12"),
    ("12", {}, 12),
    ("true", {}, True),
    ("[1]", {}, [1]),
    ("(1)", {}, "(1)"),
    ('"quoted"', {}, '"quoted"'),
    ("plain", {}, "plain"),
    ("12", "nonsense", 12),
]


@pytest.mark.parametrize(("text", "schema", "value"), CASES)
def test_convert(text: str, schema: Any, value: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"p": schema},
        "$defs": {"whole": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    types = parameter_types(ToolSpec("f", parameters), "p")
    assert json.loads(convert(text, types)) == value


def test_unknown_parameters_are_converted_by_their_text() -> None:
    assert parameter_types(None, "p") == frozenset()
    assert parameter_types(ToolSpec("f"), "p") == frozenset()
    additional = ToolSpec("f", {"additionalProperties": {"type": "string"}})
    assert parameter_types(additional, "p") == {"string"}


def test_lone_surrogates_are_replaced() -> None:
    assert convert('["\\ud800"]', frozenset(("array",))) == '["?"]'
