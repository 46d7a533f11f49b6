"""Rewritten schemas have the same valid documents, and what remains is named."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.fakes.quick import first
from tests.grammar.test_mask_sizes import BytesTokenizer

from radixlm.base.errors import InvalidRequest
from radixlm.grammar.compile import create_backend
from radixlm.grammar.spec import GrammarSpec, Matcher
from radixlm.text.held_schema import hold, unheld_keywords
from radixlm.text.negated_schema import negated

COLOUR = {"enum": ["red", "green", 3]}
SHAPE = {"type": "object", "properties": {"c": COLOUR, "a": {"type": "integer"}, "b": {}}}
DOCUMENTS: list[Any] = [5, "x", True, None, [], [1], [1, 1], {"c": "blue"}, {}]
DOCUMENTS += [
    dict(zip(names, values, strict=True))
    for size in (1, 2, 3)
    for names in itertools.combinations("abck", size)
    for values in itertools.product(["red", 3, 1, "y"], repeat=size)
]
HELD: list[Any] = [
    {"dependentRequired": {"a": ["b", "c"], "c": []}},
    {"type": "object", "dependentRequired": {"a": ["b"], "b": ["c"]}, "required": ["a"]},
    {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}, "c": False, "b": True}},
    {**SHAPE, "if": {"properties": {"c": {"const": "red"}}}, "then": {"required": ["a"]}},
    {
        **SHAPE,
        "if": {"properties": {"c": {"const": "red"}}, "required": ["c"]},
        "then": {"required": ["a"]},
        "else": {"required": ["b"]},
    },
    {
        **SHAPE,
        "required": ["c"],
        "if": {"properties": {"c": {"enum": [3, "green", 9]}}},
        "then": {"properties": {"a": False}},
    },
    {**SHAPE, "if": {"properties": {"c": {"const": "none"}}}, "then": False},
    {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": True}, {"type": "object"}]},
    {"oneOf": [{"enum": [5, "red"]}, {"enum": [3, True]}]},
    {
        "$defs": {"x": {"const": 3}, "y": {"type": "string"}},
        "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]}
            for k in ("red", "y", 1)
        ]
    },
    {"type": "array", "uniqueItems": True, "maxItems": 1.0},
    {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True},
    {"if": {"type": "string"}, "minContains": 3, "then": True, "properties": {"not": {}}},
    {"contains": {"const": 1}, "minContains": 0},
    {"const": {"not": 1}, "default": {"if": 1}},
    {"if": {"type": "string"}, "else": {"type": "null"}},
    {**SHAPE, "if": {"properties": {"a": {"const": 1}}}, "then": False},
    {**SHAPE, "if": {"required": ["a", "b"]}, "then": {"required": ["c"]}},
    {"if": {"minimum": 4}, "then": {"const": 5}, "else": {"not": {"enum": [3, "x", None]}}},
    {"not": {"type": ["string", "object"]}},
    {"not": {"required": ["a"], "properties": {"b": {"const": "y"}, "c": True}}},
    {"not": {"anyOf": [{"type": "array"}, {"enum": [True, 5.0, "re"]}]}},
    {"not": {"allOf": [{"minProperties": 1}, {"not": {"required": ["a"]}}]}},
    {"not": {}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "string"}, {"minLength": 4}, {"type": "array"}]},
    {"type": "array", "contains": {"const": 1}, "maxItems": 4},
    {"contains": {"const": 1}, "minContains": 2},
    {"contains": {"const": 1}, "maxContains": 1},
    {"contains": {"const": 1}, "maxContains": 2, "minContains": 0, "maxItems": 3},
    {"type": "array", "items": COLOUR, "uniqueItems": True},
    {"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {"items": {"enum": list(range(9))}, "uniqueItems": True, "maxItems": 2},
    {"properties": {"a": True}, "unevaluatedProperties": False},
    {
        "allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}],
        "properties": {"k": True},
        "unevaluatedProperties": {"const": 3},
    },
    {"properties": {"a": True}, "additionalProperties": True, "unevaluatedProperties": False},
    {"prefixItems": [{"const": 1}], "unevaluatedItems": False},
    {"propertyNames": {"pattern": "^[abc]$"}},
    True,
]
UNHELD: list[tuple[Any, list[str]]] = [
    ({"not": {"type": "integer"}}, ["not"]),
    ({"not": {"const": [1]}}, ["not"]),
    ({"items": {"contains": {"const": []}, "maxContains": 2}}, ["contains", "maxContains"]),
    ({"contains": {"const": 1}, "minContains": 5, "maxItems": 40}, ["contains", "minContains"]),
    ({"items": {"enum": list(range(9))}, "uniqueItems": True}, ["uniqueItems"]),
    ({"uniqueItems": True}, ["uniqueItems"]),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["oneOf"]),
    ({"if": {"pattern": "^a"}, "else": {"type": "null"}}, ["else", "if"]),
    ({"anyOf": [{}], "unevaluatedProperties": False}, ["unevaluatedProperties"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 4}]}, ["oneOf"]),
    ({"propertyNames": {"anyOf": [{"maxLength": 1}, {"pattern": "b"}]}}, ["propertyNames"]),
    ({"items": {"type": "string", "format": "regex"}}, ["format"]),
    ({"properties": {"p": {"$dynamicRef": "#"}}}, ["$dynamicRef"]),
]


def is_valid(document: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(document)


@pytest.mark.parametrize("schema", HELD, ids=lambda s: json.dumps(s)[:60])
def test_a_rewritten_schema_has_the_same_documents(schema: Any) -> None:
    before = json.dumps(schema)
    held = hold(schema)
    assert json.dumps(schema) == before
    assert unheld_keywords(schema) == []
    for document in DOCUMENTS:
        assert is_valid(document, held) == is_valid(document, schema), document


@pytest.mark.parametrize(("schema", "names"), UNHELD, ids=lambda s: json.dumps(s)[:60])
def test_what_cannot_be_held_is_named(schema: Any, names: list[str]) -> None:
    assert unheld_keywords(schema) == names
    for document in DOCUMENTS:
        assert is_valid(document, hold(schema)) == is_valid(document, schema)
    backend = create_backend("llguidance", _tokenizer(), (299,), 300)
    assert backend is not None
    with pytest.raises(InvalidRequest, match="json_schema"):
        backend.compile(GrammarSpec("json_schema", json.dumps(schema), is_strict=True))


def test_a_schema_that_is_none_is_left_to_the_compiler() -> None:
    """Wrong values of every keyword, and depth without end, raise nothing."""
    words = "if then else oneOf contains dependentRequired dependentSchemas required type enum "
    words += "properties uniqueItems maxItems minContains $ref not items unevaluatedItems"
    wrong: list[Any] = [
        5,
        None,
        "x",
        [],
        {},
        [[]],
        {"a": 5},
        {"a": [{}]},
        [5, {}],
        [{"type": [{}]}],
    ]
    for one, two in itertools.product(words.split(), repeat=2):
        for value, other in itertools.product(wrong, repeat=2):
            assert isinstance(unheld_keywords({one: value, two: other}), list)
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert unheld_keywords(deep) == []


def _tokenizer() -> Any:
    return BytesTokenizer(300)


KINDS = ("object", "object", "array", "string", "integer", "boolean", "enum", "any")


FORMATS = ("date", "date-time", "uri-reference", "json-pointer", "uri-template", "idn-hostname")
TESTS: list[Any] = [
    {"const": "a"},
    {"enum": ["ab", "b", "", 7, 8]},
    {"minimum": 7},
    {"maxLength": 1},
    {"type": "object", "properties": {"p": {"const": 1}}, "required": ["p"]},
    {"anyOf": [{"maxItems": 0}, {"not": {"required": ["q"]}}]},
]


def _draw(rng: random.Random, depth: int) -> Any:
    """A schema as programs write them, with the keywords that are hard to hold."""
    kind = rng.choice(KINDS)
    if kind == "enum" or depth == 0:
        return {"enum": rng.sample([1, 2, "a", "b", True, None], rng.randint(1, 3))}
    if kind == "any":
        word = rng.choice(["oneOf", "anyOf", "oneOf"])
        return {word: [_draw(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    schema: dict[str, Any] = {"type": kind}
    if kind == "object":
        return schema | _draw_object(rng, depth)
    if kind == "array":
        schema |= {"items": _draw(rng, depth - 1), "maxItems": rng.randint(0, 3)}
        if rng.random() < 0.3:
            schema["uniqueItems"] = True
        if rng.random() < 0.3:
            schema |= {"contains": _draw(rng, 0), "maxContains": rng.randint(1, 4)}
            schema |= rng.choice([{}, {"minContains": rng.randint(0, 2)}])
    elif kind == "string":
        schema |= rng.choice([{"maxLength": 4}, {"pattern": "^[ab]{1,3}$"}])
        schema |= rng.choice([{}, {}, {"format": rng.choice(FORMATS)}])
    elif kind == "integer":
        schema |= {"minimum": rng.randint(-5, 5), "maximum": rng.randint(6, 30)}
    if rng.random() < 0.2:
        schema[rng.choice(["not", "if"])] = rng.choice(TESTS)
        schema |= rng.choice([{"then": {"maxLength": 2, "maximum": 9}}, {"else": {"minItems": 1}}])
    return schema


def _draw_object(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    names = rng.sample("pqrs", rng.randint(1, 3))
    schema["properties"] = {name: _draw(rng, depth - 1) for name in names}
    schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    schema["additionalProperties"] = False
    if rng.random() < 0.4:
        schema["dependentRequired"] = {names[0]: [rng.choice(names)]}
    if rng.random() < 0.3:
        schema["dependentSchemas"] = {names[-1]: {"required": [names[0]]}}
    if rng.random() < 0.3:
        schema["properties"]["c"] = {"enum": ["u", "v"]}
        schema["if"] = {"properties": {"c": {"const": "u"}}}
        if rng.random() < 0.5:
            schema["if"] = schema["if"] | {"required": ["c"]}
        schema[rng.choice(["then", "else"])] = {"required": [names[0]]}
    if rng.random() < 0.1:
        schema["not"] = {"required": [names[0]]}
    return schema


def _write(matcher: Matcher, rng: random.Random) -> str | None:
    """A random document; None if it becomes long."""

    row = np.zeros(10, np.int32)
    text = bytearray()
    while len(text) < 300:
        matcher.fill_mask(row)
        bits = np.flatnonzero(np.unpackbits(row.view("u1"), bitorder="little"))
        plain = [int(t) for t in bits if 32 <= t < 127 or t == 299]
        ends = [t for t in plain if t == 299 or chr(t % 128) in '"}]']
        token = rng.choice(ends if ends and rng.random() < 0.3 else plain)
        assert matcher.accept(token)
        if token == 299:
            return text.decode()
        text.append(token)
    return None


@pytest.mark.parametrize("seed", first(2, range(4)))
def test_outputs_of_accepted_strict_schemas_are_valid(seed: int) -> None:
    rng = random.Random(seed)
    backend = create_backend("llguidance", _tokenizer(), (299,), 300)
    assert backend is not None
    num_accepted = num_written = 0
    for _ in range(120):
        schema = _draw(rng, 3)
        try:
            grammar = backend.compile(GrammarSpec("json_schema", json.dumps(schema), True))
        except InvalidRequest:
            continue
        num_accepted += 1
        for _ in range(3):
            text = _write(grammar.matcher(), rng)
            if text is not None:
                num_written += 1
                jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert num_accepted > 40 and num_written > 80


def test_a_complement_has_the_other_documents() -> None:
    rng = random.Random(5)
    num_held = 0
    for _ in range(120):
        schema = rng.choice([*TESTS, _draw(rng, 2)])
        schema = {key: value for key, value in schema.items() if rng.random() < 0.6}
        other = negated(schema)
        num_held += other is not None
        for document in DOCUMENTS if other is not None else ():
            assert is_valid(document, schema) != is_valid(document, other), (schema, other)
    assert num_held > 25


GOOD: dict[str, list[Any]] = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31"],
    "date-time": ["2024-02-29T23:59:59.5+01:30"],
    "json-pointer": ["", "/a~0/b~1"],
    "relative-json-pointer": ["0#", "12/a/0"],
    "uri-reference": ["a/b?c#d", "http://example.com/x%20y", "", "#z"],
    "uri-template": ["/x{?q,r*}", "a{/b:3}"],
    "int32": [5, -(1 << 31), "x"],
    "binary": ["anything"],
}
BAD: dict[str, list[Any]] = {
    "date": ["2023-02-29", "1900-02-29", "0000-01-01"],
    "date-time": ["2024-02-30T00:00:00Z", "1-1-1T0:0:0Z"],
    "json-pointer": ["a", "/a~"],
    "relative-json-pointer": ["/a", "01#"],
    "uri-reference": ["a b", "%1", "1:2"],
    "uri-template": ["{", "{a b}"],
    "int32": [1 << 31],
}


@pytest.mark.parametrize("name", GOOD)
def test_formats_allow_valid_strings_only(name: str) -> None:
    backend = create_backend("llguidance", _tokenizer(), (299,), 300)
    assert backend is not None
    grammar = backend.compile(GrammarSpec("json_schema", json.dumps({"format": name}), True))
    for document in GOOD[name] + BAD.get(name, []):
        matcher = grammar.matcher()
        fits = all(matcher.accept(byte) for byte in json.dumps(document).encode())
        assert (fits and matcher.accept(299)) == (document in GOOD[name]), document


def test_schemas_do_not_grow_without_end() -> None:
    """Keywords that stand for several options, in each other and side by side."""
    nests = [
        lambda schema: {"if": schema, "then": {"minLength": 1}},
        lambda schema: {"contains": schema},
        lambda schema: {"oneOf": [schema, {"minLength": 3}, {"type": "string"}]},
    ]
    for nest in nests:
        schema: Any = {"type": "object", "properties": {"a": {"const": 1}}}
        for _ in range(40):
            schema = nest(schema)
        wide = {"properties": {str(i): schema for i in range(30)}}
        assert len(json.dumps(hold(wide))) < 3_000_000


def test_the_number_of_rewritings_is_bounded() -> None:
    """Schemas come from clients, and are read on the event loop."""
    tried = [{"contains": {"const": 1}, "maxContains": 2, "maxItems": 9}, {"not": {"enum": ["a"]}}]
    apart = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    for schema in tried:
        wide = {"properties": {str(i): schema for i in range(1000)}}
        held = hold(wide)["properties"].values()
        assert 10 <= sum(one.keys().isdisjoint(("contains", "not")) for one in held) <= 200
    many = {"properties": {str(i): apart for i in range(1000)}}
    assert unheld_keywords(many) == []
